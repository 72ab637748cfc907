"""The application whose jobs the scenarios run.

Its handlers write into the history what they do, and wait for files that a scenario makes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Integer, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.history import END, START, Pen
from pgqueue import JobContext, PgQueue, Retry, Unique

queue = PgQueue()

AT_ONCE = Retry.constant(timedelta(0))
LOOK_EVERY = 0.02
FIRST = 2
"""The priority of jobs that must not wait for a backlog, or no worker would be killed amid them."""
AT_A_GATE = 0.05
"""Seconds between the starts of two jobs that a crash has left, where all wait for the scenario.
In the product it is two, for each of those that do not end before."""
EFFECTS = "CREATE TABLE IF NOT EXISTS effects (job bigint, attempt int, worker text)"
EFFECT = text("INSERT INTO effects (job, attempt, worker) VALUES (:job, :attempt, :worker)")

_pens: dict[int, Pen] = {}


def worker_name() -> str:
    return os.environ.get("CHAOS_WORKER", "scenario")


def directory() -> Path:
    return Path(os.environ["CHAOS_DIRECTORY"])


def note(word: str, ctx: JobContext, **details: Any) -> None:
    """Write down what happens, whatever happens to this process next."""
    pen = _pens.get(os.getpid())
    if pen is None:
        pen = _pens[os.getpid()] = Pen(directory(), worker_name())
    pen.write(word, job=ctx.job_id, attempt=ctx.attempt, **details)


def is_open(gate: str) -> bool:
    return (directory() / f"gate-{gate}").exists()


def until_open(gate: str) -> None:
    while not is_open(gate):
        time.sleep(LOOK_EVERY)


def attend(ctx: JobContext, act: Callable[[], object]) -> int:
    """Do it between the two lines of the history.

    The result of a handler is its attempt, so that the judge can see whose outcome was kept.
    """
    note(START, ctx)
    act()
    note(END, ctx)
    return ctx.attempt


async def attend_async(ctx: JobContext, act: Awaitable[object]) -> int:
    note(START, ctx)
    await act
    note(END, ctx)
    return ctx.attempt


def effect(ctx: JobContext) -> dict[str, Any]:
    return {"job": ctx.job_id, "attempt": ctx.attempt, "worker": worker_name()}


@queue.task(retry=AT_ONCE)
def call(ctx: JobContext, milliseconds: float = 0) -> int:
    """Something outside the database: may happen twice if its worker dies."""
    return attend(ctx, lambda: time.sleep(milliseconds / 1000))


@queue.task(retry=AT_ONCE)
async def call_async(ctx: JobContext, milliseconds: float = 0) -> int:
    return await attend_async(ctx, asyncio.sleep(milliseconds / 1000))


@queue.task(
    retry=AT_ONCE,
    priority=FIRST,
    unique=Unique(by=("key",), until="started", on_conflict="replace"),
)
def keep_newest(ctx: JobContext, key: int, version: int) -> int:
    """What is enqueued again and again with newer arguments, while it waits and while it runs."""
    note(START, ctx, version=version)
    time.sleep(0.02)  # so that an enqueue meets it while it runs
    note(END, ctx)
    return ctx.attempt


@queue.task(
    retry=AT_ONCE,
    priority=FIRST,
    max_attempts=100,
    unique=Unique(by=("chain",), until="started"),
)
def go_on(ctx: JobContext, chain: int, left: int) -> int:
    """Enqueues its successor under its own key."""
    note(START, ctx, left=left)
    if left:
        go_on.delay(chain, left - 1)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def pay(session: Session, ctx: JobContext, milliseconds: float = 0) -> int:
    """A row of the application: exactly one if the job succeeds, none otherwise."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    time.sleep(milliseconds / 1000)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def pay_in_steps(ctx: JobContext, milliseconds: float = 0) -> int:
    """The second of three rows pays, between two steps: it is neither skipped nor repeated."""

    def pay_for(session: Session, numbers: Sequence[int]) -> None:
        if 2 in numbers:
            session.execute(EFFECT, effect(ctx))
        time.sleep(milliseconds / 3000)

    note(START, ctx)
    ctx.step("before", time.sleep, milliseconds / 1000)
    numbers = func.generate_series(1, 3, type_=Integer).column_valued("number")
    ctx.each("pay", select(numbers), pay_for, key=numbers, size=1)
    ctx.step("after", time.sleep, milliseconds / 1000)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
async def pay_async(session: AsyncSession, ctx: JobContext, milliseconds: float = 0) -> int:
    note(START, ctx)
    await session.execute(EFFECT, effect(ctx))
    await asyncio.sleep(milliseconds / 1000)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def pay_and_follow(session: Session, ctx: JobContext, milliseconds: float = 0) -> int:
    """Enqueues its successor in the same commit."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    pay.enqueue(session, milliseconds)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def wait(ctx: JobContext, gate: str) -> int:
    """Ends when its gate opens, whatever else happens."""
    return attend(ctx, lambda: until_open(gate))


@queue.task(retry=AT_ONCE)
def wait_and_pay(session: Session, ctx: JobContext, gate: str) -> int:
    session.execute(EFFECT, effect(ctx))
    return attend(ctx, lambda: until_open(gate))
