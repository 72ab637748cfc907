"""A claim by CTE that is committed at once: what it does, what it needs, and what it loses."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from example_rig import ExampleRig
from sqlalchemy import Connection, TextClause, text

from examples.claim_with_cte import by_hand, move, with_pgqueue

pytestmark = pytest.mark.journey

BY_HAND = by_hand.__name__
WITH_PGQUEUE = with_pgqueue.__name__


def claims_of_two_that_meet(rig: ExampleRig, claim: TextClause) -> tuple[int, int]:
    """Two sessions claim, the second one before the first commits; what each of them got.

    The second one has to wait, or this fails.
    """
    with (
        ThreadPoolExecutor() as threads,
        rig.engine.connect() as first,
        rig.engine.connect() as second,
    ):
        first_id = first.execute(claim).one().id
        waiting = backend_of(second)
        future = threads.submit(lambda: second.execute(claim).one().id)
        rig.until(lambda: rig.scalar("SELECT pg_blocking_pids(:pid)", pid=waiting))
        assert rig.scalar("SELECT pg_blocking_pids(:pid)", pid=waiting) == [backend_of(first)]
        first.commit()
        return first_id, future.result()


def backend_of(connection: Connection) -> int:
    pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return pid


def test_with_skip_locked_the_second_session_takes_the_next_task_at_once(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)

        with rig.engine.connect() as first, rig.engine.connect() as second:
            second.execute(text("SET lock_timeout = '1ms'"))

            assert first.execute(by_hand.CLAIM).one().id == 1
            assert second.execute(by_hand.CLAIM).one().id == 2


def test_without_skip_locked_the_second_session_waits_for_the_first(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)

        assert claims_of_two_that_meet(rig, by_hand.CLAIM_THAT_WAITS) == (1, 2)


def test_without_a_lock_two_sessions_claim_the_same_task(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)

        assert claims_of_two_that_meet(rig, by_hand.CLAIM_WITHOUT_A_LOCK) == (1, 1)


def test_both_ways_do_the_work(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)
        rig.enqueue(with_pgqueue.queue, with_pgqueue.pay_order, 4, 5, 6)

        by_hand.work_until_empty(rig.engine)
        with_pgqueue.work_one(rig.engine)
        rig.drain(WITH_PGQUEUE)

        assert rig.column("SELECT DISTINCT status FROM tasks") == ["done"]
        assert rig.column("SELECT DISTINCT outcome FROM pgqueue.jobs") == ["succeeded"]
        assert rig.paid() == [1, 2, 3, 4, 5, 6]


def test_by_hand_the_task_of_a_killed_worker_stays_running_for_ever(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1)

        rig.kill_at_work(lambda: rig.start_by_hand(BY_HAND), "payments", order_id=1)

        assert by_hand.claim(rig.engine) is None
        assert rig.column("SELECT status FROM tasks") == ["running"]
        assert by_hand.reap(rig.engine, timedelta(minutes=5)) == 0  # nor does this know, yet
        assert rig.paid() == []


def test_with_pgqueue_the_job_of_a_killed_worker_is_rescued(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.pay_order, 1)

        rig.kill_at_work(lambda: rig.start_worker(WITH_PGQUEUE), "payments", order_id=1)
        rig.start_worker(WITH_PGQUEUE)
        rig.until_all_ended()

        assert rig.paid() == [1]
        assert rig.rows("SELECT outcome, attempts FROM pgqueue.jobs") == [("succeeded", 2)]


def test_by_hand_a_reaper_has_a_slow_task_done_twice(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1)
        slow = by_hand.claim(rig.engine)
        assert slow is not None

        assert by_hand.reap(rig.engine, timedelta(0)) == 1  # whatever is longest, some take more
        by_hand.work_until_empty(rig.engine)
        by_hand.finish(rig.engine, slow)

        assert rig.paid() == [1, 1]


def test_with_pgqueue_a_slow_job_is_left_to_the_worker_that_lives(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.pay_order, 1)

        with rig.held_up("payments", order_id=1):
            rig.until_held_up(rig.start_worker(WITH_PGQUEUE))
            rig.start_worker(WITH_PGQUEUE)
            # Twice as long as the other worker needs to rescue the jobs of a dead one.
            spans = "SELECT min(heartbeat_at - started_at), count(*) FROM pgqueue.workers"
            rig.until(lambda: rig.rows(spans)[0] > (timedelta(seconds=4), 1))
            assert rig.scalar("SELECT attempt FROM pgqueue.leases") == 1
        rig.until_all_ended()

        assert rig.paid() == [1]
        assert rig.rows("SELECT outcome, attempts FROM pgqueue.jobs") == [("succeeded", 1)]


def test_unfinished_tasks_move_over(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, 3)
        done = by_hand.claim(rig.engine)
        assert done is not None
        by_hand.finish(rig.engine, done)
        assert by_hand.claim(rig.engine) is not None  # left behind
        with_pgqueue.queue.bind(rig.engine)

        with with_pgqueue.queue.session() as session, session.begin():
            assert move.move(session) == 2

        rig.drain(WITH_PGQUEUE)
        assert rig.rows("SELECT order_id, status FROM tasks") == [(1, "done")]
        assert rig.paid() == [1, 2, 3]
