"""A deleted row as the claim: every item once, and what a crash and a failure do."""

import pytest
from example_rig import ExampleRig
from sqlalchemy import text

from examples.delete_returning import by_hand, move, with_pgqueue
from examples.payments import UnknownOrder

pytestmark = pytest.mark.journey

BY_HAND = by_hand.__name__
WITH_PGQUEUE = with_pgqueue.__name__


def enqueue_by_hand(rig: ExampleRig, how_many: int) -> None:
    by_hand.create_tables(rig.engine)
    by_hand.enqueue(rig.engine, how_many)


def enqueue_with_pgqueue(rig: ExampleRig, items: range) -> None:
    with_pgqueue.queue.bind(rig.engine)
    with with_pgqueue.queue.session() as session, session.begin():
        with_pgqueue.pay_item.enqueue_many(session, [(item,) for item in items])


def work_by_hand(rig: ExampleRig, *, items: int, processes: int) -> None:
    enqueue_by_hand(rig, items)
    started = [rig.start_by_hand(BY_HAND) for _ in range(processes)]
    for process in started:
        process.until_ended()


def work_with_pgqueue(rig: ExampleRig, *, items: int, processes: int) -> None:
    enqueue_with_pgqueue(rig, range(1, items + 1))
    started = [rig.start_by_hand(WITH_PGQUEUE) for _ in range(processes)]
    for process in started:
        process.until_ended()


def test_by_hand_eight_processes_take_each_of_10_000_items_once(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        work_by_hand(rig, items=10_000, processes=8)

        assert rig.paid() == list(range(1, 10_001))


def test_with_pgqueue_eight_processes_take_each_of_10_000_items_once(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        work_with_pgqueue(rig, items=10_000, processes=8)

        assert rig.paid() == list(range(1, 10_001))
        assert rig.rows("SELECT DISTINCT outcome, attempts FROM pgqueue.jobs") == [("succeeded", 1)]


def test_by_hand_the_item_of_a_killed_worker_is_free_again(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_by_hand(rig, 3)

        rig.kill_at_work(lambda: rig.start_by_hand(BY_HAND), "payments", order_id=2)

        assert rig.column("SELECT id FROM items FOR UPDATE SKIP LOCKED") == [2, 3]
        assert rig.paid() == [1]


def test_with_pgqueue_the_message_of_a_killed_claim_is_free_again(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_with_pgqueue(rig, range(1, 4))

        rig.kill_at_work(lambda: rig.start_by_hand(WITH_PGQUEUE), "payments", order_id=2)

        free = "SELECT target_id FROM pgqueue.message_queue ORDER BY id FOR UPDATE SKIP LOCKED"
        assert rig.column(free) == [2, 3]
        with_pgqueue.work_until_empty(rig.engine)
        assert rig.paid() == [1, 2, 3]
        assert rig.column("SELECT attempts FROM pgqueue.jobs ORDER BY id") == [1, 1, 1]


def test_by_hand_an_item_that_fails_comes_first_for_ever(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_by_hand(rig, 3)
        rig.run("INSERT INTO items VALUES (-1)")

        for _ in range(20):
            with pytest.raises(UnknownOrder):
                by_hand.work_one(rig.engine)

        assert rig.column("SELECT id FROM items ORDER BY id") == [-1, 1, 2, 3]


def test_with_pgqueue_an_item_that_fails_lets_the_others_pass(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_with_pgqueue(rig, range(-1, 4))

        with_pgqueue.work_until_empty(rig.engine)

        assert rig.paid() == [0, 1, 2, 3]
        assert rig.unfinished() == 1


def test_by_hand_an_open_claim_holds_back_the_vacuum_of_every_table(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_by_hand(rig, 1)
        rig.run("CREATE TABLE rubbish AS SELECT n FROM generate_series(1, 10000) AS n")
        in_no_transaction = rig.engine.execution_options(isolation_level="AUTOCOMMIT")

        def vacuumed() -> int:
            with in_no_transaction.connect() as connection:
                connection.execute(text("VACUUM rubbish"))
            return int(rig.scalar("SELECT pg_relation_size('rubbish')"))

        with rig.engine.connect() as at_work:
            at_work.execute(by_hand.TAKE)
            rig.run("DELETE FROM rubbish")
            assert vacuumed() > 0
            at_work.rollback()
        assert vacuumed() == 0


def test_items_move_over_while_their_worker_is_at_work(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_by_hand(rig, 3)
        with_pgqueue.queue.bind(rig.engine)

        with rig.held_up("payments", order_id=1):
            at_work = rig.start_by_hand(BY_HAND)
            rig.until_held_up(at_work)
            with with_pgqueue.queue.session() as session, session.begin():
                assert move.move(session) == 2
        at_work.until_ended()
        rig.drain(WITH_PGQUEUE)

        assert rig.column("SELECT id FROM items") == []
        assert rig.paid() == [1, 2, 3]
