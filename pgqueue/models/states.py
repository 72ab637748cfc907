"""The states of a job: which table has the jobs of each, and under which condition.

The lists of jobs, the counts and the comparisons of :attr:`Job.status <pgqueue.Job.status>` read
:data:`STATES`.  To load the status of one job is an expression of its own (``job_status.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    CompoundSelect,
    Table,
    exists,
    select,
    text,
    union_all,
)

from pgqueue.models.base import table_of
from pgqueue.models.blocked import Blocked
from pgqueue.models.dead_letter import DeadLetter
from pgqueue.models.lease import Lease
from pgqueue.models.message_queue import MessageQueue
from pgqueue.models.waiting_message import WaitingMessage


class JobStatus(StrEnum):
    """The status of a job.  The last three are final, unless the job is requeued."""

    PENDING = "pending"
    """The job has a message: it may start, now or from ``run_at``."""
    RUNNING = "running"
    """The job has a lease: a worker runs it, or has prefetched it and starts it next."""
    BLOCKED = "blocked"
    """The job waits for room in its limits, after ``run_at``, or for other jobs or a batch."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING = (JobStatus.PENDING, JobStatus.BLOCKED)
UNFINISHED = (*WAITING, JobStatus.RUNNING)
"""The jobs without an outcome."""
DEAD = (JobStatus.FAILED, JobStatus.CANCELLED)
"""The jobs with a dead letter."""
ENDED = (JobStatus.SUCCEEDED, *DEAD)


@dataclass(frozen=True, slots=True)
class State:
    """Where the jobs of one status stand.

    A row of an unfinished job counts only while the job has no outcome: a cancel does not wait for
    the transaction that holds its message or its lease, and leaves the row there.
    """

    table: Table
    job_id: Column[int]
    """Lists use this order.  Lists of pending jobs use the order of claims."""
    conditions: tuple[ColumnElement[bool], ...] = ()
    """Which rows of the table; empty for all."""
    elsewhere: Column[int] | None = None
    """The ids of the jobs of this status that have no row in the table."""

    @property
    def ids(self) -> CompoundSelect[Any]:
        selects = [select(self.job_id).where(*self.conditions)]
        if self.elsewhere is not None:
            selects.append(select(self.elsewhere))
        return union_all(*selects)


_messages = table_of(MessageQueue)
_waiting = table_of(WaitingMessage)
_leases = table_of(Lease)
_letters = table_of(DeadLetter)
_is_leased = exists().where(_leases.c.target_id == _messages.c.target_id).correlate_except(_leases)

STATES: Mapping[JobStatus, State] = {
    JobStatus.PENDING: State(_messages, _messages.c.target_id, (~_is_leased,)),
    JobStatus.BLOCKED: State(_waiting, _waiting.c.target_id, elsewhere=table_of(Blocked).c.node_id),
    JobStatus.RUNNING: State(_leases, _leases.c.target_id),
    JobStatus.FAILED: State(_letters, _letters.c.job_id, (_letters.c.outcome == text("'failed'"),)),
    JobStatus.CANCELLED: State(
        _letters, _letters.c.job_id, (_letters.c.outcome == text("'cancelled'"),)
    ),
}
"""Of each status but SUCCEEDED, whose jobs stand in ``jobs`` alone."""
