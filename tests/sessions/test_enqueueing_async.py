"""Enqueue through AsyncSession and async_scoped_session: the same promises."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, select
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

from pgqueue import ArgumentsError, Change, DuplicateJob, Job, JobStatus, PgQueue

queue = PgQueue()


@queue.task(name="tests.greet")
async def greet(name: str) -> None: ...


@queue.task(name="tests.once", unique_key=lambda user_id: f"once:{user_id}")
def once(user_id: int) -> None: ...


Body = Callable[[AsyncSession], Awaitable[Any]]


def run(url: str, body: Body) -> Any:
    async def with_session() -> Any:
        engine = create_async_engine(url, poolclass=NullPool)
        async with AsyncSession(engine, expire_on_commit=False) as session:
            return await body(session)

    return asyncio.run(with_session())


def jobs_of(engine: Engine) -> list[Job]:
    with Session(engine) as session:
        assert queue.check(session) == []
        return list(session.scalars(select(Job).order_by(Job.id)))


def test_it_joins_the_transaction_of_the_session(engine: Engine, database_url: str) -> None:
    async def body(session: AsyncSession) -> int:
        job = await greet.enqueue_async(session, "Ada")
        session.add(greet.job("Bob"))
        session.add_all([greet.job("Cid"), once.job(1)])
        await greet.enqueue_many_async(session, [("Dan",), {"name": "Eve"}])
        assert session.in_transaction()
        assert jobs_of(engine) == []
        await session.commit()
        return job.id

    first = run(database_url, body)

    jobs = jobs_of(engine)
    assert first in {job.id for job in jobs}
    assert [job.status for job in jobs] == [JobStatus.PENDING] * 6


def test_a_rollback_leaves_nothing(engine: Engine, database_url: str) -> None:
    async def body(session: AsyncSession) -> None:
        await greet.enqueue_async(session, "Ada")
        async with session.begin_nested() as savepoint:
            await greet.enqueue_async(session, "Bob")
            await savepoint.rollback()
        session.add(greet.job("Cid"))
        await session.flush()
        await session.rollback()

    run(database_url, body)

    assert jobs_of(engine) == []


def test_a_taken_key_gives_its_job_and_raises_at_a_flush(engine: Engine, database_url: str) -> None:
    async def body(session: AsyncSession) -> None:
        first = await once.enqueue_async(session, 7)
        assert (await once.enqueue_async(session, 7)).id == first.id
        assert await once.enqueue_many_async(session, [(7,)]) == [first.id]
        await session.commit()
        session.add(once.job(7))
        with pytest.raises(DuplicateJob):
            await session.flush()

    run(database_url, body)

    assert len(jobs_of(engine)) == 1


def test_operators_act_through_run_sync(engine: Engine, database_url: str) -> None:
    async def body(session: AsyncSession) -> tuple[Change, Change]:
        job = await greet.enqueue_async(session, "Ada")
        cancelled = await session.run_sync(queue.cancel, job.id)
        requeued = await session.run_sync(queue.requeue, job.id)
        await session.commit()
        return cancelled, requeued

    assert run(database_url, body) == (Change.CANCELLED, Change.REQUEUED)

    assert [job.status for job in jobs_of(engine)] == [JobStatus.PENDING]


def test_a_scoped_session_is_a_session(engine: Engine, database_url: str) -> None:
    async def body(_session: AsyncSession) -> None:
        maker = async_sessionmaker(create_async_engine(database_url, poolclass=NullPool))
        sessions = async_scoped_session(maker, scopefunc=asyncio.current_task)
        await greet.enqueue_async(sessions, "Ada")
        await greet.enqueue_many_async(sessions, [("Bob",)])
        sessions.add(greet.job("Cid"))
        await sessions.commit()
        await sessions.remove()

    run(database_url, body)

    assert len(jobs_of(engine)) == 3


def test_the_wrong_kind_of_session_is_named_with_the_right_method(
    database_url: str, session: Session
) -> None:
    async def body(async_session: AsyncSession) -> None:
        wrong: Any = async_session
        with pytest.raises(ArgumentsError, match="_async"):
            greet.enqueue(wrong, "Ada")

    run(database_url, body)
    wrong: Any = session
    with pytest.raises(ArgumentsError, match="without _async"):
        asyncio.run(greet.enqueue_async(wrong, "Ada"))
