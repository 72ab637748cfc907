"""Where a job stands, as an attribute that can be loaded, compared, grouped and ordered."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Enum,
    Select,
    and_,
    any_,
    case,
    exists,
    false,
    func,
    literal_column,
    not_,
    or_,
    select,
    true,
    type_coerce,
)
from sqlalchemy.orm import ColumnProperty
from sqlalchemy.sql import operators

from pgqueue.errors import OptionError
from pgqueue.models.dispatch import DeadLetter, Lease, MessageQueue


class JobStatus(StrEnum):
    """Where a job stands.  The last three are final, unless it is requeued."""

    PENDING = "pending"
    """It has a message: it may start, now or from ``run_at``."""
    RUNNING = "running"
    """It has a lease: a worker runs it, or has claimed it ahead and starts it next."""
    BLOCKED = "blocked"
    """It waits for something other than time.  Nothing in this version makes a job wait so."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


STATUS_TYPE: Any = Enum(  # Any: the stubs type every Enum as str
    JobStatus,
    native_enum=False,
    create_constraint=False,
    values_callable=lambda statuses: [status.value for status in statuses],
)


def status_of(
    id: Any, outcome: Any, queue: Any, priority: Any, run_at: Any
) -> ColumnElement[JobStatus]:
    """The status as an expression over one ``jobs`` row.

    A lease wins over a message: after a crash in transaction mode a job has both.  Labels are
    literals because GROUP BY does not recognise the expression when they are bound.
    """
    leased = exists().where(Lease.target_id == id)
    # The whole key but its last column: without it the probe would read all messages.
    messaged = exists().where(
        MessageQueue.queue == queue,
        MessageQueue.priority == priority,
        MessageQueue.run_at == run_at,
        MessageQueue.target_id == id,
    )
    place = case(
        (outcome.is_not(None), outcome),
        (leased, literal_column("'running'")),
        (messaged, literal_column("'pending'")),
        else_=literal_column("'blocked'"),
    )
    return type_coerce(place, STATUS_TYPE)


class StatusComparator(ColumnProperty.Comparator[JobStatus]):
    """Rewrites a comparison with a status to probes of the narrow tables.

    ``Job.status == "running"`` reads ``leases`` and then those jobs by primary key.  Only a
    comparison that asks for succeeded jobs, or for a superset of them, reads ``jobs`` itself.
    """

    def operate(self, op: Any, *other: Any, **kwargs: Any) -> ColumnElement[Any]:
        job = self._parententity.entity
        if op is operators.eq or op is operators.is_:
            return _stands_in(job, _statuses(other))
        if op is operators.in_op:
            return _stands_in(job, _statuses(other[0]))
        if op is operators.ne or op is operators.is_not:
            return _stands_outside(job, _statuses(other))
        if op is operators.not_in_op:
            return _stands_outside(job, _statuses(other[0]))
        return super().operate(op, *other, **kwargs)


def _statuses(values: Iterable[Any]) -> frozenset[JobStatus]:
    try:
        return frozenset(JobStatus(value) for value in values)
    except (ValueError, TypeError):
        allowed = ", ".join(JobStatus)
        raise OptionError(
            f"Job.status is compared with {values!r}; a job's status is one of {allowed}"
        ) from None


def _stands_in(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    return or_(false(), *(_PROBES[status](job) for status in JobStatus if status in statuses))


def _stands_outside(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    others = frozenset(JobStatus) - statuses
    if JobStatus.SUCCEEDED not in others:
        return _stands_in(job, others)
    return not_(_stands_in(job, statuses)) if statuses else true()


def _pending(job: Any) -> ColumnElement[bool]:
    leased = exists().where(Lease.target_id == MessageQueue.target_id)
    waiting = select(MessageQueue.target_id).where(~leased)
    return and_(_among(job, waiting), job.outcome.is_(None))


def _running(job: Any) -> ColumnElement[bool]:
    return and_(_among(job, select(Lease.target_id)), job.outcome.is_(None))


def _blocked(job: Any) -> ColumnElement[bool]:
    return false()


def _succeeded(job: Any) -> ColumnElement[bool]:
    is_succeeded: ColumnElement[bool] = job.outcome == literal_column("'succeeded'")
    return is_succeeded


def _failed(job: Any) -> ColumnElement[bool]:
    return _dead(job, literal_column("'failed'"))


def _cancelled(job: Any) -> ColumnElement[bool]:
    return _dead(job, literal_column("'cancelled'"))


def _dead(job: Any, outcome: ColumnElement[str]) -> ColumnElement[bool]:
    letters = select(DeadLetter.job_id).where(DeadLetter.outcome == outcome)
    return and_(_among(job, letters), job.outcome == outcome)


def _among(job: Any, ids: Select[Any]) -> ColumnElement[bool]:
    """An array, not IN: it is read once, and then jobs by primary key, whatever the statistics."""
    among: ColumnElement[bool] = job.id == any_(func.array(ids.scalar_subquery()))
    return among


_PROBES: dict[JobStatus, Callable[[Any], ColumnElement[bool]]] = {
    JobStatus.PENDING: _pending,
    JobStatus.RUNNING: _running,
    JobStatus.BLOCKED: _blocked,
    JobStatus.SUCCEEDED: _succeeded,
    JobStatus.FAILED: _failed,
    JobStatus.CANCELLED: _cancelled,
}
