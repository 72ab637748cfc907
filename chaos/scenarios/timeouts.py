"""Handlers that run past the timeout of their task."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.chores import AT_ONCE, EFFECT, LOOK_EVERY, effect, is_open, note, pay, queue
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import JobContext, Task

TIMEOUT = timedelta(seconds=0.4)
LONGEST = 4.0
"""Seconds after which a handler returns by itself, as if nothing had been."""
WITHIN = 5.0
"""Seconds; there are 128 handlers past their timeout at once, on two cores."""


def in_python() -> None:
    until = time.monotonic() + LONGEST
    while not is_open("return") and time.monotonic() < until:
        time.sleep(LOOK_EVERY)


def in_one_sleep() -> None:
    time.sleep(LONGEST)


def on_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        select.select([one], [], [], LONGEST)


def in_a_program() -> None:
    subprocess.run(["sleep", str(LONGEST)], check=True)


WAYS: dict[str, Callable[[], None]] = {
    act.__name__: act for act in (in_python, in_one_sleep, on_a_socket, in_a_program)
}


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
def overstay(ctx: JobContext, way: str) -> int:
    note(START, ctx)
    WAYS[way]()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
def overstay_and_pay(session: Session, ctx: JobContext, way: str) -> int:
    session.execute(EFFECT, effect(ctx))
    note(START, ctx)
    WAYS[way]()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_async(ctx: JobContext, way: str) -> int:
    note(START, ctx)
    await asyncio.sleep(LONGEST)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_and_pay_async(session: AsyncSession, ctx: JobContext, way: str) -> int:
    """In a statement: in transaction mode nothing but the end of its backend ends that."""
    await session.execute(EFFECT, effect(ctx))
    note(START, ctx)
    await session.execute(text(f"SELECT pg_sleep({LONGEST})"))
    note(END, ctx)
    return ctx.attempt


@plant
def threads_are_not_timed(patch: Patch) -> None:
    """Nobody looks whether a handler in a thread is past its timeout."""
    from pgqueue.worker.shift import Shift

    patch.set(Shift, "_replace_overdue", lambda _self: None)


@plant
def coroutines_are_not_timed(patch: Patch) -> None:
    """The event loop does not cancel an async handler past its timeout.

    The watch over threads would find it a second later, and give up a thread for it.
    """
    patch.set(asyncio, "timeout", lambda _seconds: asyncio.Timeout(None))


EXECUTORS: dict[str, tuple[Task[[str], Any], ...]] = {
    "thread": (overstay, overstay_and_pay),
    "async": (overstay_async, overstay_and_pay_async),
}
"""By what runs the handler: a further executor adds its tasks here."""


@scenario(
    promises="P2 P5",
    research="T19",
    full=Size(jobs=2),
    short=Size(jobs=1),
    planted={
        "threads_are_not_timed": "not within|recorded as",
        "coroutines_are_not_timed": "was given up|not within",
    },
)
def handlers_past_their_timeout(stage: Stage, size: Size) -> None:
    """Handlers past their timeout, in both modes: recorded as such in time, and nothing is kept."""
    late: list[int] = []
    good: list[int] = []
    fleets = []
    ways = list(WAYS) if size.jobs > 1 else ["in_python"]
    for mode in ("lease", "transaction"):
        for tasks in EXECUTORS.values():
            for task in tasks:
                late += stage.enqueue(
                    task.options(queue=mode), [(way,) for way in ways] * size.jobs
                )
        good += stage.enqueue(pay.options(queue=mode), [(1,)] * 10)
        slots = 4 * len(ways) * size.jobs * 2
        engine = {"pool_size": slots}
        fleets.append(stage.fleet(mode, 1, queues=[mode], concurrency=slots, engine=engine))
    for fleet in fleets:
        fleet.until_registered()
    ended = "SELECT count(*) FROM pgqueue.job_attempts WHERE job_id = ANY(:jobs)"
    stage.until(
        lambda: stage.scalar(ended, jobs=late) == 2 * len(late),
        seconds=2 * WITHIN + TIMEOUT.total_seconds(),
        what="both attempts of each time out",
    )
    stage.count("timeouts", 2 * len(late))
    outcome = "SELECT DISTINCT outcome FROM pgqueue.job_attempts"
    found = [row[0] for row in stage.rows(outcome)]
    stage.expect(found == ["timeout"], f"attempts past their timeout are recorded as {found}")
    stage.open("return")
    stage.until_ended()
    _coroutines_were_cancelled(stage)
    for fleet in fleets:
        fleet.stop()
    stage.judge(succeeded=len(good), failed=len(late))


def _coroutines_were_cancelled(stage: Stage) -> None:
    """In lease mode no thread is lost for a coroutine, which ends where it waits."""
    coroutines = "SELECT id FROM pgqueue.jobs WHERE queue = 'lease' AND task LIKE '%async'"
    log = stage.members[0].log.read_text()
    for (job,) in stage.rows(coroutines):
        given_up = f"job {job}: past its timeout; its thread is given up" in log
        stage.expect(not given_up, f"a thread was given up for the coroutine of job {job}")
