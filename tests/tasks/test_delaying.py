"""``delay()`` beside an open transaction commits past it, and says so."""

import warnings

import pytest
from kiosk import closing_engines, db, kiosk_app, work
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import DelayInTransaction, JobContext, PgQueue, Worker
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

    expected = ["async", "session", "finish"]
    assert sorted(told) == sorted(f"{name} DelayInTransaction" for name in expected)
