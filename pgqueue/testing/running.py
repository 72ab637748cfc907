"""Runs jobs in the transaction and the thread of a test."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from pgqueue.database.callers import in_transaction, sync_session, translated_errors
from pgqueue.errors import ArgumentsError, PgQueueError
from pgqueue.job_queue import PgQueue, queues_with_tasks
from pgqueue.models import Job
from pgqueue.repository.due_times import DueTimes
from pgqueue.worker.inline_worker import InlineWorker

QUEUE = "pgqueue.testing.queue"
"""The name in ``session.info`` of the queue that a fixture has chosen."""


@translated_errors()
def run_jobs(
    session: "Session | scoped_session[Any]",
    *,
    until: datetime | timedelta | None = None,
    queue: PgQueue | None = None,
    raise_errors: bool = True,
) -> list[Job]:
    """Run the jobs that are due, and those they enqueue, in this thread and this transaction.

    Claims and settles with the statements of a worker; commits nothing.  With an AsyncSession:
    ``await session.run_sync(run_jobs)``.

    Args:
        session: The Session of the test.
        until: Also run the jobs that become due within this time, or until this moment, in the
            order of their due times.
        queue: The queue; omit it if the process has one PgQueue with tasks.
        raise_errors: Settle a failed attempt, then raise the error of its handler, but not Cancel,
            Discard and Snooze.  With False go on, as a worker does.

    Returns:
        The jobs in the order in which they ran, once for each attempt.

    Raises:
        AttemptFailed: With ``raise_errors``, an attempt failed without an exception.

    Example:
        >>> job = mail.enqueue(session, "ann@example.org")
        >>> ran = run_jobs(session)
        >>> assert job.status is JobStatus.SUCCEEDED
    """
    session, connection = joined_connection(session)
    job_ids: list[int] = []
    worker = InlineWorker(queue_of(session, queue), connection)
    try:
        worker.run_until_empty(
            lambda attempt: job_ids.append(attempt.claimed.job_id),
            ahead=_seconds(connection, until),
            raise_errors=raise_errors,
        )
    finally:
        expire(session)
    return [session.get_one(Job, job_id) for job_id in job_ids]


def joined_connection(session: "Session | scoped_session[Any]") -> tuple[Session, Connection]:
    """Flush a session, and return its connection."""
    session = sync_session(session, "pgqueue.testing")
    session.flush()
    return session, in_transaction(session, "pgqueue.testing")


def queue_of(session: Session, queue: PgQueue | None) -> PgQueue:
    """Return the queue that was given, or chosen by a fixture, or the only one."""
    chosen = queue or session.info.get(QUEUE)
    if isinstance(chosen, PgQueue):
        return chosen
    if chosen is not None:
        raise ArgumentsError(f"queue is {type(chosen).__name__}; give the PgQueue of the tasks")
    queues = queues_with_tasks()
    if len(queues) != 1:
        raise PgQueueError(
            f"this process has {len(queues)} PgQueues with tasks: name the one to run, as in "
            "run_jobs(session, queue=queue)"
        )
    return queues[0]


def expire(session: Session) -> None:
    """Let the session read anew what handlers have written, as after a commit of its own."""
    if session.expire_on_commit:
        session.expire_all()


def _seconds(connection: Connection, until: datetime | timedelta | None) -> float:
    if until is None:
        return 0.0
    if isinstance(until, timedelta):
        return until.total_seconds()
    if isinstance(until, datetime) and until.tzinfo is not None:
        return DueTimes(connection).seconds_until(until)
    raise ArgumentsError(f"until is {until!r}; give a timedelta, or a datetime with a time zone")
