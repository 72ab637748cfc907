"""A cancel, the end of the grace period and a lost connection reach async handlers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from worker_rig import PATIENCE, endings, running, wait_until

from pgqueue import Job, JobContext, PgQueue, Retry, Worker

WRITE = text("INSERT INTO written (job_id) VALUES (:id)")
AT_ONCE = Retry.constant(timedelta(0))


class Handler:
    """What an async handler of these tests does, and what it has met."""

    def __init__(self) -> None:
        self.has_begun = Event()
        self.has_cleaned_up = Event()
        self.is_cancelled = Event()

    async def wait(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        finally:
            await asyncio.sleep(0)
            self.has_cleaned_up.set()


@contextmanager
def working(queue: PgQueue, job_id: int, handler: Handler, **options: Any) -> Iterator[Worker]:
    worker = Worker(queue, concurrency=1, **options)
    with running(worker):
        assert handler.has_begun.wait(PATIENCE), f"job {job_id} has not begun"
        yield worker


def job_of(queue: PgQueue, job_id: int) -> Job:
    with queue.session() as session:
        return session.get_one(Job, job_id)


def cancel(queue: PgQueue, job_id: int) -> None:
    with queue.session() as session, session.begin():
        queue.cancel(session, job_id)


def until_ended(queue: PgQueue, job_id: int) -> Job:
    wait_until(lambda: job_of(queue, job_id).outcome is not None)
    return job_of(queue, job_id)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS written (job_id bigint)"))
        connection.execute(text("TRUNCATE written"))
    return PgQueue(engine)


def written(queue: PgQueue) -> int:
    with queue.session() as session:
        return int(session.scalar(text("SELECT count(*) FROM written")) or 0)


@pytest.fixture
def handler() -> Handler:
    return Handler()


def test_a_cancel_interrupts_an_async_handler(queue: PgQueue, handler: Handler) -> None:
    @queue.task(name="wait")
    async def wait() -> None:
        await handler.wait()

    job_id = wait.delay().id
    with working(queue, job_id, handler):
        cancel(queue, job_id)

        job = until_ended(queue, job_id)

    assert handler.is_cancelled.is_set()
    assert handler.has_cleaned_up.is_set()
    assert (job.outcome, job.attempts) == ("cancelled", 1)


def test_a_cancelled_transactional_handler_is_rolled_back(queue: PgQueue, handler: Handler) -> None:
    @queue.task(name="write")
    async def write(session: AsyncSession, ctx: JobContext) -> None:
        await session.execute(WRITE, {"id": ctx.job_id})
        await handler.wait()

    job_id = write.delay().id
    with working(queue, job_id, handler):
        cancel(queue, job_id)

        job = until_ended(queue, job_id)

    assert job.outcome == "cancelled"
    assert written(queue) == 0


def test_a_cancel_interrupts_a_query(queue: PgQueue, handler: Handler) -> None:
    @queue.task(name="query")
    async def query(session: AsyncSession) -> None:
        handler.has_begun.set()
        await session.execute(text("SELECT pg_sleep(3600)"))

    job_id = query.delay().id
    with working(queue, job_id, handler):
        cancel(queue, job_id)

        job = until_ended(queue, job_id)

    assert job.outcome == "cancelled"


def test_a_step_that_a_cancel_interrupts_is_not_on_record(queue: PgQueue, handler: Handler) -> None:
    calls: list[str] = []

    async def fetch(session: AsyncSession) -> int:
        calls.append("fetch")
        await session.execute(WRITE, {"id": 1})
        if len(calls) == 1:
            await handler.wait()
        return 7

    @queue.task(name="stepwise")
    async def stepwise(ctx: JobContext) -> Any:
        return await ctx.step_async("fetch", fetch)

    job_id = stepwise.delay().id
    with working(queue, job_id, handler):
        cancel(queue, job_id)
        assert until_ended(queue, job_id).outcome == "cancelled"
        assert written(queue) == 0
        with queue.session() as session, session.begin():
            queue.requeue(session, job_id)

        job = until_ended(queue, job_id)

    assert (job.outcome, job.result) == ("succeeded", 7)
    assert calls == ["fetch", "fetch"]
    assert written(queue) == 1


def test_the_end_of_the_grace_period_interrupts_an_async_handler(
    queue: PgQueue, handler: Handler
) -> None:
    @queue.task(name="wait")
    async def wait() -> None:
        await handler.wait()

    job_id = wait.delay().id
    with working(queue, job_id, handler, grace=timedelta(0)) as worker:
        pass

    assert handler.has_cleaned_up.is_set()
    job = job_of(queue, job_id)
    assert (job.outcome, job.attempts, job.interruptions) == (None, 0, 1)
    assert worker.interrupt(), "the command exits with 3"


def test_a_handler_may_hand_its_job_on_at_the_end_of_the_grace_period(
    queue: PgQueue, handler: Handler
) -> None:
    @queue.task(name="resume")
    async def resume(ctx: JobContext) -> str | None:
        try:
            await handler.wait()
        except asyncio.CancelledError:
            return "as far as it came"
        return None

    job_id = resume.delay().id
    with working(queue, job_id, handler, grace=timedelta(0)):
        pass

    job = job_of(queue, job_id)
    assert (job.outcome, job.result) == ("succeeded", "as far as it came")


def test_a_handler_that_suppresses_a_cancel_runs_on_and_ends_as_cancelled(
    queue: PgQueue, handler: Handler
) -> None:
    may_end = Event()

    @queue.task(name="deaf")
    async def deaf() -> str:
        try:
            await handler.wait()
        except asyncio.CancelledError:
            while not may_end.is_set():
                await asyncio.sleep(0.001)
        return "done"

    job_id = deaf.delay().id
    with working(queue, job_id, handler):
        cancel(queue, job_id)
        assert handler.is_cancelled.wait(PATIENCE)
        assert job_of(queue, job_id).outcome is None
        may_end.set()

        job = until_ended(queue, job_id)

    assert job.outcome == "cancelled"


def test_a_handler_whose_connection_has_ended_is_interrupted_and_retried(
    queue: PgQueue, handler: Handler
) -> None:
    pids: list[int] = []

    @queue.task(name="cut", retry=AT_ONCE)
    async def cut(session: AsyncSession, ctx: JobContext) -> None:
        pids.append((await session.execute(text("SELECT pg_backend_pid()"))).scalar_one())
        if ctx.attempt == 1:
            await handler.wait()

    job_id = cut.delay().id
    with working(queue, job_id, handler):
        with queue.session() as session:
            session.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pids[0]})

        job = until_ended(queue, job_id)

    assert handler.is_cancelled.is_set()
    assert (job.outcome, job.attempts) == ("succeeded", 2)
    with queue.session() as session:
        [failed] = session.get_one(Job, job_id).failed_attempts
        assert failed.outcome == "failed"


def test_a_commit_that_is_under_way_at_the_end_of_the_grace_period_counts(
    queue: PgQueue, handler: Handler
) -> None:
    """A trigger keeps the COMMIT waiting for a lock that the test holds."""
    is_done = Event()
    with queue.session() as session, session.begin():
        session.execute(
            text(
                "CREATE OR REPLACE FUNCTION wait_in_commit() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$"
            )
        )
        session.execute(
            text(
                "CREATE CONSTRAINT TRIGGER wait_in_commit AFTER INSERT ON written "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_in_commit()"
            )
        )

    @queue.task(name="finish")
    async def finish(ctx: JobContext) -> None:
        async with ctx.finish_async(result="paid") as session:
            await session.execute(WRITE, {"id": ctx.job_id})
            handler.has_begun.set()
        is_done.set()

    job_id = finish.delay().id
    waits = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 4711"
    )
    try:
        with queue.session() as lock:
            lock.execute(text("SELECT pg_advisory_xact_lock(4711)"))
            with working(queue, job_id, handler, grace=timedelta(0)), queue.session() as session:
                wait_until(lambda: session.scalar(text(waits)) == 1)
        assert is_done.wait(PATIENCE)

        job = until_ended(queue, job_id)

        assert (job.outcome, job.result) == ("succeeded", "paid")
    finally:
        with queue.session() as session, session.begin():
            session.execute(text("DROP TRIGGER wait_in_commit ON written"))


def test_a_timeout_still_records_a_timeout(queue: PgQueue, handler: Handler) -> None:
    @queue.task(name="late", timeout=timedelta(milliseconds=50), retry=Retry.never())
    async def late() -> None:
        await handler.wait()

    job_id = late.delay().id

    assert endings(Worker(queue, concurrency=1)) == {"failed": 1}
    with queue.session() as session:
        [failed] = session.get_one(Job, job_id).failed_attempts
        assert failed.outcome == "timeout"
    assert handler.has_cleaned_up.is_set()
