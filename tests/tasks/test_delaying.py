"""``delay()`` beside an open transaction commits past it, and says so."""

import asyncio
import warnings

import pytest
from kiosk import closing_engines, db, kiosk_app, work
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import DelayInEventLoop, DelayInTransaction, Job, JobContext, PgQueue, Worker
from pgqueue import flask as pgqueue_flask


def test_delay_in_a_request_warns_while_db_session_has_a_transaction(database_url: str) -> None:
    queue = pgqueue_flask.PgQueue()

    @queue.task(name="tests.greet")
    def greet() -> None: ...

    with closing_engines(kiosk_app(queue, database_url)) as app, app.test_request_context():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            greet.delay()

        db.session.execute(text("SELECT 1"))
        with pytest.warns(
            DelayInTransaction, match=r"tests.greet: delay\(\) commits .* enqueue\("
        ) as told:
            greet.delay()
        assert told[0].filename == __file__, "the warning names the line of the call"

        db.session.commit()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            greet.delay()
            greet.enqueue(db.session)
    assert work(app, queue) == {"succeeded": 3}


def test_delay_in_a_handler_warns_if_its_session_has_a_transaction(engine: Engine) -> None:
    queue = PgQueue(engine)
    told: list[str] = []

    def delay(name: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            noop.delay()
        told.extend(f"{name} {warning.category.__name__}" for warning in caught)

    @queue.task
    def noop() -> None: ...

    @queue.task
    def plain() -> None:
        delay("plain")

    @queue.task
    def with_session(session: Session) -> None:
        session.execute(text("SELECT 1"))
        delay("session")

    @queue.task
    async def with_async_session(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        delay("async")

    @queue.task
    def finishing(ctx: JobContext) -> None:
        with ctx.finish() as session:
            session.execute(text("SELECT 1"))
            delay("finish")
        delay("after")

    for task in queue.tasks.values():
        if task is not noop:
            task.delay()

    # One slot, so that no warning is caught by the filter of another handler.
    endings(Worker(queue, concurrency=1))

    expected = [f"{name} DelayInTransaction" for name in ("async", "session", "finish")]
    assert sorted(told) == sorted([*expected, "async DelayInEventLoop"])


def test_delay_warns_in_an_event_loop_and_names_delay_async(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.greet")
    def greet() -> None: ...

    async def main() -> None:
        with pytest.warns(DelayInEventLoop, match=r"tests.greet: .*delay_async\(") as told:
            greet.delay()
        assert told[0].filename == __file__, "the warning names the line of the call"

    asyncio.run(main())


def test_delay_async_enqueues_without_blocking_the_loop(engine: Engine) -> None:
    """A lock on the table keeps it waiting, and the loop goes on."""
    queue = PgQueue(engine)

    @queue.task(name="tests.greet")
    def greet(name: str) -> None: ...

    async def main() -> Job:
        with queue.session() as session:
            session.execute(text("LOCK TABLE pgqueue.jobs"))
            delaying = asyncio.create_task(greet.delay_async("Ada"))
            while not session.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")):
                await asyncio.sleep(0.005)
        return await delaying

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = asyncio.run(main())

    assert (job.task, job.is_new) == ("tests.greet", True)
    assert endings(Worker(queue)) == {"succeeded": 1}


def test_delay_async_warns_in_an_open_transaction(engine: Engine) -> None:
    queue, told = PgQueue(engine), list[str]()

    @queue.task
    def noop() -> None: ...

    @queue.task
    async def write(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await noop.delay_async()
        told.extend(f"{warning.category.__name__} {warning.filename}" for warning in caught)

    write.delay()
    endings(Worker(queue, concurrency=1))

    assert told == [f"DelayInTransaction {__file__}"]


def test_delay_async_joins_the_transaction_of_a_test(engine: Engine) -> None:
    with engine.connect() as connection:
        queue = PgQueue(connection)

        @queue.task
        def noop() -> None: ...

        asyncio.run(noop.delay_async())

        count = text("SELECT count(*) FROM pgqueue.jobs")
        assert connection.scalar(count) == 1
        connection.rollback()
        assert connection.scalar(count) == 0
