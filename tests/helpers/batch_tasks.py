"""Batches and their callbacks; a worker process imports this module if asked."""

import time

from sqlalchemy.orm import Session

from chaos.sample_tasks import AT_ONCE, note, queue, until_open
from pgqueue import JobContext


@queue.task(retry=AT_ONCE)
def told(ctx: JobContext, batch_id: int) -> None:
    """The callback of a batch."""
    note("told", ctx, batch=batch_id)


@queue.task(retry=AT_ONCE)
def piece(session: Session, ctx: JobContext, batch_id: int, left: int = 0) -> None:
    """Adds two jobs to its batch in the transaction that ends it."""
    note("start", ctx)
    if left:
        with queue.extend_batch(session, batch_id):
            piece.enqueue_many(session, [(batch_id, left - 1)] * 2)
    time.sleep(0.002)


@queue.task(retry=AT_ONCE)
def gated(session: Session, ctx: JobContext, batch_id: int, gate: str) -> None:
    """Adds a job to its batch, and ends when its gate opens."""
    with queue.extend_batch(session, batch_id):
        piece.enqueue(session, batch_id)
    note("start", ctx)
    until_open(gate)
