"""Tasks whose handlers run in child processes, for tests with worker processes."""

import os
from collections.abc import Iterator

from chaos.sample_tasks import AT_ONCE, note, queue, until_open
from pgqueue import JobContext

tenants: list[str] = []


@queue.middleware
def keep_tenant(ctx: JobContext) -> Iterator[None]:
    tenants.append(ctx.meta.get("tenant", ""))
    yield
    tenants.pop()


@queue.task(executor="process", retry=AT_ONCE)
def surrounded() -> list[str]:
    return tenants


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def wait_in_process(ctx: JobContext, gate: str) -> str:
    note("start", ctx, server=os.getppid())
    until_open(gate)
    return gate


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def spin(ctx: JobContext) -> None:
    """Holds the GIL for ever."""
    note("start", ctx, server=os.getppid())
    sum(range(10**12))


@queue.task(executor="process")
def report(ctx: JobContext, total: int) -> None:
    ctx.progress(0, total, "begun")
    until_open("report")
    for done in range(total + 1):
        ctx.progress(done, total)
