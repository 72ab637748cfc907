"""Two releases of one application, for workers of both at once.

A worker imports ``chaos.releases.one`` or ``chaos.releases.two``; a scenario enqueues as either
of them does, through a queue of its own.
"""

from __future__ import annotations

from typing import Any

from chaos.history import START
from chaos.sample_tasks import AT_ONCE, note
from pgqueue import JobContext, PgQueue, Task


def one(queue: PgQueue) -> dict[str, Task[..., Any]]:
    @queue.task(name="releases.greet", retry=AT_ONCE)
    def greet(ctx: JobContext, name: str) -> int:
        note(START, ctx, release=1)
        return ctx.attempt

    return {"greet": greet}


def two(queue: PgQueue) -> dict[str, Task[..., Any]]:
    """Gives a task one more parameter, with a default, and has a task that was not there before."""

    @queue.task(name="releases.greet", retry=AT_ONCE)
    def greet(ctx: JobContext, name: str, title: str = "") -> int:
        note(START, ctx, release=2, title=title)
        return ctx.attempt

    @queue.task(name="releases.wave", retry=AT_ONCE)
    def wave(ctx: JobContext, name: str) -> int:
        note(START, ctx, release=2)
        return ctx.attempt

    return {"greet": greet, "wave": wave}
