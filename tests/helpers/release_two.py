"""What a worker of the second release imports: each task has one more parameter."""

from chaos.sample_tasks import note, queue
from pgqueue import JobContext


@queue.task(name="releases.plain", max_attempts=1)
def plain(ctx: JobContext, name: str, title: str) -> None:
    note("start", ctx, release=2)


@queue.task(name="releases.transactional", max_attempts=1, transactional=True)
def transactional(ctx: JobContext, name: str, title: str) -> None:
    note("start", ctx, release=2)


@queue.task(name="releases.on_the_loop", max_attempts=1)
async def on_the_loop(ctx: JobContext, name: str, title: str) -> None:
    note("start", ctx, release=2)


@queue.task(name="releases.in_a_process", max_attempts=1, executor="process")
def in_a_process(ctx: JobContext, name: str, title: str) -> None:
    note("start", ctx, release=2)
