"""Crashes, timeouts and lost leases on demand."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobAttempt, JobContext, JobStatus, PgQueue, PgQueueError, Task
from pgqueue.testing import crash_job, lose_lease, run_jobs, time_out_job


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE TABLE sent (attempt int, cancelled bool)"))
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


@pytest.fixture
def queue(session: Session) -> PgQueue:
    return PgQueue(session.connection())


@pytest.fixture
def send(queue: PgQueue) -> Task[[], None]:
    @queue.task(timeout=timedelta(seconds=60), max_attempts=2)
    def send(session: Session, ctx: JobContext) -> None:
        calls.append((ctx.attempt, ctx.is_cancelled()))
        session.execute(text("INSERT INTO sent VALUES (1, false)"))
        session.commit()

    calls.clear()
    return send


calls: list[tuple[int, bool]] = []


def sent(session: Session) -> int:
    return session.scalar(text("SELECT count(*) FROM sent")) or 0


def ends(session: Session) -> list[tuple[int, str]]:
    past = select(JobAttempt.attempt, JobAttempt.outcome).order_by(JobAttempt.attempt)
    return [(row[0], row[1]) for row in session.execute(past)]


def test_a_crash_undoes_the_writes_and_leaves_the_job_to_the_next_worker(
    queue: PgQueue, session: Session, send: Task[[], None]
) -> None:
    job = send.enqueue(session)

    crash_job(session, job, queue=queue)

    assert (job.status, sent(session), ends(session)) == (JobStatus.PENDING, 0, [(1, "crashed")])
    assert run_jobs(session, queue=queue) == [job]
    assert (job.status, sent(session), calls) == (JobStatus.SUCCEEDED, 1, [(1, False), (2, False)])


def test_crashes_use_up_the_attempts(
    queue: PgQueue, session: Session, send: Task[[], None]
) -> None:
    job = send.enqueue(session)

    for _ in range(2):
        crash_job(session, job, queue=queue)

    assert job.status is JobStatus.FAILED
    assert queue.check(session) == []


def test_a_timeout_is_settled_while_the_handler_sees_that_it_should_stop(
    queue: PgQueue, session: Session, send: Task[[], None]
) -> None:
    job = send.enqueue(session)

    time_out_job(session, job, queue=queue)

    assert (job.status, sent(session), ends(session)) == (JobStatus.PENDING, 0, [(1, "timeout")])
    assert calls == [(1, True)]


def test_a_lost_lease_makes_the_result_stale(
    queue: PgQueue, session: Session, send: Task[[], None]
) -> None:
    job = send.enqueue(session)

    lose_lease(session, job, queue=queue)

    assert (job.status, sent(session), ends(session)) == (JobStatus.PENDING, 0, [(1, "crashed")])
    assert calls == [(1, True)]
    assert queue.check(session) == []
    assert session.scalar(select(func.count()).select_from(Job)) == 1


def test_only_a_due_job_can_have_a_fault(
    queue: PgQueue, session: Session, send: Task[[], None]
) -> None:
    send.enqueue(session)
    later = send.options(delay=timedelta(hours=1)).enqueue(session)

    with pytest.raises(PgQueueError, match=f"job {later.id} .* cannot be started: it is pending"):
        crash_job(session, later, queue=queue)

    assert calls == []
