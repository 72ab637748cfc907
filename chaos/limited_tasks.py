"""Tasks under limits; workers import them only for the scenarios about limits."""

from __future__ import annotations

import time
from datetime import timedelta

from chaos.history import END, START
from chaos.sample_tasks import AT_ONCE, note, queue
from pgqueue import JobContext, Limit


@queue.task(retry=AT_ONCE, limit=(Limit(1, by="key", name="key"), Limit(3, name="all")))
def call_in_turn(ctx: JobContext, key: str, milliseconds: float = 0) -> None:
    """Something of which one may run for each key, and three in all."""
    note(START, ctx, key=key)
    time.sleep(milliseconds / 1000)
    note(END, ctx, key=key)


SECOND = timedelta(seconds=1)


@queue.task(
    retry=AT_ONCE,
    limit=(
        Limit(10, by="key", per=SECOND, burst=2, name="starts_of_key"),
        Limit(30, per=SECOND, burst=3, name="starts"),
    ),
)
def call_at_a_rate(ctx: JobContext, key: str) -> None:
    """Something that fails the first time, and of which so many may start in a second."""
    note(START, ctx, key=key)
    note(END, ctx, key=key)
    if ctx.attempt == 1:
        raise ValueError("planned")


@queue.task(retry=AT_ONCE, fair_by="key")
def call_by_turns(ctx: JobContext, key: str, milliseconds: float = 0) -> None:
    """Something that keys take turns to do."""
    note(START, ctx, key=key)
    time.sleep(milliseconds / 1000)
    note(END, ctx, key=key)
