"""Claim: take due messages in order, and with them the right to run their jobs.

A *pair* is a queue and a priority.  A *cursor* is a pair and the key after which a claim looks; the
parameters named ``pairs`` are cursors.  A claim scans the index once for each pair, in the order in
which the caller gives the pairs.  Each scan starts after the cursor of its pair and stops as soon
as the batch is full.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.redaction import secrets_among
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import each_in_key
from pgqueue.repository.row_security import rows_hidden
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CTID,
    Executor,
    among,
    array_parameter,
    clock,
    count_rows,
    document,
    jobs,
    leases,
    message_queue,
    pg,
    seconds,
    sees_all,
    waiting_messages,
    workers,
)

FIRST = sa.literal_column("100", sa.Integer)
"""How many messages are read of those at which a claim looks first."""
LIMIT = sa.bindparam("limit", type_=sa.Integer)
WORKER = sa.bindparam("worker_id", type_=sa.Uuid)
IS_SIGHTED = sees_all(jobs, leases, message_queue)


@cache
def claim(
    *, ahead: bool, suspects: bool, registered: bool = True, limited: bool = False
) -> sa.Executable:
    """Delete the messages, insert the leases, read the jobs.

    A claim looks at the first due messages, up to its limit, and leaves the messages that it must
    not take.  These count towards the limit too, so that a claim never scans far.

    A message whose job has ended or is gone is deleted, and starts nothing.  So nothing is claimed
    while row security hides rows: a job that is hidden would look as if it were gone.

    - Suspects, which are jobs that a worker held when it crashed: takes one, and leaves the others.
      Without ``suspects`` it skips them, and they do not count.
    - ``ahead`` claims for slots that are not free yet: leaves jobs that must not wait in a worker,
      because it may crash; suspects are among them.

    ``registered``: claim only if the worker has a row and was not declared dead; False for a claim
    without a worker.

    ``limited``: read also the keys of the limits of each job.

    At least one row is returned, with the database's time; its other columns are NULL if nothing
    was claimed.
    """
    due = _due_messages(suspects=suspects, registered=registered).cte("due")
    message = _taken_messages(due, ahead=ahead, suspects=suspects)
    started = _unfinished_jobs_of(message, *([jobs.c.limit_keys] if limited else []))
    lease = _leases_for(started)
    # The first three are the order in which jobs start, so plain rows sort in it.
    names = ("priority", "run_at", "id", "target_id", "queue", "task", "args", "max_attempts")
    columns = [started.c[name] for name in names]
    keys = [started.c.limit_keys] if limited else []
    claimed = (
        sa.select(*columns, lease.c.attempt, lease.c.crashes, started.c.meta, *keys)
        .select_from(started.join(lease, started.c.id == lease.c.message_id))
        .subquery("claimed")
    )
    moment = _time_and_counts(message, due)
    return sa.select(moment, claimed).select_from(moment.outerjoin(claimed, sa.true()))


@cache
def upcoming() -> sa.Executable:
    """Whether a message of these pairs is due, and the seconds until the next later one is due;
    NULL if there is no later one.

    Locks nothing: a message that another transaction has locked counts as due here, although no
    claim takes it.
    """
    pair = _pairs()
    due = _due_in_order(pair, message_queue.c.run_at).limit(1).lateral("due")
    future = (
        sa.select(message_queue.c.run_at)
        .where(_of_pair(pair), message_queue.c.run_at > pg.statement_timestamp())
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(1)
        .lateral("future")
    )
    each = pair.outerjoin(due, sa.true()).outerjoin(future, sa.true())
    wait = sa.func.extract("epoch", pg.min(future.c.run_at) - clock())
    return sa.select((pg.count(due.c.run_at) > 0).label("is_due"), wait).select_from(each)


@cache
def queues_with_messages() -> sa.Executable:
    """The names of all queues that have messages, also of jobs that wait to be admitted.

    One probe of a key for each queue, and for each limit key of a queue.
    """
    queue = each_in_key(message_queue, "queue", name="queue")
    lane = each_in_key(waiting_messages, "limit_keys", "queue", name="lane")
    return sa.select(queue.c.queue).union(sa.select(lane.c.queue))


@cache
def pairs_with_messages() -> sa.Executable:
    """Each pair with a message, and whether its first one is due: one probe of the key for each."""
    pair = each_in_key(message_queue, "queue", "priority", first="run_at", name="pair")
    is_due = pair.c.run_at <= pg.statement_timestamp()
    return sa.select(pair.c.queue, pair.c.priority, is_due)


@cache
def ages() -> sa.Executable:
    """The ``run_at`` of the first due message of each pair, and the times one to nine periods ago.

    Locks nothing, because a claim at the same time would skip a locked message.
    """
    pair = _pairs()
    period = seconds(sa.cast(sa.bindparam("period", type_=sa.Double), sa.Double))
    due = _due_in_order(pair, message_queue.c.run_at).limit(1).lateral("due")
    ago = [
        sa.cast(
            pg.statement_timestamp() - period * sa.literal_column(f"double precision '{count}'"),
            sa.Text,
        )
        for count in range(1, 10)
    ]
    return sa.select(
        pair.c.queue, pair.c.priority, sa.cast(due.c.run_at, sa.Text).label("run_at"), array(ago)
    ).select_from(pair.join(due, sa.true()))


@cache
def first_due(*, suspects: bool) -> sa.Executable:
    """The messages at which a claim of these pairs looks first, in its order, and their jobs.

    Locks nothing.  Without ``suspects``, skips them as the claim does.
    """
    pair = _pairs()
    message = message_queue.c
    run_at = sa.cast(message.run_at, sa.Text).label("run_at")
    first = _due_in_order(pair, run_at, message.id, message.target_id, suspects=suspects)
    due = first.limit(FIRST).lateral("due")
    columns = (pair.c.queue, pair.c.priority, due.c.run_at, due.c.id, due.c.target_id)
    return sa.select(*columns).select_from(pair.join(due, sa.true())).limit(FIRST)


def _due_messages(*, suspects: bool, registered: bool) -> sa.Select[*tuple[Any, ...]]:
    """The first due messages of the pairs, locked.  LIMIT applies to each pair and to all."""
    pair = _pairs()
    due = (
        _due_in_order(pair, CTID, message_queue.c.crashes, message_queue.c.alone, suspects=suspects)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
        .lateral("due")
    )
    # A worker that was declared dead cannot claim anything under its id.
    is_alive = sa.select(workers.c.dead_at.is_(None)).where(workers.c.id == WORKER)
    may_claim = is_alive.scalar_subquery() if registered else sa.true()
    return (
        sa.select(due)
        .select_from(pair.join(due, sa.true()))
        .where(may_claim, IS_SIGHTED)
        .limit(LIMIT)
    )


def _due_in_order(
    pair: sa.TableValuedAlias, *columns: sa.ColumnElement[Any], suspects: bool = True
) -> sa.Select[*tuple[Any, ...]]:
    """The due messages of a pair after its cursor, in the order of claims."""
    key = sa.tuple_(message_queue.c.run_at, message_queue.c.id)
    return (
        sa.select(*columns)
        .where(
            _of_pair(pair),
            key > sa.tuple_(pair.c.run_at, pair.c.message_id),
            message_queue.c.run_at <= pg.statement_timestamp(),
            sa.true() if suspects else message_queue.c.crashes == 0,
        )
        .order_by(message_queue.c.run_at, message_queue.c.id)
    )


def _pairs() -> sa.TableValuedAlias:
    return document(
        "pairs",
        sa.column("queue", sa.Text),
        sa.column("priority", sa.SmallInteger),
        sa.column("run_at", sa.DateTime(timezone=True)),
        sa.column("message_id", sa.BigInteger),
    )


def _of_pair(pair: sa.TableValuedAlias) -> sa.ColumnElement[bool]:
    """Whether a message is of the pair, and of a task that this worker knows."""
    known_tasks = array_parameter("tasks", sa.Text)
    return sa.and_(
        message_queue.c.queue == pair.c.queue,
        message_queue.c.priority == pair.c.priority,
        message_queue.c.task == sa.any_(known_tasks),
    )


def _taken_messages(due: sa.CTE, *, ahead: bool, suspects: bool) -> sa.CTE:
    """Delete those of the due messages that the claim may take.

    Found by ctid, so that the plan is a Tid Scan whatever the statistics say.  The ctids are an
    array, which is read once: ``id IN (SELECT ... LIMIT 2 FOR UPDATE SKIP LOCKED)`` may run its
    sub-query once per outer row, and would then delete far more than two.
    """
    ctids = sa.select(due.c.ctid)
    if ahead:
        ctids = ctids.where(~due.c.alone)
    elif suspects:
        suspect = sa.select(due.c.ctid).where(due.c.crashes > 0).correlate(None).limit(1)
        is_one = due.c.ctid == suspect.scalar_subquery()
        ctids = ctids.where(sa.or_(due.c.crashes == 0, is_one))
    return (
        sa.delete(message_queue).where(among(ctids) == CTID).returning(message_queue).cte("message")
    )


def _unfinished_jobs_of(message: sa.CTE, *more: sa.ColumnElement[Any]) -> sa.CTE:
    """Each message with its job, and ``more`` of its columns.  Messages without an unfinished job
    are not among them.

    Time, arguments and meta are read as text: a row that Python cannot read must fail only its own
    job, not the claim of the others.  OFFSET keeps the planner from joining ``jobs`` in another
    order.
    """
    documents = (sa.cast(jobs.c[name], sa.Text).label(name) for name in ("args", "meta"))
    job = (
        sa.select(jobs.c.max_attempts, *documents, *more)
        .where(jobs.c.id == message.c.target_id, jobs.c.outcome.is_(None))
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    started: sa.Select[*tuple[Any, ...]] = sa.select(
        message.c.id,
        message.c.target_id,
        message.c.queue,
        message.c.priority,
        sa.cast(message.c.run_at, sa.Text).label("run_at"),
        message.c.task,
        message.c.attempt.label("used_attempts"),
        message.c.crashes.label("past_crashes"),
        job.c.max_attempts,
        job.c.args,
        job.c.meta,
        *(job.c[column.name] for column in more),
    ).select_from(message.join(job, sa.true()))
    return started.cte("started")


def _leases_for(started: sa.CTE) -> sa.CTE:
    """Insert one lease for each job.

    In damaged data a job may have two messages, or a lease already: then a message gets no lease.
    """
    rows = sa.select(
        started.c.target_id,
        started.c.id,
        started.c.used_attempts + 1,
        started.c.past_crashes,
        WORKER,
    )
    columns = ["target_id", "message_id", "attempt", "crashes", "worker_id"]
    new = pg_insert(leases).from_select(columns, rows).on_conflict_do_nothing()
    return new.returning(leases.c.message_id, leases.c.attempt, leases.c.crashes).cte("lease")


def _time_and_counts(message: sa.CTE, due: sa.CTE) -> sa.Subquery:
    """The database's time, and how many messages were taken and how many were found, in one row
    that always exists.  Found is NULL if row security hides rows."""
    second_ago = pg.statement_timestamp() - sa.literal_column("interval '1 second'")
    return sa.select(
        sa.cast(pg.statement_timestamp(), sa.Text).label("read_at"),
        sa.cast(second_ago, sa.Text).label("quiet_until"),
        sa.select(count_rows()).select_from(message).scalar_subquery().label("taken"),
        sa.case((IS_SIGHTED, sa.select(count_rows()).select_from(due).scalar_subquery())).label(
            "found"
        ),
    ).subquery("moment")


class Claimed(NamedTuple):
    """A job that this worker may run.  Sorts in the order in which jobs start.

    Time, arguments and meta are text as the database wrote it, not parsed yet; within one time zone
    times sort as their text does.
    """

    priority: int
    run_at: str
    message_id: int
    job_id: int
    queue: str
    task: str
    args: str
    max_attempts: int
    attempt: int
    crashes: int
    meta: str | None = None
    limit_keys: str | None = None
    """The keys of its limits, one a line; None also if the claim does not read them."""

    @property
    def is_exhausted(self) -> bool:
        """Whether crashes have used up its attempts: the handler must not start again."""
        return self.attempt > self.max_attempts

    def secrets(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the values of its secret arguments, which have these names."""
        return secrets_among(self.args, names)


