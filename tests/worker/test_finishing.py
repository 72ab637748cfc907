"""``ctx.finish()``: a handler ends its job in a transaction of its own choice."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.orm import Session
from worker_rig import endings, running, wait_until

from pgqueue import (
    AttemptEnded,
    AttemptOutcome,
    Job,
    JobAttempt,
    JobContext,
    JobStatus,
    LeaseLost,
    PgQueue,
    Retry,
    Worker,
)

AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE receipts (job_id bigint)"))
    return PgQueue(engine)


def receipts(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(text("SELECT FROM receipts")).all())


def loaded(engine: Engine, job_id: int) -> Job:
    with Session(engine) as session:
        return session.get_one(Job, job_id)


def insert(ctx: JobContext) -> Any:
    return text("INSERT INTO receipts VALUES (:id)").bindparams(id=ctx.job_id)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_connection_that_broke_in_the_pool_is_replaced(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    """The service was called already: without another one it would be called twice."""
    calls: list[str] = []

    def restart() -> None:
        calls.append("service")
        with engine.begin() as connection:
            connection.execute(text(END_ALL))

    @queue.task(name="sync")
    def pay(ctx: JobContext) -> None:
        with queue.session() as session:
            session.execute(text("SELECT 1"))  # leaves a connection in the pool
        restart()
        with ctx.finish() as session:
            session.execute(insert(ctx))

    @queue.task(name="async")
    async def apay(ctx: JobContext) -> None:
        restart()
        async with ctx.finish_async() as session:
            await session.execute(insert(ctx))

    queue.tasks[kind].delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert calls == ["service"]
    assert receipts(engine) == 1


END_ALL = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND application_name NOT LIKE 'pgqueue%'
"""


COMMIT_WAITS = """
    CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER wait_at_commit AFTER INSERT ON receipts
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_at_commit();
"""


