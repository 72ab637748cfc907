"""Tasks under limits; a worker process imports this module if asked."""

import time
from datetime import timedelta

from chaos.sample_tasks import AT_ONCE, note, queue, until_open
from pgqueue import JobContext, Limit


def _work(ctx: JobContext, key: str, milliseconds: float) -> None:
    note("start", ctx, key=key)
    time.sleep(milliseconds / 1000)
    note("end", ctx, key=key)


@queue.task(retry=AT_ONCE, limit=Limit(1, by="key"))
def one_of_a_key(ctx: JobContext, key: str, milliseconds: float = 1) -> None:
    _work(ctx, key, milliseconds)


@queue.task(retry=AT_ONCE, limit=Limit(2, by="key"))
def gated(ctx: JobContext, key: str, gate: str) -> None:
    """Ends when its gate opens."""
    note("start", ctx, key=key)
    until_open(gate)
    note("end", ctx, key=key)


@queue.task(fair_by="key")
def in_turns(ctx: JobContext, key: str, gate: str) -> None:
    """Ends when its gate opens."""
    note("start", ctx, key=key)
    until_open(gate)


@queue.task(limit=Limit(20, per=timedelta(seconds=2)))
def spaced(ctx: JobContext) -> None:
    note("start", ctx)
