"""Async handlers: what they block, and what an AsyncSession can do in them."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import chores
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from worker_rig import MODES, Rig

from pgqueue import Job, PgQueue, Retry, Worker


@pytest.mark.parametrize("mode", MODES)
def test_a_handler_that_blocks_the_event_loop_does_not_stop_the_heartbeat(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        blocked = rig.start(mode)
        with rig.session() as session:
            job = chores.block_the_loop.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        rig.start(mode)

        over_at = time.monotonic() + 3  # twice the grace of those who have lost their lock
        rig.until(lambda: time.monotonic() > over_at or rig.declared_dead())

        assert rig.declared_dead() == 0
        with rig.session() as session:
            others = [chores.quick.enqueue(session).id for _ in range(4)]
            session.commit()
        rig.until_ended(*others)
        rig.open("go")
        rig.until_ended()
        assert rig.bad_attempts() == []
        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert blocked.terminate() == 0
        assert rig.check() == []


async def _rows(session: AsyncSession) -> Any:
    return (await session.execute(text("SELECT n FROM generate_series(1, 3) AS n"))).all()


async def _scalars(session: AsyncSession) -> Any:
    return (await session.scalars(text("SELECT n FROM generate_series(1, 3) AS n"))).all()


async def _entities(session: AsyncSession) -> Any:
    return [job.queue for job in await session.scalars(select(Job))]


async def _one_entity(session: AsyncSession) -> Any:
    job = (await session.scalars(select(Job))).one()
    return (await session.get_one(Job, job.id, populate_existing=True)).queue


async def _no_rows(session: AsyncSession) -> Any:
    await session.execute(text("CREATE TABLE made (n int)"))
    return await session.scalar(text("SELECT count(*) FROM made"))


async def _stream(session: AsyncSession) -> Any:
    result = await session.stream(text("SELECT n FROM generate_series(1, 3) AS n"))
    return [tuple(row) async for row in result]


async def _partitions(session: AsyncSession) -> Any:
    result = await session.stream_scalars(select(Job.queue))
    return [part async for part in result.partitions(2)]


async def _savepoint(session: AsyncSession) -> Any:
    async with session.begin_nested() as savepoint:
        await session.execute(text("CREATE TABLE made (n int)"))
        await savepoint.rollback()
    return await session.scalar(text("SELECT to_regclass('made')"))


async def _run_sync(session: AsyncSession) -> Any:
    return await session.run_sync(lambda sync: sync.scalar(text("SELECT 1")))


async def _commit(session: AsyncSession) -> Any:
    await session.execute(text("SELECT 1"))
    await session.commit()
    return await session.scalar(text("SELECT 1"))


USES: dict[Callable[[AsyncSession], Awaitable[Any]], Any] = {
    _rows: [(1,), (2,), (3,)],
    _scalars: [1, 2, 3],
    _entities: ["default"],
    _one_entity: "default",
    _no_rows: 0,
    _stream: [(1,), (2,), (3,)],
    _partitions: [["default"]],
    _savepoint: None,
    _run_sync: 1,
    _commit: 1,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
def test_an_async_session_does_in_a_handler_what_it_does_elsewhere(
    engine: Engine, mode: str, use: Callable[[AsyncSession], Awaitable[Any]]
) -> None:
    queue = PgQueue(engine)
    found: list[Any] = []

    @queue.task(retry=Retry.never())
    async def using(session: AsyncSession) -> None:
        found.append(await use(session))

    with queue.session() as session:
        job = using.enqueue(session).id
        session.commit()

    Worker(queue, concurrency=1, mode=mode).run_until_empty(timeout=20)

    with queue.session() as session:
        ended = session.get_one(Job, job)
        assert (ended.last_error, ended.outcome) == (None, "succeeded")
        assert found == [USES[use]]
        assert queue.check(session) == []
