"""Faults on demand: what a job goes through when its worker dies, is cut off, or it is too slow.

Each function runs the handler of one due job, once, in the transaction of the test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session, scoped_session

from pgqueue.database.callers import translated_errors
from pgqueue.errors import PgQueueError
from pgqueue.handler.outcome import after_timeout
from pgqueue.job_queue import PgQueue
from pgqueue.models import Job, MessageQueue
from pgqueue.outcomes import Cancel
from pgqueue.repository.claim import ClaimCursor, Claimed
from pgqueue.repository.workers import Workers
from pgqueue.testing.running import expire, joined_connection, queue_of
from pgqueue.worker.inline_worker import InlineWorker

AnySession = Session | scoped_session[Any]


@translated_errors()
def crash_job(session: AnySession, job: Job, *, queue: PgQueue | None = None) -> None:
    """Run the handler of a due job, and then let its worker die before it can settle.

    The writes of a transactional handler are undone.  The attempt is recorded as ``crashed``, and
    the job is due again, or has failed if that was its last attempt.
    """
    with _claimed(session, job, queue) as (worker, claimed, connection):
        worker.attempt(claimed).run(is_dropped=True)
        Workers(connection).rescue()  # its worker has no row, as one that was forgotten


@translated_errors()
def time_out_job(session: AnySession, job: Job, *, queue: PgQueue | None = None) -> None:
    """Run the handler of a due job, and settle its attempt as past the task's timeout.

    ``ctx.is_cancelled()`` is true while the handler runs.  Its result is dropped, and the writes of
    a transactional handler are undone.
    """
    with _claimed(session, job, queue) as (worker, claimed, _):
        attempt = worker.attempt(claimed)
        attempt.ask_to_stop(Cancel())
        attempt.run(is_dropped=True)
        if not attempt.is_settled:
            attempt.settle(after_timeout(attempt.task, claimed))


@translated_errors()
def lose_lease(session: AnySession, job: Job, *, queue: PgQueue | None = None) -> None:
    """Let the lease of a due job pass on while its handler runs.

    The worker is declared dead and the job is rescued, as when the worker was cut off for longer
    than its grace period.  ``ctx.is_cancelled()`` is true.  The settle finds that the attempt is
    stale: its result is dropped, and the writes of a transactional handler are undone.
    """
    with _claimed(session, job, queue) as (worker, claimed, connection):
        attempt = worker.attempt(claimed)
        Workers(connection).rescue()  # its worker has no row, as one that was forgotten
        attempt.ask_to_stop(Cancel())
        attempt.run()


Claim = tuple[InlineWorker, Claimed, Connection]


@contextmanager
def _claimed(session: AnySession, job: Job, queue: PgQueue | None) -> Iterator[Claim]:
    """A worker that has claimed this job and no other."""
    session, connection = joined_connection(session)
    worker = InlineWorker(queue_of(session, queue), connection)
    worker.admit()
    find = select(MessageQueue).where(MessageQueue.target_id == job.id)
    message = session.scalars(find).one_or_none()
    place: list[ClaimCursor] = []
    if message is not None:
        # The cursor after which a claim finds this message first.
        run_at = message.run_at.isoformat()
        place.append(ClaimCursor(message.queue, message.priority, run_at, message.id - 1))
    try:
        claimed = worker.claim(place)
        if claimed is None or claimed.job_id != job.id:
            raise PgQueueError(
                f"job {job.id} {job.task} cannot be started: it is {job.status}, to run at "
                f"{job.run_at}; give a job that is due and whose task the queue knows"
            )
        yield worker, claimed, connection
    finally:
        expire(session)
