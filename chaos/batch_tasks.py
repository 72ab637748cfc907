"""Jobs of batches; workers import them only for the scenario about batches."""

from __future__ import annotations

from sqlalchemy.orm import Session

from chaos.history import END, START
from chaos.sample_tasks import AT_ONCE, EFFECT, effect, note, queue
from pgqueue import JobContext


@queue.task(retry=AT_ONCE, max_attempts=1000)
def pay_piece(session: Session, ctx: JobContext, batch_id: int, left: int = 0) -> int:
    """A row of the application, and two more jobs of the batch, in the commit of its end."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    if left:
        with queue.extend_batch(session, batch_id):
            pay_piece.enqueue_many(session, [(batch_id, left - 1)] * 2)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=1000)
def pay_batch(session: Session, ctx: JobContext, batch_id: int) -> int:
    """The callback of a batch."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    note(END, ctx)
    return ctx.attempt