class ClaimCursor(NamedTuple):
    """A queue and a priority, and the key after which a claim looks."""

    queue: str
    priority: int
    run_at: str = "-infinity"
    message_id: int = 0


class Upcoming(NamedTuple):
    """When messages of ``message_queue`` are due, read without a lock."""

    is_due: bool
    """Whether a message is due; another transaction may hold it."""
    seconds: float | None
    """Seconds until the next one is due; None if there is none."""


class Ages(NamedTuple):
    """How long the first due jobs of some pairs have waited.  Times are as the database writes
    them."""

    oldest: Mapping[tuple[str, int], str]
    """When the first job of each (queue, priority) was due, if one is."""
    periods_ago: Sequence[str]
    """The times that lie one, two and more periods back."""


NOTHING = Upcoming(is_due=False, seconds=None)


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of one claim."""

    rows: list[Claimed]
    taken: int
    """Messages taken: more than ``rows`` if some had no unfinished job and were dropped."""
    left: int
    """Messages found and left, because the claim must not take them."""
    read_at: str
    """The database's time at the claim, as it wrote it."""
    quiet_until: str
    """One second before the claim, by the database's clock: so far a cursor may move where the
    claim found no more."""

    @property
    def found(self) -> int:
        return self.taken + self.left


class Claims:
    """The claims of one worker, behind one Session or Connection."""

    def __init__(self, executor: Executor, worker_id: UUID) -> None:
        self._executor = executor
        self._worker_id = worker_id

    def claim(
        self,
        pairs: Iterable[ClaimCursor],
        *,
        tasks: str,
        limit: int,
        ahead: bool = False,
        suspects: bool = True,
        registered: bool = True,
        limited: bool = False,
    ) -> Claim:
        """Claim due jobs, in the order in which they start.

        ``registered``: claim only if the worker has a row and was not declared dead; False for a
        claim without a worker.  ``limited``: read the keys of the limits.  Raises RowsHidden.
        """
        parameters = {
            "pairs": _documents(pairs),
            "tasks": tasks,
            "limit": limit,
            "worker_id": self._worker_id,
        }
        statement = claim(ahead=ahead, suspects=suspects, registered=registered, limited=limited)
        rows = fetch(self._executor, statement, parameters)
        read_at, quiet_until, taken, found = rows[0][:4]
        if found is None:
            raise rows_hidden(self._executor)
        if rows[0][4] is None:
            return Claim([], taken, found - taken, read_at, quiet_until)
        # DELETE ... RETURNING guarantees no order, whatever the order of the probes.
        new = partial(tuple.__new__, Claimed)  # a call of the class takes twice as long
        no_keys = () if limited else (None,)
        claimed: list[Claimed] = sorted([new(row[4:] + no_keys) for row in rows])
        return Claim(claimed, taken, found - taken, read_at, quiet_until)

    def first_due(
        self, pairs: Iterable[ClaimCursor], *, tasks: str, suspects: bool
    ) -> list[tuple[ClaimCursor, int]]:
        """The first messages, each as the cursor that would pass over it, and the ids of their
        jobs."""
        parameters = {"pairs": _documents(pairs), "tasks": tasks}
        rows = self._executor.execute(first_due(suspects=suspects), parameters)
        return [(ClaimCursor(*row[:4]), row[4]) for row in rows]

    def upcoming(self, pairs: Iterable[ClaimCursor], *, tasks: str) -> Upcoming:
        """Whether a message is due, and in how many seconds the next one will be."""
        parameters = {"pairs": _documents(pairs), "tasks": tasks}
        [(is_due, seconds)] = fetch(self._executor, upcoming(), parameters)
        return Upcoming(is_due, None if seconds is None else float(seconds))

    def queues_with_messages(self) -> list[str]:
        return [row[0] for row in fetch(self._executor, queues_with_messages(), {})]

    def pairs_with_messages(self) -> Sequence[tuple[str, int, bool]]:
        """Each queue and priority with messages, and whether the first one is due."""
        return fetch(self._executor, pairs_with_messages(), {})

    def ages(self, pairs: Iterable[ClaimCursor], *, tasks: str, age_after: timedelta) -> Ages:
        """Since when the first due job of each pair has waited."""
        parameters = {
            "pairs": _documents(pairs),
            "tasks": tasks,
            "period": age_after.total_seconds(),
        }
        rows = fetch(self._executor, ages(), parameters)
        oldest = {(queue, priority): run_at for queue, priority, run_at, _ in rows}
        return Ages(oldest, rows[0][3] if rows else ())


def _documents(pairs: Iterable[ClaimCursor]) -> str:
    return json.dumps([pair._asdict() for pair in pairs])
