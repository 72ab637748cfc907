"""Workers fire schedules: in time, once, and across kills; one without schedules does nothing."""

import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from worker_rig import Rig, promised

from pgqueue import Worker

pytestmark = pytest.mark.journey

SECOND = timedelta(seconds=1)
TICKS = (
    "SELECT CAST(meta->'schedule'->>'tick' AS timestamptz) AS tick FROM pgqueue.jobs"
    " WHERE meta->'schedule'->>'name' = :name ORDER BY tick"
)
CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE '% timers'"
)


@pytest.fixture
def rig(database_url: str, tmp_path: Path) -> Iterator[Rig]:
    with Rig(database_url, tmp_path) as rig:
        yield rig


def add(rig: Rig, name: str, task: Any = worker_tasks.quick, **given: Any) -> None:
    with rig.session() as session, session.begin():
        rig.queue.schedules.add(
            session, task, name=name, **{"every": SECOND, "catch_up": 1000, **given}
        )


def ticks(rig: Rig, name: str) -> list[datetime]:
    return [row.tick for row in rig.rows(TICKS, name=name)]


def assert_each_second_has_one(found: list[datetime]) -> None:
    assert [later - earlier for earlier, later in pairwise(found)] == [SECOND] * (len(found) - 1)


def test_a_schedule_that_is_added_while_workers_sleep_is_noticed(rig: Rig) -> None:
    rig.start()
    add(rig, "mine")

    rig.until(lambda: len(ticks(rig, "mine")) >= 3, what="three ticks")

    assert_each_second_has_one(ticks(rig, "mine"))


@pytest.mark.timed
def test_ticks_are_fired_within_a_second_while_all_slots_are_busy(rig: Rig) -> None:
    with rig.session() as session, session.begin():
        blocked = worker_tasks.wait.enqueue_many(session, [("go",)] * 2)
    rig.start(concurrency=2)
    rig.until_started(*blocked)
    add(rig, "mine")

    rig.until(lambda: len(ticks(rig, "mine")) >= 4, what="four ticks")

    late = rig.scalar(
        "SELECT max(created_at - CAST(meta->'schedule'->>'tick' AS timestamptz))"
        " FROM pgqueue.jobs WHERE meta ? 'schedule'"
    )
    assert late < timedelta(seconds=promised(1))


def test_an_outage_is_caught_up(rig: Rig) -> None:
    add(rig, "last", catch_up="last")
    add(rig, "all")
    add(rig, "paused")
    with rig.session() as session, session.begin():
        rig.queue.schedules.pause(session, "paused")
    rig.run(
        "UPDATE pgqueue.schedules SET next_at ="
        " date_trunc('second', clock_timestamp()) - interval '20 s'"
    )

    rig.start()
    rig.until(lambda: len(ticks(rig, "all")) > 21, what="the missed ticks")

    assert_each_second_has_one(ticks(rig, "all"))
    assert len(ticks(rig, "last")) <= len(ticks(rig, "all")) - 18
    assert ticks(rig, "paused") == []


def test_the_schedules_of_the_code_are_written_when_workers_start(rig: Rig) -> None:
    for _ in range(3):
        rig.start(modules=["scheduled_tasks"])
    rig.until(lambda: len(rig.notes("tick")) >= 2, what="two ticks have run")

    [row] = rig.rows("SELECT name, declared_in FROM pgqueue.schedules")

    assert tuple(row) == ("scheduled_tasks.tick", "scheduled_tasks")
    assert_each_second_has_one(ticks(rig, "scheduled_tasks.tick"))


def test_a_run_until_empty_fires_nothing(rig: Rig) -> None:
    add(rig, "mine")
    rig.run("UPDATE pgqueue.schedules SET next_at = clock_timestamp() - interval '1 hour'")

    assert Worker(rig.queue).run_until_empty() == {}

    assert ticks(rig, "mine") == []


def test_a_worker_without_schedules_has_no_connection_for_them(rig: Rig) -> None:
    rig.start()

    rig.until(lambda: rig.scalar(CONNECTIONS) == 0, what="the connection of the start is closed")


def test_a_worker_stops_while_a_tick_waits_for_a_lock(rig: Rig) -> None:
    add(rig, "mine")
    worker = rig.start()
    rig.until(lambda: ticks(rig, "mine"), what="a tick")
    with rig.raw() as connection:
        connection.exec_driver_sql("BEGIN; LOCK TABLE pgqueue.schedules")
        worker.send(signal.SIGTERM)

        assert worker.exit_code(seconds=promised(15)) == 0
        connection.exec_driver_sql("ROLLBACK")


def test_a_locked_table_of_schedules_stops_no_job_no_cancel_and_declares_no_worker_dead(
    rig: Rig,
) -> None:
    add(rig, "mine")
    with rig.raw() as connection:
        connection.exec_driver_sql("BEGIN; LOCK TABLE pgqueue.schedules")
        rig.start()  # it has read nothing yet
        with rig.session() as session, session.begin():
            job = worker_tasks.quick.enqueue(session).id
            stuck = worker_tasks.heed.enqueue(session).id
        rig.until_ended(job)
        rig.until(lambda: rig.notes("start", job=stuck), what="the handler runs")
        with rig.session() as session, session.begin():
            rig.queue.cancel(session, stuck)
        rig.until_ended(stuck)
        connection.exec_driver_sql("ROLLBACK")

    rig.until(lambda: ticks(rig, "mine"), what="a tick")
    with rig.raw() as connection:
        connection.exec_driver_sql("BEGIN; LOCK TABLE pgqueue.schedules")  # now it runs
        with rig.session() as session, session.begin():
            job = worker_tasks.quick.enqueue(session).id
        rig.until_ended(job)
        connection.exec_driver_sql("ROLLBACK")
    seen = len(ticks(rig, "mine"))

    rig.until(lambda: len(ticks(rig, "mine")) > seen, what="ticks go on")

    assert rig.declared_dead() == 0
