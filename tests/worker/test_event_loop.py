"""What a handler does to its event loop is its own matter: the loop goes on for the others."""

import asyncio
import selectors
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession

from chaos.workers import PATIENCE
from pgqueue import Job, JobContext, PgQueue, Retry, Worker
from pgqueue.errors import WorkerBroken
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call_async
from pgqueue.handler.run import NO_CONTEXT
from pgqueue.outcomes import Outcome
from pgqueue.repository.claim import Claimed


async def leave() -> None:
    sys.exit(3)


async def be_interrupted() -> None:
    raise KeyboardInterrupt


async def leave_when_cancelled() -> None:
    try:
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        sys.exit(3)


async def await_exit() -> None:
    await asyncio.create_task(leave())


async def await_interrupt() -> None:
    await asyncio.create_task(be_interrupted())


async def exit_in_background() -> None:
    _kept.append(asyncio.create_task(leave()))
    await asyncio.sleep(0.01)


async def exit_at_the_end() -> None:
    _kept.append(asyncio.create_task(leave_when_cancelled()))
    await asyncio.sleep(0.01)


async def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit)
    await asyncio.sleep(0.01)


async def exit_in_the_exception_handler() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: sys.exit(3))
    loop.call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)
    loop.set_exception_handler(None)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


async def close_the_loop() -> None:
    asyncio.get_running_loop().close()


_kept: list[asyncio.Task[None]] = []
"""Or they may be collected before they run."""

DEEDS: dict[str, tuple[Callable[[], Awaitable[None]], str]] = {
    "awaits an exit": (await_exit, "failed"),
    "awaits an interrupt": (await_interrupt, "failed"),
    "exits in background": (exit_in_background, "succeeded"),
    "exits at the end": (exit_at_the_end, "succeeded"),
    "exits in a callback": (exit_in_a_callback, "succeeded"),
    "exits in the exception handler": (exit_in_the_exception_handler, "succeeded"),
    "stops the loop": (stop_the_loop, "succeeded"),
    "closes the loop": (close_the_loop, "failed"),
}
"""What a handler does, and how its job ends."""


@pytest.mark.parametrize("is_transactional", [False, True])
def test_a_handler_that_ends_its_event_loop_costs_no_other_anything(
    engine: Engine, is_transactional: bool
) -> None:
    queue = PgQueue(engine)
    is_beside, all_done = threading.Event(), threading.Event()
    left = len(DEEDS)

    async def be_beside() -> None:
        is_beside.set()
        while not all_done.is_set():
            await asyncio.sleep(0.001)

    async def misbehave(deed: str) -> None:
        nonlocal left
        while not is_beside.is_set():
            await asyncio.sleep(0.001)
        try:
            await DEEDS[deed][0]()
        finally:
            left -= 1
            if left == 0:
                all_done.set()

    neighbour: Any
    culprit: Any
    if is_transactional:

        @queue.task(name="neighbour", retry=Retry.never())
        async def neighbour(session: AsyncSession) -> None:
            await be_beside()

        @queue.task(name="culprit", retry=Retry.never())
        async def culprit(session: AsyncSession, deed: str) -> None:
            await misbehave(deed)

    else:
        neighbour = queue.task(name="neighbour", retry=Retry.never())(be_beside)
        culprit = queue.task(name="culprit", retry=Retry.never())(misbehave)

    with queue.session() as session:
        beside = neighbour.enqueue(session).id
        jobs = {deed: culprit.enqueue(session, deed).id for deed in DEEDS}
        session.commit()

        Worker(queue, concurrency=2).run_until_empty(timeout=PATIENCE)

        ended = {deed: session.get_one(Job, job).outcome for deed, job in jobs.items()}
        assert ended == {deed: outcome for deed, (_, outcome) in DEEDS.items()}
        assert session.get_one(Job, beside).outcome == "succeeded"
        assert queue.check(session) == []


def test_a_worker_whose_event_loop_ends_says_so_and_ends(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    queue = PgQueue(engine)
    started = threading.Event()
    loops: list[Any] = []  # Any: the selector is an attribute of asyncio alone

    @queue.task
    async def run_beside(ctx: JobContext) -> None:
        started.set()
        await asyncio.sleep(PATIENCE)

    @queue.task
    async def break_the_loop() -> None:
        while not started.is_set():
            await asyncio.sleep(0.001)
        loops.append(asyncio.get_running_loop())
        loops[0]._selector.close()
        await asyncio.sleep(PATIENCE)

    with queue.session() as session:
        jobs = [task.enqueue(session).id for task in (run_beside, break_the_loop)]
        session.commit()

        with pytest.raises(WorkerBroken, match="event-loop"):
            Worker(queue, concurrency=2, grace=timedelta(seconds=PATIENCE)).run()
        loops[0]._selector = selectors.DefaultSelector()  # without one, it could not be closed
        loops[0].close()

        assert "pgqueue-event-loop ended with an unexpected error" in caplog.text
        ended = [session.get_one(Job, job) for job in jobs]
        assert [(job.outcome, job.attempts) for job in ended] == [(None, 0), (None, 0)]
        assert queue.check(session) == []


def test_a_handler_that_outlives_its_loop_is_discarded_in_silence(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    queue, started = PgQueue(engine), threading.Event()

    async def start(attempt: Coroutine[Any, Any, Outcome]) -> None:
        left.append(asyncio.create_task(attempt))
        while not started.is_set():
            await asyncio.sleep(0)

    @queue.task
    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    claimed = Claimed(5, "", 1, 1, "default", wait.name, "{}", 1, 1, 0)
    left: list[asyncio.Task[Outcome]] = []
    loop = asyncio.new_event_loop()
    attempt = RunningAttempt(claimed, wait, worker_id=uuid4(), stopping=threading.Event())
    loop.run_until_complete(start(call_async(attempt, NO_CONTEXT)))
    loop.close()
    left[0].get_coro().close()  # as when it is collected

    assert not [line for line in caplog.records if line.levelname == "ERROR"]
