"""The kinds of errors: which jobs have failed with one, and since when."""

import time
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, text

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    execute,
    rescue,
    stored,
)
from pgqueue import DeadLetter, JobStatus, PgQueue
from pgqueue.outcomes import Cancelled, ErrorReport, Exhausted, Failed, Interrupted, Retried
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.listing import Listing
from pgqueue.repository.tables import CRASH, INTERRUPTION


def error(fingerprint: int = 1, task: str = "tests.task", **more: Any) -> dict[str, Any]:
    values = {"error_type": "ValueError", "place": "shop:pay", "message": "no", "job_id": 7}
    own = {"fingerprint": fingerprint, "task": task, "attempts": 1, "at": time.time()}
    return {**values, **own, **more}


def add(connection: Connection, *rows: dict[str, Any], version: str = "") -> None:
    ErrorGroups(connection).add(rows, version=version)


def fail(engine: Engine, worker: LogicalWorker, outcome: Any, **options: Any) -> int:
    job_id = enqueue(engine, **options)
    worker.run_next(outcome)
    return job_id


class TestOfJobs:
    def test_a_failed_job_has_the_fingerprint_of_its_last_error(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        once: dict[str, Any] = {"max_attempts": 1}
        expected: dict[int, int | None] = {
            fail(engine, worker, Failed(ERROR)): ERROR.fingerprint,
            fail(engine, worker, Retried(None, ERROR), **once): ERROR.fingerprint,
            fail(engine, worker, Interrupted(1)): INTERRUPTION.fingerprint,
            fail(engine, worker, Exhausted()): CRASH.fingerprint,
            fail(engine, worker, Cancelled("")): None,
        }
        cancelled = worker.claim_new(engine)
        with PgQueue(engine).session() as session, session.begin():
            PgQueue(engine).cancel(session, cancelled.job_id)
        worker.settle(cancelled, Retried(None, ERROR))
        expected[cancelled.job_id] = None
        crashed = enqueue(engine, **once)
        worker.claim()
        declare_dead(engine, worker)
        assert rescue(engine) == {crashed: "failed"}

        letters = {letter.job_id: letter.fingerprint for letter in stored(engine, DeadLetter)}

        assert letters == {**expected, crashed: CRASH.fingerprint}

    def test_jobs_are_found_by_the_error_that_has_failed_them(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        other = ErrorReport("KeyError", "x", "")
        first = fail(engine, worker, Failed(ERROR))
        fail(engine, worker, Failed(other))
        last = fail(engine, worker, Failed(ERROR))
        requeued = fail(engine, worker, Failed(ERROR))
        queue = PgQueue(engine)
        with queue.session() as session, session.begin():
            queue.requeue(session, requeued)

        with queue.session() as session:
            which = JobFilter(error=ERROR.fingerprint)
            failed = JobFilter(frozenset([JobStatus.FAILED]), error=ERROR.fingerprint)
            pending = JobFilter(frozenset([JobStatus.PENDING]), error=ERROR.fingerprint)
            found = [Listing(session).ids(each) for each in (which, failed, pending)]

        assert found == [[first, last], [first, last], []]


class TestGroups:
    def test_what_workers_add_to_a_group_is_summed_and_the_last_error_is_shown(
        self, connection: Connection
    ) -> None:
        now = time.time()
        add(connection, error(at=now, attempts=2), version="v1")
        add(connection, error(at=now - 60, job_id=8, message="later"), version="v2")

        [group] = ErrorGroups(connection).newest(limit=9)

        assert (group.attempts, group.job_id, group.message) == (3, 8, "later")
        assert group.first_version == "v1"
        assert group.last_at - group.first_at == timedelta(minutes=1)

    def test_a_group_counts_the_jobs_of_its_task_that_are_failed_now(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        fail(engine, worker, Failed(ERROR))
        newest = fail(engine, worker, Failed(ERROR))
        rows = (error(ERROR.fingerprint), error(ERROR.fingerprint, "another"))
        committed(engine, add, *rows)

        with engine.connect() as connection:
            groups = {group.task: group for group in ErrorGroups(connection).newest(limit=9)}

        assert (groups["tests.task"].failed_jobs, groups["tests.task"].job_id) == (2, newest)
        assert (groups["another"].failed_jobs, groups["another"].job_id) == (0, 7)

    def test_the_newest_groups_come_first_and_are_chosen_by_task_and_time(
        self, connection: Connection
    ) -> None:
        now = time.time()
        rows = [error(1, at=now - 7200), error(2, "other", at=now - 60), error(3, at=now)]
        add(connection, *rows)
        groups = ErrorGroups(connection)

        def found(**which: Any) -> list[int]:
            return [group.fingerprint for group in groups.newest(**which)]

        assert found(limit=9) == [3, 2, 1]
        assert found(limit=1) == [3]
        assert found(limit=9, task="other") == [2]
        assert found(limit=9, since=timedelta(hours=1)) == [3, 2]

    def test_the_version_of_a_group_is_noted_once(self, connection: Connection) -> None:
        groups = ErrorGroups(connection)
        for _ in range(2):
            groups.note_deploy("shop", "v1")
        groups.note_deploy("shop", "v2")

        rows = connection.execute(text("SELECT version FROM pgqueue.deploys ORDER BY first_at"))

        assert list(rows.scalars()) == ["v1", "v2"]


def test_old_groups_are_deleted_and_the_newest_are_kept(engine: Engine) -> None:
    execute(
        engine,
        "INSERT INTO pgqueue.error_groups (fingerprint, task, error_type, place, first_at, last_at,"
        " job_id, message) SELECT n, 't', '', '', at, at, 1, '' FROM generate_series(1, 5002) AS n,"
        " LATERAL (SELECT now() - n * interval '1 minute' AS at) AS moment",
    )
    execute(engine, "UPDATE pgqueue.error_groups SET last_at = '2020-01-01' WHERE fingerprint = 1")

    with engine.begin() as connection:
        ErrorGroups(connection).prune()
        groups = ErrorGroups(connection).newest(limit=9000)

    assert [group.fingerprint for group in groups] == list(range(2, 5002))


def test_the_versions_of_a_time_are_those_first_run_in_it(connection: Connection) -> None:
    groups = ErrorGroups(connection)
    for version in ("v1", "v2", "v2"):
        groups.note_deploy("shop", version)
    connection.execute(
        text("UPDATE pgqueue.deploys SET first_at = now() - interval '1 day' WHERE version = 'v1'")
    )

    [deployed] = groups.deploys(timedelta(hours=1))

    assert (deployed.application, deployed.version) == ("shop", "v2")
