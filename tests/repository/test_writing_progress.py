"""Which attempt may write the progress of a job."""

from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, PgQueue
from pgqueue.repository.progress import ProgressReports

OURS = uuid4()

LEASE = """
    INSERT INTO pgqueue.leases (target_id, message_id, attempt, crashes, worker_id, held)
    VALUES (:job_id, :message_id, :attempt, 0, :worker_id, false)
"""


def job_of(session: Session, **columns: Any) -> int:
    @PgQueue(session.get_bind()).task(name="tests.task")
    def task() -> None: ...

    job = task.enqueue(session)
    for name, value in columns.items():
        setattr(job, name, value)
    session.flush()
    return job.id


def lease(session: Session, job_id: int, **columns: Any) -> None:
    ours = {"message_id": 5, "attempt": 2, "worker_id": OURS}
    session.execute(text(LEASE), {"job_id": job_id, **ours, **columns})


def write(session: Session, job_id: int) -> set[int]:
    report = {"job_id": job_id, "message_id": 5, "attempt": 2, "worker_id": str(OURS)}
    return ProgressReports(session).write([{**report, "progress": {"done": 1}}])


def test_the_attempt_with_the_lease_may(session: Session) -> None:
    job_id = job_of(session, attempts=1)
    lease(session, job_id)

    assert write(session, job_id) == {job_id}
    assert session.scalar(select(Job.progress).where(Job.id == job_id)) == {"done": 1}


def test_an_attempt_that_has_just_ended_may(session: Session) -> None:
    job_id = job_of(session, attempts=2)

    assert write(session, job_id) == {job_id}


def test_an_attempt_may_not_while_another_runs(session: Session) -> None:
    for other in ({"worker_id": uuid4()}, {"message_id": 6}, {"attempt": 3}):
        job_id = job_of(session, attempts=1)
        lease(session, job_id, **other)

        assert write(session, job_id) == set()


def test_an_attempt_may_not_after_a_later_one(session: Session) -> None:
    assert write(session, job_of(session, attempts=3)) == set()


def test_a_locked_row_is_skipped(session: Session, engine: Engine) -> None:
    job_id = job_of(session, attempts=1)
    session.commit()
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())

    with Session(engine) as other:
        other.execute(text("SET LOCAL statement_timeout = '60s'"))
        assert write(other, job_id) == set()
