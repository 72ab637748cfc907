"""A schedule of the code, for workers that import this module besides chores."""

from datetime import timedelta

from chores import AT_ONCE, note, queue

from pgqueue import JobContext


@queue.schedule(every=timedelta(seconds=1), catch_up=1000)
@queue.task(retry=AT_ONCE)
def tick(ctx: JobContext) -> None:
    note("tick", ctx)
