"""Work at a later time, and again and again: by a column, and by options."""

from datetime import UTC, datetime, time, timedelta

import pytest
from example_rig import ExampleRig

from examples.later_and_regularly import by_hand, move, with_pgqueue

pytestmark = pytest.mark.journey

WITH_PGQUEUE = with_pgqueue.__name__
DAY = timedelta(days=1)
MIDNIGHT = datetime(2024, 2, 29, tzinfo=UTC)
DUE_SINCE = """
    UPDATE pgqueue.schedules
    SET next_at = date_trunc('day', clock_timestamp(), 'UTC') - CAST(:ago AS interval)
"""


def test_by_hand_a_job_waits_for_its_hour(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        by_hand.create_tables(rig.engine)
        with rig.engine.begin() as connection:
            by_hand.in_a_while(connection, 1, timedelta(hours=1))
            by_hand.at_a_time(connection, 2, MIDNIGHT)
        by_hand.work_until_empty(rig.engine)
        assert rig.paid() == [2]

        rig.run("UPDATE scheduled_jobs SET run_at = run_at - interval '1 hour'")
        by_hand.work_until_empty(rig.engine)

        assert rig.paid() == [1, 2]


def test_with_pgqueue_a_job_waits_for_its_hour(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        with with_pgqueue.queue.session() as session, session.begin():
            in_an_hour = with_pgqueue.pay_order.options(delay=timedelta(hours=1))
            in_an_hour.enqueue(session, 1)
            with_pgqueue.pay_order.options(run_at=MIDNIGHT).enqueue(session, 2)

        rig.drain(WITH_PGQUEUE)

        assert rig.paid() == [2]
        (wait,) = rig.column("SELECT run_at - created_at FROM pgqueue.jobs WHERE outcome IS NULL")
        assert timedelta(minutes=59) < wait <= timedelta(minutes=61)


def test_with_pgqueue_an_idle_worker_wakes_for_a_job_whose_time_has_come(
    database_url: str,
) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        with with_pgqueue.queue.session() as session, session.begin():
            soon = with_pgqueue.pay_order.options(delay=timedelta(seconds=3))
            soon.enqueue(session, 1)

        rig.start_worker(WITH_PGQUEUE, poll_interval=timedelta(hours=1))
        rig.until_all_ended()

        (late,) = rig.column("SELECT started_at - run_at FROM pgqueue.jobs")
        assert timedelta(0) <= late < timedelta(seconds=60)
        assert rig.paid() == [1]


def test_by_hand_a_regular_job_leaves_its_successor(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        by_hand.create_tables(rig.engine)
        today = datetime.now(UTC) - timedelta(minutes=1)
        with rig.engine.begin() as connection:
            by_hand.at_a_time(connection, 1, today, every=DAY)

        by_hand.work_until_empty(rig.engine)

        assert rig.paid() == [1]
        assert rig.column("SELECT run_at FROM scheduled_jobs") == [today + DAY]


def test_with_pgqueue_a_schedule_fires_at_its_time(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        with with_pgqueue.queue.session() as session, session.begin():
            with_pgqueue.schedule_rent(session, 1)
        rig.run(DUE_SINCE, ago=timedelta(0))

        rig.start_worker(WITH_PGQUEUE)
        rig.until(lambda: rig.paid() == [1])

        [next_at] = rig.column("SELECT next_at FROM pgqueue.schedules")
        assert next_at - datetime.now(UTC) <= DAY
        assert next_at.astimezone(UTC).time() == time()


def test_by_hand_two_processes_that_start_pay_the_rent_twice(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        by_hand.create_tables(rig.engine)
        today = datetime.now(UTC) - timedelta(minutes=1)
        for _ in range(2):
            with rig.engine.begin() as connection:
                by_hand.at_a_time(connection, 1, today, every=DAY)

        by_hand.work_until_empty(rig.engine)

        assert rig.paid() == [1, 1]  # and tomorrow, and the day after
        assert rig.column("SELECT run_at FROM scheduled_jobs") == [today + DAY] * 2


def test_with_pgqueue_two_processes_that_start_pay_the_rent_once(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        for _ in range(2):
            with with_pgqueue.queue.session() as session, session.begin():
                with_pgqueue.schedule_rent(session, 1)
        rig.run(DUE_SINCE, ago=timedelta(0))

        for _ in range(2):
            rig.start_worker(WITH_PGQUEUE)
        rig.until(lambda: rig.paid() == [1])

        assert rig.scalar("SELECT count(*) FROM pgqueue.schedules") == 1
        assert rig.scalar("SELECT count(*) FROM pgqueue.jobs") == 1


def test_by_hand_a_worker_that_was_off_pays_for_every_day_it_missed(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        by_hand.create_tables(rig.engine)
        with rig.engine.begin() as connection:
            three_days_ago = datetime.now(UTC) - 3 * DAY
            by_hand.at_a_time(connection, 1, three_days_ago, every=DAY)

        by_hand.work_until_empty(rig.engine)

        assert rig.paid() == [1, 1, 1, 1]


def test_with_pgqueue_a_worker_that_was_off_pays_once(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        with_pgqueue.queue.bind(rig.engine)
        with with_pgqueue.queue.session() as session, session.begin():
            with_pgqueue.schedule_rent(session, 1)
        rig.run(DUE_SINCE, ago=3 * DAY)

        rig.start_worker(WITH_PGQUEUE)
        rig.until(lambda: rig.paid() == [1])

        assert rig.scalar("SELECT next_at > clock_timestamp() FROM pgqueue.schedules")
        assert rig.scalar("SELECT count(*) FROM pgqueue.jobs") == 1


def test_scheduled_jobs_move_over_with_their_times(database_url: str) -> None:
    with ExampleRig(database_url) as rig:
        by_hand.create_tables(rig.engine)
        tomorrow = (datetime.now(UTC) + DAY).replace(second=0, microsecond=0)
        with rig.engine.begin() as connection:
            by_hand.at_a_time(connection, 1, tomorrow)
            for _ in range(2):
                by_hand.at_a_time(connection, 2, tomorrow, every=DAY)
        with_pgqueue.queue.bind(rig.engine)

        with with_pgqueue.queue.session() as session, session.begin():
            assert move.move(session) == 3

        assert rig.column("SELECT run_at FROM pgqueue.message_queue") == [tomorrow]
        [(name, next_at)] = rig.rows("SELECT name, next_at FROM pgqueue.schedules")
        assert name == "rent:2"
        assert (tomorrow - next_at) % DAY == timedelta(0)
        assert rig.scalar("SELECT count(*) FROM scheduled_jobs") == 0
