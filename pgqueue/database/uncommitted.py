"""Warns of a Session that is closed with an enqueue which it has neither committed nor rolled back.

The job is gone then, as all that the Session has written, and nothing else would say so.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import InstanceState, Session, SessionTransaction

from pgqueue import redaction
from pgqueue.database.collecting import collecting_of
from pgqueue.models import Job

logger = redaction.logger(__name__)

TASK = "pgqueue.task"
"""The name in the ``info`` of a Job's state of its task."""
UNCOMMITTED = "pgqueue.uncommitted"
"""The name in ``session.info`` of what its transaction has enqueued."""
COMMITTING = "pgqueue.committing"
"""The name in ``session.info`` of a mark: a commit has begun, which may flush more jobs."""


@dataclass(slots=True)
class Uncommitted:
    """The first enqueue of a transaction, and how many there were."""

    task: str
    job_id: int | None
    """None for several jobs, and for one that was not flushed."""
    enqueues: int = 1


def note_enqueued(
    target: Session | Connection, task: str, job_ids: Sequence[int], *, may_be_lost: bool
) -> None:
    """Note jobs that an enqueue has created, or that hold its unique key, for the batch that
    collects them; and that the end of a Session's transaction decides about something new."""
    if isinstance(target, Connection):
        return
    if (collecting := collecting_of(target)) is not None:
        collecting.job_ids.extend(job_ids)
    if may_be_lost:
        note_uncommitted(target, task, job_ids[0] if len(job_ids) == 1 else None)


def note_uncommitted(session: Session, task: str, job_id: int | None) -> None:
    """Note an enqueue of a Session's transaction."""
    noted: Uncommitted | None = session.info.get(UNCOMMITTED)
    if noted is None:
        session.info[UNCOMMITTED] = Uncommitted(task, job_id)
    else:
        noted.enqueues += 1


@event.listens_for(Session, "pending_to_transient", raw=True)
def _note_unflushed(session: Session, state: InstanceState[Any]) -> None:
    # In a rollback, the transaction is not active any more.  Only the state is left of a job that
    # nothing else refers to.
    if session.is_active and issubclass(state.class_, Job):
        note_uncommitted(session, state.info.get(TASK, "(of a copy)"), None)


@event.listens_for(Session, "before_commit")
def _note_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info[COMMITTING] = True


@event.listens_for(Session, "after_rollback")
def _forget(session: Session) -> None:
    session.info.pop(UNCOMMITTED, None)


@event.listens_for(Session, "after_transaction_end")
def _warn(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is not None:
        return
    is_committed = session.info.pop(COMMITTING, False)
    noted: Uncommitted | None = session.info.pop(UNCOMMITTED, None)
    if noted is None or is_committed:
        return
    # The transaction of a Connection is its owner's; an error that closes the Session is heard.
    if isinstance(session.bind, Connection) or sys.exc_info()[0] is not None:
        return
    others = noted.enqueues - 1
    logger.warning(
        "%s of task %s%s lost: the session was closed without a commit; call session.commit() "
        "after the enqueue, or session.rollback() if it is not to run",
        "a job" if noted.job_id is None else f"job {noted.job_id}",
        noted.task,
        f" and {others} more enqueues are" if others else " is",
    )
