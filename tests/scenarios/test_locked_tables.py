"""SIGTERM while others lock a table: the worker ends in seconds all the same, and loses no job."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import worker_tasks
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from worker_rig import Rig, WorkerProgram, promised

from pgqueue.cli.working import INTERRUPTED
from pgqueue.database.opening import backend_pid

pytestmark = pytest.mark.journey

BUSY = ("jobs", "leases", "message_queue", "workers")
IDLE = ("leases", "message_queue")
GRACE = 1.0
BEYOND = 5.0
"""Seconds beyond the grace, as the README promises."""
BEFORE = 1.0
"""Seconds for a claim to be cancelled, which comes before the grace, and for Python to end."""
ASKS = """
    SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE relation = CAST(:table AS regclass) AND pg_locks.mode = 'AccessExclusiveLock'
    AND pid = :pid
"""
WAITS = """
    SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE relation = CAST(:table AS regclass) AND NOT granted
    AND split_part(application_name, ' ', 1) = :worker
"""


@pytest.mark.timed
@pytest.mark.parametrize("table", IDLE)
def test_an_idle_worker_ends_in_seconds(database_url: str, tmp_path: Path, table: str) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=GRACE, by_command=True)

        with _locked(rig, table, worker):
            code, took = _stop(worker)

        assert code == 0
        assert took < promised(BEFORE + BEYOND)
        assert rig.check() == []


@pytest.mark.timed
@pytest.mark.parametrize("table", BUSY)
def test_a_worker_whose_handlers_outlive_the_grace_ends_in_seconds(
    database_url: str, tmp_path: Path, table: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=GRACE, concurrency=8, by_command=True)
        with rig.session() as session:
            tasks = (worker_tasks.wait, worker_tasks.wait_and_pay, worker_tasks.wait_async) * 2
            jobs = [task.enqueue(session, "go").id for task in tasks]
            session.commit()
        rig.until_started(*jobs)

        with _locked(rig, table, worker):
            code, took = _stop(worker)

        assert code == INTERRUPTED
        assert took < promised(BEFORE + GRACE + BEYOND)
        rig.open("go")
        rig.start(concurrency=8)
        rig.until_ended()
        assert rig.outcomes() == {"succeeded": len(jobs)}
        assert rig.effects() == tasks.count(worker_tasks.wait_and_pay)
        assert set(rig.bad_attempts()) <= {"interrupted", "crashed"}
        assert rig.check() == []


def _stop(worker: WorkerProgram) -> tuple[int, float]:
    began = time.monotonic()
    code = worker.terminate()
    took = time.monotonic() - began
    print(f"ended with {code} after {took:.2f} s")
    return code, took


@contextmanager
def _locked(rig: Rig, table: str, worker: WorkerProgram) -> Iterator[None]:
    """While others have the lock of an ALTER TABLE, or wait for it behind a handler's transaction,
    and this worker waits for them."""
    name = f"pgqueue.{table}"
    with rig.engine.connect() as other:
        pid = backend_pid(other)
        thread = Thread(target=_lock, args=(other, name))
        thread.start()
        try:
            rig.until(lambda: rig.scalar(ASKS, table=name, pid=pid), what="it asks for the lock")
            rig.until(
                lambda: rig.scalar(WAITS, table=name, worker=worker.name),
                what="the worker waits for the lock",
            )
            yield
        finally:
            rig.run("SELECT pg_terminate_backend(:pid)", pid=pid)
            thread.join()
            other.invalidate()


def _lock(connection: Connection, table: str) -> None:
    with suppress(DBAPIError):  # it is ended while it waits
        connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
