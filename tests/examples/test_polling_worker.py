"""A worker that polls for batches: what the hand-written form does, and what it loses."""

from collections import Counter
from datetime import timedelta

import pytest
from example_rig import ExampleRig

from examples.polling_worker import by_hand, move, with_pgqueue

pytestmark = pytest.mark.journey

BY_HAND = by_hand.__name__
WITH_PGQUEUE = with_pgqueue.__name__
AT_ONCE = by_hand.Settings(retry_interval=timedelta(0))

IDLE_IN_TRANSACTION = """
    SELECT count(*) FROM pg_stat_activity
    WHERE split_part(application_name, ' ', 1) = :name
    AND state = 'idle in transaction' AND backend_xid IS NOT NULL
"""


def test_by_hand_failures_are_retried_recorded_and_requeued_by_one_update(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, -3, -4)

        batches = [4, 2, 2, 0]  # the failing ones come again, and then no more
        assert [by_hand.work_a_batch(rig.engine, AT_ONCE) for _ in batches] == batches

        jobs = "SELECT status, attempts, last_error FROM mail_jobs ORDER BY id"
        assert rig.rows(jobs)[1:3] == [
            ("success", 1, None),
            ("failed", 3, "there is no order -3"),
        ]
        with rig.engine.begin() as connection:
            assert by_hand.requeue_failed(connection) == 2
        assert rig.column("SELECT attempts FROM mail_jobs WHERE status = 'pending'") == [0, 0]


def test_with_pgqueue_failures_are_retried_after_the_interval(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, 1, -2)

        while with_pgqueue.work_one(rig.engine):
            pass

        assert rig.receipts() == [1]
        (waits,) = rig.column(
            "SELECT jobs.run_at - job_attempts.finished_at FROM pgqueue.jobs"
            " JOIN pgqueue.job_attempts ON job_id = jobs.id WHERE jobs.outcome IS NULL"
        )
        assert timedelta(seconds=1) < waits <= timedelta(seconds=5)


def test_with_pgqueue_all_failed_jobs_are_requeued(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        with with_pgqueue.queue.session() as session, session.begin():
            once = with_pgqueue.mail_receipt.options(max_attempts=1)
            once.enqueue_many(session, [(1,), (-2,), (-3,)])
        rig.drain(WITH_PGQUEUE)
        failed = "SELECT id, last_error FROM pgqueue.jobs WHERE outcome = 'failed' ORDER BY id"
        assert rig.rows(failed) == [(2, "there is no order -2"), (3, "there is no order -3")]

        with with_pgqueue.queue.session() as session, session.begin():
            assert with_pgqueue.requeue_failed(session) == 2

        assert rig.rows(failed) == []
        assert rig.unfinished() == 2


def test_by_hand_a_killed_worker_sends_the_mails_of_its_batch_again(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, *range(1, 11))

        rig.kill_at_work(lambda: rig.start_by_hand(BY_HAND, "work"), "receipts", order_id=10)

        jobs = rig.column("SELECT DISTINCT (status, attempts)::text FROM mail_jobs")
        assert jobs == ["(pending,0)"]  # nine mails are out, and nothing knows of them
        while by_hand.work_a_batch(rig.engine, AT_ONCE):
            pass
        assert Counter(rig.receipts()) == {**dict.fromkeys(range(1, 10), 2), 10: 1}


def test_with_pgqueue_a_killed_worker_repeats_only_what_it_was_in_the_middle_of(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, *range(1, 11))

        with rig.held_up("receipts", order_id=10):
            process = rig.start_worker(WITH_PGQUEUE, concurrency=1)
            rig.until_held_up(process)
            rig.until(lambda: rig.unfinished() == 1)
            process.kill()
        rig.until_forgotten(process)
        rig.start_worker(WITH_PGQUEUE, concurrency=1)
        rig.until_all_ended()

        assert rig.receipts() == list(range(1, 11))
        crashed = rig.rows("SELECT job_id, outcome FROM pgqueue.job_attempts")
        assert crashed == [(10, "crashed")]


def test_by_hand_a_slow_mail_holds_up_its_whole_batch(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, *range(1, 11))

        with rig.held_up("receipts", order_id=1):
            rig.until_held_up(rig.start_by_hand(BY_HAND, "work"))

            assert by_hand.work_a_batch(rig.engine, AT_ONCE) == 0
            assert rig.receipts() == []


def test_with_pgqueue_another_worker_does_what_a_slow_mail_holds_up(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, *range(1, 11))

        with rig.held_up("receipts", order_id=1):
            rig.until_held_up(rig.start_worker(WITH_PGQUEUE, concurrency=1))
            rig.start_worker(WITH_PGQUEUE, concurrency=1)

            rig.until(lambda: rig.receipts() == list(range(2, 11)))


def test_by_hand_a_transaction_is_open_while_mails_are_sent(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1)

        with rig.held_up("receipts", order_id=1):
            process = rig.start_by_hand(BY_HAND, "work")
            rig.until_held_up(process)

            assert rig.scalar(IDLE_IN_TRANSACTION, name=process.name) == 1


def test_with_pgqueue_no_transaction_is_open_while_mails_are_sent(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, 1)

        with rig.held_up("receipts", order_id=1):
            process = rig.start_worker(WITH_PGQUEUE)
            rig.until_held_up(process)

            # A heartbeat is a transaction too, of a millisecond.
            rig.until(lambda: rig.scalar(IDLE_IN_TRANSACTION, name=process.name) == 0)


def test_with_pgqueue_a_mail_does_not_wait_for_the_poll(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        process = rig.start_worker(WITH_PGQUEUE, poll_interval=timedelta(hours=1))
        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, 1)
        rig.until(lambda: rig.receipts() == [1])

        rig.enqueue(with_pgqueue.queue, with_pgqueue.mail_receipt, 2)

        rig.until(lambda: rig.receipts() == [1, 2])
        process.kill()


def test_pending_mails_move_over_with_their_times(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        rig.enqueue_by_hand(by_hand, 1, 2, -3)
        rig.run("UPDATE mail_jobs SET run_at = now() + interval '1 day' WHERE order_id = 2")
        rig.run("UPDATE mail_jobs SET status = 'failed' WHERE order_id = -3")
        later = rig.scalar("SELECT run_at FROM mail_jobs WHERE order_id = 2")
        with_pgqueue.queue.bind(rig.engine)

        with with_pgqueue.queue.session() as session, session.begin():
            assert move.move(session) == 2

        assert rig.column("SELECT order_id FROM mail_jobs") == [-3]
        rig.drain(WITH_PGQUEUE)
        assert rig.receipts() == [1]
        assert rig.column("SELECT run_at FROM pgqueue.message_queue") == [later]
