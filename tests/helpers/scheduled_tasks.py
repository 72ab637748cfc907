"""A schedule of the code; a worker process imports this module if asked."""

from datetime import timedelta

from chaos.sample_tasks import AT_ONCE, note, queue
from pgqueue import JobContext


@queue.schedule(every=timedelta(seconds=1), catch_up=1000)
@queue.task(retry=AT_ONCE)
def tick(ctx: JobContext) -> None:
    note("tick", ctx)
