"""The status of a job, as an attribute that can be loaded, compared, grouped and ordered."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Enum,
    Text,
    and_,
    any_,
    case,
    exists,
    false,
    func,
    literal_column,
    or_,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.orm import ColumnProperty
from sqlalchemy.sql import operators

from pgqueue.errors import OptionError
from pgqueue.models.blocked import Blocked
from pgqueue.models.lease import Lease
from pgqueue.models.message_queue import MessageQueue
from pgqueue.models.states import ENDED, STATES, JobStatus
from pgqueue.models.waiting_message import WaitingMessage

STATUS_TYPE: Any = Enum(  # Any: the stubs type every Enum as str
    JobStatus,
    native_enum=False,
    create_constraint=False,
    values_callable=lambda statuses: [status.value for status in statuses],
)


def status_of(
    id: Any, outcome: Any, queue: Any, priority: Any, run_at: Any, limit_keys: Any
) -> ColumnElement[JobStatus]:
    """The status as an expression over one ``jobs`` row.

    Only jobs under limits are looked up among the waiting messages.
    Labels are literals because GROUP BY does not recognise the expression with bound parameters.
    """
    # These probes begin at the job, those of STATES at the rows of its status.  The two differ for
    # one job: an unfinished one that has no row in another table, which only damage leaves.  It is
    # BLOCKED here, as no worker can start it, and stands in no table of STATES, so no comparison
    # finds it.
    leased = exists().where(Lease.target_id == id)
    # One probe by key, and none without limits.
    waiting = exists().where(
        WaitingMessage.limit_keys == limit_keys,
        WaitingMessage.queue == queue,
        WaitingMessage.priority == priority,
        WaitingMessage.run_at == run_at,
        WaitingMessage.target_id == id,
    )
    status = case(
        (outcome.is_not(None), outcome),
        (leased, literal_column("'running'")),
        (exists().where(Blocked.node_id == id), literal_column("'blocked'")),
        (case((limit_keys.is_not(None), waiting), else_=false()), literal_column("'blocked'")),
        (_messaged(id, queue, priority, run_at), literal_column("'pending'")),
        else_=literal_column("'blocked'"),
    )
    return type_coerce(status, STATUS_TYPE)


def _messaged(id: Any, queue: Any, priority: Any, run_at: Any) -> ColumnElement[bool]:
    """Whether the job has a message; reads at most ten of them.

    The index finds all messages of the same moment, which may be a million.  If the first ten do
    not include the job, it is assumed to be among the rest: only damage leaves an unfinished job
    without a message.
    """
    same_moment = (
        select(MessageQueue.target_id)
        .where(
            MessageQueue.queue == queue,
            MessageQueue.priority == priority,
            MessageQueue.run_at == run_at,
        )
        .order_by(MessageQueue.id)  # otherwise the planner would find ten by a scan
    )
    ten = same_moment.limit(literal_column("10")).scalar_subquery()
    return or_(id == any_(func.array(ten)), same_moment.offset(literal_column("9")).exists())


class StatusComparator(ColumnProperty.Comparator[JobStatus]):
    """Rewrites a comparison with a status, so that it does not read all history.

    ``Job.status == "running"`` reads ``leases``, and then those jobs by primary key.  Only a
    comparison that includes succeeded jobs reads ``jobs`` itself.  ``Job.status.expression`` is not
    rewritten: it probes the narrow tables for each job that the rest of the statement finds.
    """

    def operate(self, op: Any, *other: Any, **kwargs: Any) -> ColumnElement[Any]:
        if op in (operators.eq, operators.is_, operators.ne, operators.is_not):
            wanted = _statuses(other)
        elif op in (operators.in_op, operators.not_in_op):
            wanted = _statuses(other[0])
        else:
            return super().operate(op, *other, **kwargs)
        if op in (operators.ne, operators.is_not, operators.not_in_op):
            wanted = frozenset(JobStatus) - wanted
        if not wanted:
            return false()
        job = self._parententity.entity
        # Literals: the planner then knows how many jobs ended with an outcome.
        outcomes = [literal_column(f"'{one}'", Text) for one in sorted(wanted.intersection(ENDED))]
        # Never NULL: a negation would lose the unfinished jobs.
        has_ended = and_(job.outcome.is_not(None), job.outcome.in_(outcomes))
        is_unfinished = job.outcome.is_(None)
        only_ended = wanted.issubset(ENDED)
        if JobStatus.SUCCEEDED in wanted:
            return has_ended if only_ended else super().operate(operators.in_op, sorted(wanted))
        # An array, not IN: read once, then jobs by primary key, whatever the statistics.
        ids = union_all(*(STATES[status].ids for status in sorted(wanted)))
        among: ColumnElement[bool] = job.id == any_(func.array(ids.scalar_subquery()))
        if only_ended:
            return and_(has_ended, among)
        return and_(or_(is_unfinished, has_ended) if outcomes else is_unfinished, among)


def _statuses(values: Iterable[Any]) -> frozenset[JobStatus]:
    try:
        return frozenset(JobStatus(value) for value in values)
    except (ValueError, TypeError):
        allowed = ", ".join(JobStatus)
        raise OptionError(
            f"Job.status is compared with {values!r}; a job's status is one of {allowed}"
        ) from None
