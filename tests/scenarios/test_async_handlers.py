"""Async handlers: what they block, and what an AsyncSession can do in them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from worker_rig import Rig, endings

from pgqueue import Job, PgQueue, Retry, Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.mark.journey
def test_a_handler_that_blocks_the_event_loop_does_not_stop_the_heartbeat(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        blocked = rig.start()
        with rig.session() as session:
            job = worker_tasks.block_the_loop.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        rig.start()

        over_at = time.monotonic() + 3  # twice the grace of those who have lost their lock
        rig.until(lambda: time.monotonic() > over_at or rig.declared_dead())

        assert rig.declared_dead() == 0
        with rig.session() as session:
            others = [worker_tasks.quick.enqueue(session).id for _ in range(4)]
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
    return [job.queue for job in await session.scalars(select(Job).limit(1))]


async def _one_entity(session: AsyncSession) -> Any:
    job = (await session.scalars(select(Job).limit(1))).one()
    return (await session.get_one(Job, job.id, populate_existing=True)).queue


async def _no_rows(session: AsyncSession) -> Any:
    await session.execute(text("CREATE TABLE made (n int)"))
    return await session.scalar(text("SELECT count(*) FROM made"))


async def _stream(session: AsyncSession) -> Any:
    result = await session.stream(text("SELECT n FROM generate_series(1, 3) AS n"))
    return [tuple(row) async for row in result]


async def _partitions(session: AsyncSession) -> Any:
    result = await session.stream_scalars(select(Job.queue).limit(1))
    return [part async for part in result.partitions(2)]


async def _savepoint(session: AsyncSession) -> Any:
    async with session.begin_nested() as savepoint:
        await session.execute(text("CREATE TABLE undone (n int)"))
        await savepoint.rollback()
    return await session.scalar(text("SELECT to_regclass('undone')"))


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


def test_an_async_session_does_in_a_handler_what_it_does_elsewhere(engine: Engine) -> None:
    queue = PgQueue(engine)
    uses = iter(USES)
    found: list[Any] = []

    @queue.task(retry=Retry.never())
    async def using(session: AsyncSession) -> None:
        found.append(await next(uses)(session))

    for _ in USES:
        using.delay()

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": len(USES)}
    assert found == [*USES.values()]
    with queue.session() as session:
        assert queue.check(session) == []


def test_sync_and_async_jobs_take_turns_in_one_slot_in_their_order(queue: PgQueue) -> None:
    ran: list[int] = []

    @queue.task
    def sync(n: int) -> None:
        ran.append(n)

    @queue.task
    async def on_loop(n: int) -> None:
        await asyncio.sleep(0)
        ran.append(n)

    order: list[Any] = [on_loop, on_loop, sync, on_loop, sync, sync, on_loop]
    with queue.session() as session:
        for n, task in enumerate(order * 10):
            task.enqueue(session, n)
        session.commit()

    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert ran == list(range(70))


def test_an_async_job_finds_nothing_of_the_last_one_in_its_context(queue: PgQueue) -> None:
    mark = ContextVar("mark", default="nothing")
    found: list[str] = []

    @queue.task
    async def leave_a_mark() -> None:
        found.append(mark.get())
        mark.set("left by another job")

    with queue.session() as session:
        leave_a_mark.enqueue_many(session, [()] * 20)
        session.commit()

    counts = Worker(queue, concurrency=2).run_until_empty(timeout=60)

    assert found == ["nothing"] * 20
    assert counts == {"succeeded": 20}


@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_cancels_its_own_task_fails_alone(
    queue: PgQueue, has_session: bool, raises: bool
) -> None:
    def cancel_oneself() -> None:
        own = asyncio.current_task()
        assert own is not None
        own.cancel()  # would be felt at the next await, of which the handler has none
        if raises:
            raise ValueError("cancelled as well")

    if has_session:

        @queue.task(name="cancel", retry=Retry.never())
        async def cancel_with_session(session: AsyncSession) -> None:
            cancel_oneself()

        task: Any = cancel_with_session
    else:

        @queue.task(name="cancel", retry=Retry.never())
        async def cancel() -> None:
            cancel_oneself()

        task = cancel

    @queue.task
    async def neighbour() -> None:
        await asyncio.sleep(0)

    with queue.session() as session:
        for _ in range(3):
            task.enqueue(session)
            neighbour.enqueue(session)
        session.commit()

    counts = Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert counts == {"failed": 3, "succeeded": 3}


def test_as_many_async_jobs_run_at_once_as_there_are_slots(queue: PgQueue) -> None:
    running, most = 0, 0
    together = asyncio.Semaphore(0)

    @queue.task
    async def overlap() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            for _ in range(100):
                together.release()
        await asyncio.wait_for(together.acquire(), 10)
        await asyncio.sleep(0)
        running -= 1

    with queue.session() as session:
        overlap.enqueue_many(session, [()] * 40)
        session.commit()

    counts = Worker(queue, concurrency=4).run_until_empty(timeout=60)

    assert (counts, most) == ({"succeeded": 40}, 4)