def test_a_commit_that_a_timeout_has_ended_is_not_taken_for_one_that_was_carried_out(
    engine: Engine, queue: PgQueue
) -> None:
    """The lease is gone, because the worker has recorded the timeout; but nothing was written."""
    seen: list[str] = []
    ended: list[AttemptOutcome] = []

    @queue.task(name="pay", timeout=timedelta(seconds=0.2), retry=Retry.never())
    def pay(ctx: JobContext) -> None:
        try:
            with ctx.finish() as session:
                event.listen(session, "after_commit", lambda _: seen.append("after_commit"))
                session.execute(insert(ctx))
            seen.append("after the block")
        except ConnectionError:
            seen.append("lost")

    @queue.on_attempt_end
    def note(attempt: AttemptEnded) -> None:
        ended.append(attempt.outcome)

    with engine.begin() as connection:
        connection.execute(text(COMMIT_WAITS))
    job_id = pay.delay().id

    with engine.begin() as holder:
        holder.execute(text("SELECT pg_advisory_xact_lock(4711)"))
        with running(Worker(queue, concurrency=2)):
            wait_until(lambda: loaded(engine, job_id).status is JobStatus.FAILED, what="it fails")
            wait_until(lambda: seen, what="its handler goes on")
            wait_until(lambda: ended, what="its end is told")

    assert seen == ["lost"]
    assert ended == [AttemptOutcome.FAILED]
    assert receipts(engine) == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_block_commits_the_writes_the_jobs_and_the_end_of_the_job_together(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    seen: list[Any] = []

    @queue.task(name="tests.follow", queue="later")
    def follow() -> None: ...

    @queue.task(name="sync")
    def pay(ctx: JobContext) -> str:
        with ctx.finish({"paid": 7}) as session:
            session.execute(insert(ctx))
            follow.enqueue(session)
            seen.append((loaded(engine, ctx.job_id).status, receipts(engine)))
        seen.append((loaded(engine, ctx.job_id).status, receipts(engine)))
        return "not kept"

    @queue.task(name="async")
    async def apay(ctx: JobContext) -> str:
        async with ctx.finish_async({"paid": 7}) as session:
            await session.execute(insert(ctx))
            await follow.enqueue_async(session)
            seen.append((loaded(engine, ctx.job_id).status, receipts(engine)))
        seen.append((loaded(engine, ctx.job_id).status, receipts(engine)))
        return "not kept"

    job_id = queue.tasks[kind].delay().id

    assert endings(Worker(queue, ["default"])) == {"succeeded": 1}
    assert seen == [(JobStatus.RUNNING, 0), (JobStatus.SUCCEEDED, 1)]
    assert loaded(engine, job_id).result == {"paid": 7}
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 2
        assert queue.check(session) == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_in_the_block_rolls_back_and_the_attempt_fails(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    @queue.task(name="sync", retry=AT_ONCE, max_attempts=2)
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as session:
            session.execute(insert(ctx))
            if ctx.attempt == 1:
                raise ValueError("first")

    @queue.task(name="async", retry=AT_ONCE, max_attempts=2)
    async def apay(ctx: JobContext) -> None:
        async with ctx.finish_async() as session:
            await session.execute(insert(ctx))
            if ctx.attempt == 1:
                raise ValueError("first")

    queue.tasks[kind].delay()

    assert endings(Worker(queue)) == {"retried": 1, "succeeded": 1}
    assert receipts(engine) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_raised_after_the_block_is_logged_and_not_retried(
    engine: Engine, queue: PgQueue, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    @queue.task(name="sync", retry=AT_ONCE, max_attempts=2)
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as session:
            session.execute(insert(ctx))
        raise ValueError("too late to fail")

    @queue.task(name="async", retry=AT_ONCE, max_attempts=2)
    async def apay(ctx: JobContext) -> None:
        async with ctx.finish_async() as session:
            await session.execute(insert(ctx))
        raise ValueError("too late to fail")

    job_id = queue.tasks[kind].delay().id
    with caplog.at_level(logging.ERROR):
        assert endings(Worker(queue)) == {"succeeded": 1}

    assert loaded(engine, job_id).status == JobStatus.SUCCEEDED
    with Session(engine) as session:
        assert session.scalars(select(JobAttempt)).all() == []
    assert f"job {job_id} {kind}: it has succeeded in ctx.finish()" in caplog.text
    assert "too late to fail" in caplog.text


def test_a_lost_lease_rolls_back_and_raises(engine: Engine, queue: PgQueue) -> None:
    raised: list[Exception] = []

    @queue.task(name="tests.pay")
    def pay(ctx: JobContext) -> None:
        try:
            with ctx.finish() as session:
                session.execute(insert(ctx))
                with engine.begin() as other:  # as a rescue and the next claim do
                    other.execute(text("UPDATE pgqueue.leases SET attempt = 2"))
        except LeaseLost as error:
            raised.append(error)
            raise

    job_id = pay.delay().id

    assert endings(Worker(queue)) == {"stale": 1}
    assert f"job {job_id} tests.pay: this attempt has lost its job" in str(raised)
    assert receipts(engine) == 0


def test_a_cancelled_job_ends_as_cancelled_and_rolls_back(engine: Engine, queue: PgQueue) -> None:
    @queue.task(name="tests.pay")
    def pay(ctx: JobContext) -> None:
        with queue.session() as other, other.begin():
            queue.cancel(other, ctx.job_id)
        with ctx.finish() as session:
            session.execute(insert(ctx))

    pay.delay()

    assert endings(Worker(queue)) == {"cancelled": 1}
    assert receipts(engine) == 0


def test_a_handler_past_its_timeout_after_the_block_has_succeeded(
    engine: Engine, queue: PgQueue
) -> None:
    @queue.task(name="tests.pay", timeout=timedelta(seconds=0.5), max_attempts=1)
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as session:
            session.execute(insert(ctx))
        wait_until(ctx.is_cancelled, what="another thread has taken its slot")

    job_id = pay.delay().id

    assert endings(Worker(queue, concurrency=2)) == {"succeeded": 1}
    job = loaded(engine, job_id)
    assert (job.status, job.last_error) == (JobStatus.SUCCEEDED, None)


def test_listeners_to_after_commit_are_called_after_the_commit(
    engine: Engine, queue: PgQueue
) -> None:
    seen: list[int] = []

    @queue.task(name="tests.pay")
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as session:
            event.listen(session, "after_commit", lambda _: seen.append(receipts(engine)))
            session.execute(insert(ctx))
            session.commit()

    pay.delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert seen == [1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("transactional", "is for handlers without a session; this handler has one"),
        ("twice", "the job has ended already; call ctx.finish\\(\\) once"),
        ("inside", "begins inside of ctx.finish"),
        ("on loop", "write `async with ctx.finish_async"),
        ("in thread", "write `with ctx.finish"),
    ],
)
def test_where_finish_cannot_work_it_says_what_to_do(
    queue: PgQueue, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    caught: list[Exception] = []

    def attempt(ctx: JobContext) -> None:
        with pytest.raises(Exception, match=words) as raised, ctx.finish():
            pass
        caught.append(raised.value)

    @queue.task(name="plain")
    def plain(ctx: JobContext) -> None:
        attempt(ctx)

    @queue.task(name="transactional")
    def transactional(session: Session, ctx: JobContext) -> None:
        attempt(ctx)

    @queue.task(name="twice")
    def twice(ctx: JobContext) -> None:
        with ctx.finish():
            pass
        attempt(ctx)

    @queue.task(name="inside")
    def inside(ctx: JobContext) -> None:
        with ctx.finish():
            attempt(ctx)

    @queue.task(name="on_loop")
    async def on_loop(ctx: JobContext) -> None:
        attempt(ctx)

    @queue.task(name="in_thread")
    def in_thread(ctx: JobContext) -> None:
        with pytest.raises(Exception, match=words) as raised:
            ctx.finish_async().__aenter__().send(None)
        caught.append(raised.value)

    queue.tasks[kind.replace(" ", "_")].delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert len(caught) == 1


def test_a_plain_call_has_a_session_of_its_own(engine: Engine, queue: PgQueue) -> None:
    @queue.task(name="tests.pay")
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as session:
            session.execute(insert(ctx))

    pay()

    assert receipts(engine) == 1
