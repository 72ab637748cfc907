"""One attempt in a savepoint of a test ends as it would in a transaction of a worker."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import (
    Cancel,
    DelayInTransaction,
    Discard,
    JobContext,
    JobStatus,
    LeaseLost,
    PgQueue,
    Retry,
)
from pgqueue.testing import crash_job, lose_lease, run_jobs


@pytest.fixture(params=["psycopg", "psycopg2"])
def engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{request.param}"))
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE TABLE notes (word text)"))
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


@pytest.fixture
def queue(session: Session) -> PgQueue:
    return PgQueue(session.connection())


def note(session: Session, word: str) -> None:
    session.execute(text("INSERT INTO notes VALUES (:word)"), {"word": word})


def notes(session: Session) -> list[str]:
    return list(session.scalars(text("SELECT word FROM notes ORDER BY word")))


def test_a_handlers_commits_and_rollbacks_are_its_own(queue: PgQueue, session: Session) -> None:
    told: list[str] = []

    @queue.task
    def work(session: Session) -> None:
        event.listen(session, "after_commit", lambda _: told.append("committed"))
        note(session, "kept")
        session.commit()
        note(session, "rolled back")
        session.rollback()
        note(session, "last")
        told.append("worked")

    note(session, "before")
    work.enqueue(session)

    run_jobs(session, queue=queue)

    assert notes(session) == ["before", "kept", "last"]
    assert told == ["worked", "committed"]


def test_a_failure_undoes_what_the_handler_has_committed(queue: PgQueue, session: Session) -> None:
    @queue.task
    def raise_discard(session: Session) -> None:
        note(session, "undone")
        session.commit()
        raise Discard("no use")

    @queue.task
    def return_cancel(session: Session) -> Cancel:
        note(session, "kept")
        return Cancel("done before")

    @queue.task
    def be_cancelled(session: Session, ctx: JobContext) -> None:
        note(session, "undone")
        queue.cancel(session, ctx.job_id)

    for task in (raise_discard, return_cancel, be_cancelled):
        task.enqueue(session)

    ran = run_jobs(session, queue=queue)

    assert [job.status for job in ran] == [
        JobStatus.FAILED,
        JobStatus.CANCELLED,
        JobStatus.CANCELLED,
    ]
    assert notes(session) == ["kept"]


def test_what_a_plain_handler_commits_stays_although_it_fails(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def work() -> None:
        with queue.session() as own:
            note(own, "committed")
            own.commit()
            note(own, "left open")
            raise LookupError("and failed")

    job = work.enqueue(session)

    with pytest.raises(LookupError, match="and failed"):
        run_jobs(session, queue=queue)

    assert notes(session) == ["committed"]
    assert (job.status, job.attempts) == (JobStatus.PENDING, 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_finish_ends_the_job_with_the_writes_of_its_block(
    request: pytest.FixtureRequest, queue: PgQueue, session: Session, kind: str
) -> None:
    if kind == "async" and "psycopg2" in request.node.name:
        pytest.skip("an AsyncSession needs psycopg 3")
    told: list[str] = []

    @queue.task(name="sync")
    def pay(ctx: JobContext) -> str:
        with ctx.finish({"paid": 7}) as own:
            event.listen(own, "after_commit", lambda _: told.append("committed"))
            note(own, "kept")
        assert ctx.is_finished
        return "not kept"

    @queue.task(name="async")
    async def apay(ctx: JobContext) -> str:
        async with ctx.finish_async({"paid": 7}) as own:
            event.listen(own.sync_session, "after_commit", lambda _: told.append("committed"))
            await own.run_sync(note, "kept")
        assert ctx.is_finished
        return "not kept"

    job = queue.tasks[kind].enqueue(session)

    run_jobs(session, queue=queue)

    assert (job.status, job.result) == (JobStatus.SUCCEEDED, {"paid": 7})
    assert notes(session) == ["kept"]
    assert told == ["committed"]


def test_an_error_in_a_block_of_finish_undoes_it_and_fails_the_attempt(
    queue: PgQueue, session: Session
) -> None:
    @queue.task(max_attempts=2)
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as own:
            note(own, f"attempt {ctx.attempt}")
            if ctx.attempt == 1:
                raise ValueError("first")

    job = pay.enqueue(session)

    run_jobs(session, queue=queue, raise_errors=False, until=timedelta(hours=1))

    assert (job.status, job.attempts) == (JobStatus.SUCCEEDED, 2)
    assert notes(session) == ["attempt 2"]


def test_what_is_raised_after_a_block_of_finish_fails_the_test_and_not_the_job(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def pay(ctx: JobContext) -> None:
        with ctx.finish() as own:
            note(own, "kept")
        raise LookupError("too late to fail")

    job = pay.enqueue(session)

    with pytest.raises(LookupError, match="too late to fail"):
        run_jobs(session, queue=queue)

    assert (job.status, notes(session)) == (JobStatus.SUCCEEDED, ["kept"])


def test_finish_of_a_lost_lease_is_rolled_back(queue: PgQueue, session: Session) -> None:
    raised: list[Exception] = []

    @queue.task
    def pay(ctx: JobContext) -> None:
        try:
            with ctx.finish() as own:
                note(own, "undone")
        except LeaseLost as error:
            raised.append(error)
            raise

    job = pay.enqueue(session)

    lose_lease(session, job, queue=queue)

    assert "this attempt has lost its job" in str(raised)
    assert (job.status, notes(session)) == (JobStatus.PENDING, [])


@pytest.mark.parametrize("ending", ["succeeds", "fails", "is lost"])
def test_the_last_progress_is_kept_however_the_attempt_ends(
    queue: PgQueue, session: Session, ending: str
) -> None:
    @queue.task
    def work(session: Session, ctx: JobContext) -> None:
        ctx.progress(1, 3)
        ctx.progress(2, 3, "two")
        if ending == "fails":
            raise ValueError

    job = work.enqueue(session)
    if ending == "is lost":
        crash_job(session, job, queue=queue)
    else:
        run_jobs(session, queue=queue, raise_errors=False)

    assert job.progress == {"done": 2, "total": 3, "note": "two"}


def test_delay_warns_inside_of_a_transactional_handler(queue: PgQueue, session: Session) -> None:
    @queue.task(name="later", queue="later")
    def later() -> None: ...

    @queue.task
    def work(session: Session) -> None:
        note(session, "written")
        with pytest.warns(DelayInTransaction):
            later.delay()

    work.enqueue(session)

    run_jobs(session, queue=queue)


def test_finish_async_works_on_an_async_connection(database_url: str) -> None:
    queue = PgQueue()

    @queue.task(retry=Retry.linear(timedelta(hours=1)))
    async def pay(ctx: JobContext, fails: bool) -> None:
        async with ctx.finish_async({"paid": 7}) as own:
            await own.run_sync(note, f"attempt {ctx.attempt}")
            if fails:
                raise ValueError("in the block")

    async def check() -> None:
        engine = create_async_engine(database_url)
        async with engine.connect() as connection:
            await connection.execute(text("CREATE TABLE notes (word text)"))
            with queue.bound_to(connection):
                async with AsyncSession(
                    connection, join_transaction_mode="create_savepoint"
                ) as session:
                    ends = await pay.enqueue_async(session, fails=False)
                    fails = await pay.enqueue_async(session, fails=True)
                    await session.run_sync(run_jobs, queue=queue, raise_errors=False)
                    await session.refresh(ends)
                    await session.refresh(fails)
                    assert (ends.status, ends.result) == (JobStatus.SUCCEEDED, {"paid": 7})
                    assert (fails.attempts, fails.last_error is not None) == (1, True)
                    assert await session.run_sync(notes) == ["attempt 1"]
            await connection.rollback()
        await engine.dispose()

    asyncio.run(check())
