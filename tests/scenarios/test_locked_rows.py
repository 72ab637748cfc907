"""The row of a job that somebody has locked: that job waits for them, and no other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from sqlalchemy import select
from worker_rig import Rig, promised

from pgqueue import Job

pytestmark = pytest.mark.journey


@contextmanager
def locked(rig: Rig, job: int) -> Iterator[None]:
    """As by an application that works on it, and takes its time to commit."""
    with rig.session() as session:
        session.execute(select(Job.id).where(Job.id == job).with_for_update())
        yield
        session.rollback()


@pytest.mark.parametrize(
    "task", [worker_tasks.block, worker_tasks.wait], ids=["plain", "with a result"]
)
def test_the_outcomes_of_others_are_written_meanwhile(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            job = task.enqueue(session, "a").id
            session.commit()
        rig.until_started(job)

        with locked(rig, job):
            rig.open("a")
            with rig.session() as session:
                others = worker_tasks.quick.enqueue_many(session, [()] * 20)
                others += worker_tasks.wait.enqueue_many(session, [("a",)] * 5)
                session.commit()
            rig.until_ended(*others)
            rig.until(lambda: f"jobs {job}: other tr" in worker.log.read_text())
            assert rig.outcome(job) is None

        rig.until_ended(job)
        assert rig.outcomes() == {"succeeded": 26}
        assert rig.most_starts() == 1
        assert worker.log.read_text().count("have locked their rows") == 1
        assert worker.terminate() == 0
        assert rig.check() == []


def test_the_jobs_of_a_dead_worker_are_rescued_meanwhile(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        dies = rig.start(concurrency=2)
        with rig.session() as session:
            job, other = worker_tasks.wait.enqueue_many(session, [("a",)] * 2)
            session.commit()
        rig.until_started(job, other)
        lives = rig.start(concurrency=2)

        with locked(rig, job):
            dies.kill()
            rig.until_started(other, attempt=2)
            assert rig.attempts(job) == 0

        rig.open("a")
        rig.until_ended(job, other)
        assert rig.bad_attempts() == ["crashed"] * 2
        assert lives.terminate() == 0
        assert rig.check() == []


def test_what_a_crash_has_left_is_claimed_meanwhile(database_url: str, tmp_path: Path) -> None:
    """Of two, one starts, and the other is given back: that may not keep the claims waiting."""
    with Rig(database_url, tmp_path) as rig:
        dies = rig.start(concurrency=2)
        with rig.session() as session:
            first, second = worker_tasks.wait.enqueue_many(session, [("a",)] * 2)
            session.commit()
        rig.until_started(first, second)
        rig.start(queues=["another"])
        dies.kill()
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.message_queue") == 2)

        with locked(rig, second):
            rig.start(concurrency=4)
            with rig.session() as session:
                others = worker_tasks.quick.enqueue_many(session, [()] * 5)
                session.commit()
            rig.until_ended(*others)
            rig.until_started(first, attempt=2)

        rig.open("a")
        rig.until_ended(first, second)
        assert rig.check() == []


@pytest.mark.timed
def test_the_timeouts_of_others_are_heeded_meanwhile(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(concurrency=6)
        with rig.session() as session:
            job = worker_tasks.overrun_late.enqueue(session, "a").id
            session.commit()
        rig.until_started(job)

        with locked(rig, job), rig.session() as session:
            rig.until(lambda: rig.notes("cancelled", job=job))
            other = worker_tasks.overrun.enqueue(session, "a").id
            session.commit()
            rig.until(lambda: rig.bad_attempts(other)[:1] == ["timeout"], seconds=promised(8))

        rig.open("a")
        rig.until_ended(job, other)
        assert rig.bad_attempts(job)[0] == "timeout"  # written when the lock was gone
        assert rig.check() == []
