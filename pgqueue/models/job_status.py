"""The status of a job, as an attribute that can be loaded, compared, grouped and ordered."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    Boolean,
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
    union_all,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import ColumnProperty
from sqlalchemy.sql import operators
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList
from sqlalchemy.sql.visitors import InternalTraversal, iterate

from pgqueue.errors import OptionError
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
    """The job waits to be admitted: for room in its limits, after ``run_at``."""
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
    id: Any, outcome: Any, queue: Any, priority: Any, run_at: Any, limit_keys: Any
) -> ColumnElement[JobStatus]:
    """The status as an expression over one ``jobs`` row.

    Only jobs under limits are looked up among the waiting messages.
    Labels are literals because GROUP BY does not recognise the expression with bound parameters.
    """
    leased = exists().where(Lease.target_id == id)
    waiting = _waiting(id, queue, priority, run_at, limit_keys)
    messaged = _messaged(id, queue, priority, run_at)
    place = case(
        (outcome.is_not(None), outcome),
        (leased, literal_column("'running'")),
        (waiting, literal_column("'blocked'")),
        (messaged, literal_column("'pending'")),
        else_=literal_column("'blocked'"),
    )
    return type_coerce(place, STATUS_TYPE)


def _waiting(
    id: Any, queue: Any, priority: Any, run_at: Any, limit_keys: Any
) -> ColumnElement[bool]:
    """Whether the job waits to be admitted: one probe by key, and none without limits."""
    place = exists().where(
        WaitingMessage.limit_keys == limit_keys,
        WaitingMessage.queue == queue,
        WaitingMessage.priority == priority,
        WaitingMessage.run_at == run_at,
        WaitingMessage.target_id == id,
    )
    return case((limit_keys.is_not(None), place), else_=false())


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
    """Rewrites a comparison with a status, so that it need not read all history or backlog.

    A statement that reaches its jobs only by their status starts at the narrow tables:
    ``Job.status == "running"`` reads ``leases``, and then those jobs by primary key.  In any
    other statement, such as one that joins other tables, the status is probed for each job.
    Only a comparison that includes succeeded jobs reads ``jobs`` itself.
    """

    def operate(self, op: Any, *other: Any, **kwargs: Any) -> ColumnElement[Any]:
        job = self._parententity.entity
        if op is operators.eq or op is operators.is_:
            return _stands_in(job, _statuses(other))
        if op is operators.in_op:
            return _stands_in(job, _statuses(other[0]))
        if op is operators.ne or op is operators.is_not:
            return _stands_in(job, frozenset(JobStatus) - _statuses(other))
        if op is operators.not_in_op:
            return _stands_in(job, frozenset(JobStatus) - _statuses(other[0]))
        return super().operate(op, *other, **kwargs)


class Standing(ColumnElement[bool]):
    """A comparison in two forms; the statement in which it is compiled decides between them.

    No form serves both uses.  An array of all waiting jobs costs the whole backlog wherever it is
    read.  With a semi-join the planner decides, and it scans ``jobs`` for ten waiting jobs when
    its statistics still show a million.
    """

    inherit_cache = True
    type = Boolean()
    _traverse_internals = [
        ("from_narrow_tables", InternalTraversal.dp_clauseelement),
        ("by_row", InternalTraversal.dp_clauseelement),
    ]

    def __init__(
        self, from_narrow_tables: ColumnElement[bool], by_row: ColumnElement[bool]
    ) -> None:
        self.from_narrow_tables = from_narrow_tables
        self.by_row = by_row

    @property
    def _from_objects(self) -> Any:
        return self.by_row._from_objects

    def _negate(self) -> ColumnElement[Any]:
        return not_(self.by_row)  # the negation matches most jobs


@compiles(Standing)
def _compile(standing: Standing, compiler: SQLCompiler, **kwargs: Any) -> str:
    is_only_way = _is_only_way_to_jobs(standing, compiler)
    chosen = standing.from_narrow_tables if is_only_way else standing.by_row
    return f"({compiler.process(chosen, **kwargs)})"


def _is_only_way_to_jobs(standing: Standing, compiler: SQLCompiler) -> bool:
    """Whether the statement reads only ``jobs``, and neither by key nor by an outer query's row."""
    around: Any = compiler.stack[-1] if compiler.stack else {}
    where = getattr(around.get("selectable"), "whereclause", None)
    if where is None or not any(part is standing for part in iterate(where)):
        return False
    tables = set(where._from_objects) | set(around["asfrom_froms"])
    return len(tables) == 1 and not any(_is_by_key(part) for part in _conjuncts(where))


