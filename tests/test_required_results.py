"""``results="required"``: a result that cannot be stored fails the attempt, wherever it runs."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import Job, JobContext, JobStatus, PayloadError, PgQueue, Worker
from pgqueue.handler.error_reports import MAX_RESULT_BYTES
from pgqueue.testing import run_jobs

TOO_LARGE = "x" * MAX_RESULT_BYTES
ONCE: dict[str, Any] = {"results": "required", "max_attempts": 1}


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE notes (word text)"))
    return PgQueue(engine)


def only_job(queue: PgQueue) -> Job:
    with queue.session() as session:
        return session.scalars(select(Job)).one()


def notes(queue: PgQueue) -> int:
    with queue.session() as session:
        return len(session.scalars(text("SELECT word FROM notes")).all())


def plain() -> str:
    return TOO_LARGE


async def on_the_loop() -> object:
    await asyncio.sleep(0)
    return object()


def transactional(session: Session) -> str:
    session.execute(text("INSERT INTO notes VALUES ('written')"))
    return TOO_LARGE


def by_finish(ctx: JobContext) -> None:
    with ctx.finish(TOO_LARGE) as session:
        session.execute(text("INSERT INTO notes VALUES ('written')"))


@pytest.mark.parametrize(
    ("handler", "options"),
    [
        (plain, {}),
        (on_the_loop, {}),
        (transactional, {}),
        (by_finish, {}),
        (plain, {"executor": "process"}),
    ],
    ids=["thread", "async", "transactional", "finish", "process"],
)
def test_a_worker_fails_the_attempt_and_keeps_none_of_its_writes(
    queue: PgQueue, handler: Any, options: dict[str, Any]
) -> None:
    queue.task(name="report", **ONCE, **options)(handler).delay()

    assert endings(Worker(queue)) == {"failed": 1}
    job = only_job(queue)
    assert (job.status, job.result, notes(queue)) == (JobStatus.FAILED, None, 0)
    assert f"job {job.id} report: its result cannot be stored" in (job.last_error or "")


def test_a_claim_fails_the_attempt(queue: PgQueue) -> None:
    queue.task(name="report", **ONCE)(transactional).delay()

    with queue.session() as session, session.begin(), queue.claim(session) as claimed:
        assert claimed is not None
        claimed.run()

    assert claimed is not None
    assert (claimed.outcome, notes(queue)) == ("failed", 0)


def test_a_test_gets_the_error(queue: PgQueue) -> None:
    report = queue.task(name="report", **ONCE)(transactional)

    with queue.session() as session, session.begin():
        report.enqueue(session)
        with pytest.raises(PayloadError, match=r"larger than 1,048,576 bytes as JSON; return less"):
            run_jobs(session, queue=queue)


def test_what_the_database_refuses_fails_the_attempt(queue: PgQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE pgqueue.jobs ADD CHECK (result <> '\"no\"')"))
    queue.task(name="report", **ONCE)(lambda: "no").delay()

    assert endings(Worker(queue)) == {"failed": 1}
    assert "the database refuses its result" in (only_job(queue).last_error or "")


def test_none_is_a_result(queue: PgQueue) -> None:
    queue.task(name="report", **ONCE)(lambda: None).delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
