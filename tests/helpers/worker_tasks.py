"""Tasks for tests with worker processes, beside those of ``chaos.sample_tasks``.

Handlers write down what happens to them, and wait for files that the test makes: nobody sleeps in
the hope that it was enough.
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.sample_tasks import AT_ONCE, EFFECT, LOOK_EVERY, effect, is_open, note, queue, until_open
from chaos.sample_tasks import EFFECTS as EFFECTS
from chaos.sample_tasks import pay as pay
from chaos.sample_tasks import pay_async as pay_async
from pgqueue import JobContext, Retry, Snooze, Unique


def until_cancelled(ctx: JobContext) -> None:
    while not ctx.is_cancelled():
        time.sleep(LOOK_EVERY)
    note("cancelled", ctx)


def until_stopping(ctx: JobContext) -> Snooze:
    while not ctx.is_stopping():
        time.sleep(LOOK_EVERY)
    note("stopping", ctx, cancelled=ctx.is_cancelled())
    return Snooze(timedelta(0))


@queue.task(retry=AT_ONCE)
def quick(ctx: JobContext, n: int = 0) -> None:
    note("start", ctx)


@queue.task(retry=AT_ONCE, max_attempts=1, on_failed=quick.options(queue="alerts"))
def fail(ctx: JobContext) -> None:
    raise ValueError("for good")


@queue.task(retry=AT_ONCE)
def pay_at_end(ctx: JobContext, milliseconds: int = 0) -> None:
    note("start", ctx)
    with ctx.finish() as session:
        session.execute(EFFECT, effect(ctx))
    time.sleep(milliseconds / 1000)


@queue.task(retry=AT_ONCE)
async def pay_at_end_async(ctx: JobContext, milliseconds: int = 0) -> None:
    note("start", ctx)
    async with ctx.finish_async() as session:
        await session.execute(EFFECT, effect(ctx))
    await asyncio.sleep(milliseconds / 1000)


@queue.task(retry=AT_ONCE)
def wait(ctx: JobContext, gate: str) -> str:
    """Ends when its gate opens, whatever else happens."""
    note("start", ctx)
    until_open(gate)
    note("end", ctx, cancelled=ctx.is_cancelled())
    return gate


@queue.task(retry=AT_ONCE, unique=Unique(by=("gate",), until="started"))
def wait_alone(ctx: JobContext, gate: str) -> None:
    """Of these, one waits for each gate; more may run."""
    wait.function(ctx, gate)


@queue.task(
    executor="process",
    expires_in=timedelta(hours=1),
    unique=Unique(by=(), until="started"),
    retry=Retry.never(),
)
def alone_in_process(left: int) -> None:
    """Enqueues its successor under its own key, from a child process."""
    if left:
        assert alone_in_process.delay(left - 1).is_new


@queue.task(retry=AT_ONCE, max_interruptions=2)
def wait_twice(ctx: JobContext, gate: str) -> None:
    note("start", ctx)
    until_open(gate)


@queue.task(retry=AT_ONCE)
def wait_and_pay(session: Session, ctx: JobContext, gate: str) -> str:
    session.execute(EFFECT, effect(ctx))
    return wait.function(ctx, gate)


@queue.task(retry=AT_ONCE)
async def wait_async(ctx: JobContext, gate: str) -> str:
    note("start", ctx)
    while not is_open(gate):
        await asyncio.sleep(LOOK_EVERY)
    note("end", ctx)
    return gate


@queue.task(retry=AT_ONCE)
def block(ctx: JobContext, gate: str) -> None:
    note("start", ctx)
    until_open(gate)


@queue.task(retry=AT_ONCE)
async def block_the_loop(ctx: JobContext, gate: str) -> None:
    """What nobody should write: every other async handler stands still."""
    note("start", ctx)
    until_open(gate)
    note("end", ctx)


@queue.task(retry=AT_ONCE)
def heed_stop(ctx: JobContext) -> Snooze:
    note("start", ctx)
    return until_stopping(ctx)


@queue.task(retry=AT_ONCE)
def heed_stop_and_pay(session: Session, ctx: JobContext) -> Snooze:
    session.execute(EFFECT, effect(ctx))
    return heed_stop.function(ctx)


@queue.task(retry=AT_ONCE)
async def heed_stop_async(ctx: JobContext) -> Snooze:
    note("start", ctx)
    while not ctx.is_stopping():
        await asyncio.sleep(LOOK_EVERY)
    note("stopping", ctx, cancelled=ctx.is_cancelled())
    return Snooze(timedelta(0))


@queue.task(retry=AT_ONCE)
def heed(ctx: JobContext) -> None:
    """Works until somebody asks it to stop."""
    note("start", ctx)
    until_cancelled(ctx)


@queue.task(retry=AT_ONCE)
def heed_and_pay(session: Session, ctx: JobContext) -> None:
    session.execute(EFFECT, effect(ctx))
    heed.function(ctx)


@queue.task(retry=AT_ONCE)
def heed_after_mistake(session: Session, ctx: JobContext) -> None:
    """Its statement tells the driver that the connection has ended, and it goes on."""
    session.execute(EFFECT, effect(ctx))
    note("start", ctx)
    while not ctx.is_cancelled():
        if is_open("go"):
            with suppress(SQLAlchemyError):
                session.execute(text("SELECT 1"))
        time.sleep(LOOK_EVERY)
    note("cancelled", ctx)


@queue.task(retry=AT_ONCE)
async def heed_and_pay_async(session: AsyncSession, ctx: JobContext) -> None:
    await session.execute(EFFECT, effect(ctx))
    await heed_async.function(ctx)


@queue.task(retry=AT_ONCE)
async def heed_async(ctx: JobContext) -> None:
    note("start", ctx)
    try:
        await asyncio.Event().wait()
    finally:
        note("cancelled", ctx)


@queue.task(retry=AT_ONCE)
def cancel_from_within(session: Session, ctx: JobContext, other: int | None = None) -> None:
    """Cancels its own job, or another, in its own transaction."""
    note("start", ctx)
    session.execute(EFFECT, effect(ctx))
    note("change", ctx, change=queue.cancel(session, other or ctx.job_id))


@queue.task(retry=AT_ONCE, max_attempts=3)
def poison(ctx: JobContext) -> None:
    note("start", ctx)
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=timedelta(seconds=0.3))
def overrun(ctx: JobContext, gate: str) -> None:
    """Runs past its timeout, and notes when it hears of it."""
    note("start", ctx)
    until_cancelled(ctx)
    until_open(gate)
    note("end", ctx)


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=timedelta(seconds=1))
def overrun_late(ctx: JobContext, gate: str) -> None:
    """Leaves the test the time to wait for its message before."""
    overrun.function(ctx, gate)


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=timedelta(seconds=0.3))
def overrun_and_pay(session: Session, ctx: JobContext, gate: str) -> None:
    session.execute(EFFECT, effect(ctx))
    overrun.function(ctx, gate)


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=timedelta(seconds=0.3))
async def overrun_async(ctx: JobContext) -> None:
    note("start", ctx)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note("cancelled", ctx)
        raise


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=timedelta(seconds=0.3))
async def overrun_and_pay_async(session: AsyncSession, ctx: JobContext) -> None:
    await session.execute(EFFECT, effect(ctx))
    note("start", ctx)
    await session.execute(text("SELECT pg_sleep(600)"))


@queue.task(max_attempts=3, retry=Retry.constant(timedelta(seconds=0.2)))
def fail_twice(ctx: JobContext) -> None:
    note("start", ctx)
    if ctx.attempt < 3:
        raise RuntimeError(f"attempt {ctx.attempt}")


@queue.task(retry=AT_ONCE)
def hog_the_pool(ctx: JobContext, gate: str) -> None:
    """Holds connections of the application's own pool while it runs."""
    with queue.session() as session:
        session.execute(text("SELECT 1"))
        note("start", ctx)
        while not is_open(gate):
            time.sleep(LOOK_EVERY)


@queue.task(retry=AT_ONCE, max_attempts=1, timeout=timedelta(seconds=0.3))
async def block_past_timeout(ctx: JobContext, gate: str) -> None:
    note("start", ctx)
    until_open(gate)
    note("end", ctx)