def _conjuncts(where: ColumnElement[Any]) -> Iterator[ColumnElement[Any]]:
    if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
        for part in where.clauses:
            yield from _conjuncts(part)
    else:
        yield where


def _is_by_key(part: ColumnElement[Any]) -> bool:
    if not isinstance(part, BinaryExpression):
        return False
    is_exact = part.operator is operators.eq or part.operator is operators.in_op
    keys = {getattr(side, "key", None) for side in (part.left, part.right)}
    return is_exact and not keys.isdisjoint({"id", "held_unique_key"})


def _statuses(values: Iterable[Any]) -> frozenset[JobStatus]:
    try:
        return frozenset(JobStatus(value) for value in values)
    except (ValueError, TypeError):
        allowed = ", ".join(JobStatus)
        raise OptionError(
            f"Job.status is compared with {values!r}; a job's status is one of {allowed}"
        ) from None


def _stands_in(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    if not statuses:
        return false()
    if JobStatus.SUCCEEDED in statuses:
        return _by_row(job, statuses)
    return Standing(_from_narrow_tables(job, statuses), _by_row(job, statuses))


def _from_narrow_tables(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    """An array, not IN: read once, then jobs by primary key, whatever the statistics."""
    ids = union_all(*(_IDS[status] for status in JobStatus if status in statuses & _IDS.keys()))
    among: ColumnElement[bool] = job.id == any_(func.array(ids.scalar_subquery()))
    unfinished = [] if statuses <= _ENDED else [job.outcome.is_(None)]
    return and_(among, or_(*unfinished, *_ended_as(job, statuses)))


def _by_row(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    # Leases and dead letters are probed by a separate condition, not under an OR: if the rest of
    # a statement selects little, the planner may start at these tables.
    if not statuses & _ENDED:
        return and_(job.outcome.is_(None), _unfinished_as(job, statuses))
    # Never NULL: its negation would lose the unfinished jobs.
    ended = and_(job.outcome.is_not(None), or_(*_ended_as(job, statuses)))
    if statuses <= _DEAD:
        return and_(ended, exists().where(DeadLetter.job_id == job.id))
    if statuses <= _ENDED:
        return ended
    return or_(and_(job.outcome.is_(None), _unfinished_as(job, statuses)), ended)


def _ended_as(job: Any, statuses: frozenset[JobStatus]) -> list[ColumnElement[bool]]:
    # Literals: the planner then knows how many jobs ended with this outcome.
    return [job.outcome == literal_column(f"'{one.value}'") for one in sorted(statuses & _ENDED)]


def _unfinished_as(job: Any, statuses: frozenset[JobStatus]) -> ColumnElement[bool]:
    """Whether an unfinished job has one of the statuses; probes no more than necessary.

    A job without message, lease and waiting message is damaged, and is found by no comparison
    with one or two of the three statuses.
    """
    leased = exists().where(Lease.target_id == job.id)
    place = (job.id, job.queue, job.priority, job.run_at)
    waiting = _waiting(*place, job.limit_keys)
    match [one in statuses for one in (JobStatus.RUNNING, JobStatus.PENDING, JobStatus.BLOCKED)]:
        case [True, True, True]:
            return true()
        case [True, False, False]:
            return leased
        case [False, False, True]:
            return and_(~leased, waiting)
        case [False, True, True]:
            return ~leased
        case [True, False, True]:
            return or_(leased, waiting)
        case [True, True, False]:
            return or_(leased, and_(~waiting, _messaged(*place)))
        case _:
            return and_(~leased, ~waiting, _messaged(*place))


def _dead(outcome: JobStatus) -> Select[int]:
    return select(DeadLetter.job_id).where(
        DeadLetter.outcome == literal_column(f"'{outcome.value}'")
    )


_DEAD = frozenset({JobStatus.FAILED, JobStatus.CANCELLED})
_ENDED = _DEAD | {JobStatus.SUCCEEDED}
_LEASED = exists().where(Lease.target_id == MessageQueue.target_id)
_IDS: dict[JobStatus, Select[Any]] = {
    JobStatus.PENDING: select(MessageQueue.target_id).where(~_LEASED),
    JobStatus.RUNNING: select(Lease.target_id),
    JobStatus.BLOCKED: select(WaitingMessage.target_id),
    JobStatus.FAILED: _dead(JobStatus.FAILED),
    JobStatus.CANCELLED: _dead(JobStatus.CANCELLED),
}
