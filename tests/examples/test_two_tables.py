"""Jobs and messages in two tables: what the hand-written form does, and what it loses."""

import pytest
from example_rig import ExampleProcess, ExampleRig

from examples.two_tables import by_hand, move, with_pgqueue

pytestmark = pytest.mark.journey

BY_HAND = by_hand.__name__
WITH_PGQUEUE = with_pgqueue.__name__


def test_by_hand_jobs_are_done_and_a_failing_one_has_four_attempts(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, -3)

        by_hand.work_until_empty(rig.engine)

        jobs = rig.rows("SELECT status, attempts FROM jobs ORDER BY id")
        assert jobs == [("complete", 0), ("complete", 0), ("failed", 4)]
        assert rig.paid() == [1, 2]
        assert rig.scalar("SELECT count(*) FROM message_queue") == 0


def test_with_pgqueue_the_same_is_done_and_every_error_is_kept(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.pay_order, 1, 2, -3)

        with_pgqueue.work_until_empty(rig.engine)

        jobs = rig.rows("SELECT outcome, attempts FROM pgqueue.jobs ORDER BY id")
        assert jobs == [("succeeded", 1), ("succeeded", 1), ("failed", 4)]
        assert rig.paid() == [1, 2]
        errors = rig.column("SELECT error FROM pgqueue.job_attempts")
        assert errors == ["there is no order -3"] * 4


def test_by_hand_a_killed_worker_gives_its_job_back(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2)

        rig.kill_at_work(lambda: rig.start_by_hand(BY_HAND), "payments", order_id=1)

        by_hand.work_until_empty(rig.engine)
        assert rig.paid() == [1, 2]


def test_by_hand_attempts_that_kill_the_worker_are_never_counted(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2)

        for _ in range(5):  # one more than there are attempts
            rig.kill_at_work(lambda: rig.start_by_hand(BY_HAND), "payments", order_id=1)

        jobs = rig.rows("SELECT status, attempts FROM jobs ORDER BY id")
        assert jobs == [("new", 0), ("new", 0)]  # the first kills on, the second never had a turn
        assert rig.column("SELECT target_id FROM message_queue ORDER BY id") == [1, 2]


def test_with_pgqueue_a_worker_counts_the_attempts_that_kill_it(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.pay_order, 1, 2)

        def start() -> ExampleProcess:
            return rig.start_worker(WITH_PGQUEUE, concurrency=1)

        for _ in range(4):
            rig.kill_at_work(start, "payments", order_id=1)
        start()
        rig.until_all_ended()

        jobs = rig.rows("SELECT outcome, attempts FROM pgqueue.jobs ORDER BY id")
        assert jobs == [("failed", 4), ("succeeded", 1)]
        ends = rig.column("SELECT outcome FROM pgqueue.job_attempts")
        assert ends == ["crashed"] * 4
        assert rig.paid() == [2]


def test_by_the_wrong_id_it_looks_right_while_the_ids_run_side_by_side(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2)

        with rig.engine.begin() as first, rig.engine.begin() as second:
            taken = [first.scalar(by_hand.TAKE_BY_THE_WRONG_ID)]
            taken += [second.scalar(by_hand.TAKE_BY_THE_WRONG_ID)]

        assert taken == [1, 2]


def enqueue_with_ids_apart(rig: ExampleRig) -> None:
    """Job 1 has failed once, and waits by message 4; job 4 waits by message 5."""
    rig.enqueue_by_hand(by_hand, -1, 2, 3)
    for _ in range(3):
        by_hand.work_one(rig.engine)
    rig.enqueue_by_hand(by_hand, 4)
    assert rig.rows("SELECT id, target_id FROM message_queue ORDER BY id") == [(4, 1), (5, 4)]


def test_by_the_wrong_id_one_job_is_locked_and_anothers_message_is_deleted(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_with_ids_apart(rig)

        with rig.engine.begin() as connection:
            taken = connection.scalar(by_hand.TAKE_BY_THE_WRONG_ID)

            assert taken == 1
            free = rig.column("SELECT id FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED")
            assert free == [1, 2, 3]  # it holds job 4, and is about to run job 1


def test_by_the_wrong_id_the_queue_stands_still_before_the_first_job_without_its_message(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        enqueue_with_ids_apart(rig)
        with rig.engine.begin() as connection:
            connection.scalar(by_hand.TAKE_BY_THE_WRONG_ID)
        rig.enqueue_by_hand(by_hand, 5, 6)

        with rig.engine.begin() as connection:
            taken = connection.scalar(by_hand.TAKE_BY_THE_WRONG_ID)

        assert taken is None  # "empty", it says: job 4 comes first, and message 4 is gone
        assert rig.column("SELECT target_id FROM message_queue ORDER BY id") == [4, 5, 6]


def test_what_waits_in_two_tables_moves_over_while_their_worker_is_at_work(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)
        with_pgqueue.queue.bind(rig.engine)

        with rig.held_up("payments", order_id=1):
            at_work = rig.start_by_hand(BY_HAND)
            rig.until_held_up(at_work)
            with with_pgqueue.queue.session() as session, session.begin():
                moved = move.move(session)
        at_work.until_ended()
        rig.drain(WITH_PGQUEUE)

        assert moved == 2
        assert rig.column("SELECT status FROM jobs ORDER BY id") == ["complete", "moved", "moved"]
        assert rig.scalar("SELECT count(*) FROM message_queue") == 0
        assert rig.paid() == [1, 2, 3]


def test_a_move_that_rolls_back_leaves_everything_in_its_place(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1)
        with_pgqueue.queue.bind(rig.engine)

        with with_pgqueue.queue.session() as session:
            assert move.move(session) == 1
            session.rollback()

        assert rig.scalar("SELECT count(*) FROM message_queue") == 1
        assert rig.unfinished() == 0
