"""Claim: take due messages in order, and with them the right to run their jobs.

A *pair* is a queue and a priority.  A claim scans the index once for each pair, in the order in
which the caller gives the pairs.  Each scan starts after the cursor of its pair and stops as soon
as the batch is full.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    FromClause,
    Integer,
    Select,
    SmallInteger,
    Text,
    Uuid,
    and_,
    any_,
    bindparam,
    cast,
    column,
    delete,
    func,
    literal_column,
    null,
    select,
    true,
    tuple_,
)
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.sql.selectable import CTE, Subquery, TableValuedAlias

from pgqueue.statements.tables import (
    AS_IT_STANDS,
    CTID,
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
    workers,
)

LIMIT = bindparam("limit", type_=Integer)
WORKER = bindparam("worker_id", type_=Uuid)


@cache
def claim(
    *, ahead: bool, suspects: bool, meta: bool = False, registered: bool = True
) -> Executable:
    """Delete the messages, insert the leases, read the jobs.

    ``ahead`` claims for slots that are not free yet.  Such a claim does not take messages whose
    jobs must not wait in a worker, which may die; it returns their priorities.  These messages
    count towards the limit, so that a large number of them does not slow the claim down.

    Without ``suspects``, the claim skips jobs that a worker held when it crashed.  ``meta`` reads
    the meta of the jobs, which is NULL otherwise.  ``registered``: claim nothing for a worker that
    was declared dead.  At least one row is returned, with the database's time; its other columns
    are NULL if nothing was claimed.
    """
    found = _due_messages(suspects=suspects, registered=registered)
    columns = found.selected_columns
    # No more columns than needed: a CTE that is read twice is materialized.
    needed = [columns.ctid, columns.priority, columns.alone] if ahead else [columns.ctid]
    due = found.with_only_columns(*needed).cte("due")
    message = _taken_messages(due, ahead=ahead)
    started = _unfinished_jobs_of(message, meta=meta)
    lease = _leases_for(started)
    claimed = (
        select(*_claimed_columns(started), lease.c.attempt, lease.c.crashes, _meta_column(started))
        .select_from(started.join(lease, started.c.id == lease.c.message_id))
        .subquery("claimed")
    )
    moment = _moment(message, passed=_passed_priorities(due) if ahead else null())
    return select(moment, claimed).select_from(moment.outerjoin(claimed, true()))


@cache
def upcoming() -> Executable:
    """Whether a message of these pairs is due, and the seconds until the next later one is due;
    NULL if there is no later one.

    Locks nothing: a message that another transaction has locked counts as due here, although no
    claim takes it.
    """
    pair = _pairs()
    now = pg.statement_timestamp()
    due = (
        select(message_queue.c.run_at)
        .where(_of_pair(pair), _is_after_cursor(pair), message_queue.c.run_at <= now)
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(1)
        .lateral("due")
    )
    future = (
        select(message_queue.c.run_at)
        .where(_of_pair(pair), message_queue.c.run_at > now)
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(1)
        .lateral("future")
    )
    each = pair.outerjoin(due, true()).outerjoin(future, true())
    wait = func.extract("epoch", pg.min(future.c.run_at) - clock())
    return select((pg.count(due.c.run_at) > 0).label("is_due"), wait).select_from(each)


@cache
def ages() -> Executable:
    """The ``run_at`` of the first due message of each pair, and the times one to nine periods ago.

    Locks nothing, because a claim at the same time would skip a locked message.
    """
    pair = _pairs()
    period = seconds(cast(bindparam("period", type_=Double), Double))
    due = (
        select(message_queue.c.run_at)
        .where(
            _of_pair(pair),
            _is_after_cursor(pair),
            message_queue.c.run_at <= pg.statement_timestamp(),
        )
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(1)
        .lateral("due")
    )
    ago = [
        cast(
            pg.statement_timestamp() - period * literal_column(f"double precision '{count}'"), Text
        )
        for count in range(1, 10)
    ]
    return select(
        pair.c.queue, pair.c.priority, cast(due.c.run_at, Text).label("run_at"), array(ago)
    ).select_from(pair.join(due, true()))


def _taken_messages(due: CTE, *, ahead: bool) -> CTE:
    """Delete the due messages, except those that a claim ahead does not take.

    By ctid, which gives a Tid Scan whatever the statistics; from an array, which is read once:
    ``id IN (SELECT ... LIMIT 2 FOR UPDATE SKIP LOCKED)`` may run its sub-query once per outer
    row, and would then delete far more than two.
    """
    places = select(due.c.ctid)
    if ahead:
        places = places.where(~due.c.alone)
    return (
        delete(message_queue).where(among(places) == CTID).returning(message_queue).cte("message")
    )


def _passed_priorities(due: CTE) -> ColumnElement[Any]:
    return select(pg.array_agg(due.c.priority)).where(due.c.alone).scalar_subquery()


def _due_messages(*, suspects: bool, registered: bool) -> Select[*tuple[Any, ...]]:
    """The first due messages of the pairs, locked: LIMIT in each probe and around all."""
    pair = _pairs()
    due = (
        select(CTID, message_queue)
        .where(
            _of_pair(pair),
            _is_after_cursor(pair),
            message_queue.c.run_at <= pg.statement_timestamp(),
            true() if suspects else message_queue.c.crashes == 0,
        )
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
        .lateral("due")
    )
    may_claim = _worker_is_alive() if registered else true()
    return select(due).select_from(pair.join(due, true())).where(may_claim).limit(LIMIT)


def _pairs() -> TableValuedAlias:
    return document(
        "pairs",
        column("queue", Text),
        column("priority", SmallInteger),
        column("run_at", DateTime(timezone=True)),
        column("message_id", BigInteger),
    )


def _of_pair(pair: TableValuedAlias) -> ColumnElement[bool]:
    """Whether a message is of the pair, and of a task that this worker knows."""
    known_tasks = array_parameter("tasks", Text)
    return and_(
        message_queue.c.queue == pair.c.queue,
        message_queue.c.priority == pair.c.priority,
        message_queue.c.task == any_(known_tasks),
    )


def _is_after_cursor(pair: TableValuedAlias) -> ColumnElement[bool]:
    place = tuple_(message_queue.c.run_at, message_queue.c.id)
    return place > tuple_(pair.c.run_at, pair.c.message_id)


def _worker_is_alive() -> ColumnElement[bool]:
    """False for a worker that was declared dead: it cannot claim anything under its id."""
    this_worker = select(workers.c.dead_at.is_(None)).where(workers.c.id == WORKER)
    return this_worker.scalar_subquery()


def _unfinished_jobs_of(message: CTE, *, meta: bool) -> CTE:
    """Each message with its job.  Messages without an unfinished job are not among them.

    Time and arguments are read as text: a row that Python cannot read must fail only its own job,
    not the claim of the others.  OFFSET keeps the planner from joining ``jobs`` in another
    order.
    """
    more = [cast(jobs.c.meta, Text).label("meta")] if meta else []
    job = (
        select(jobs.c.max_attempts, cast(jobs.c.args, Text).label("args"), *more)
        .where(jobs.c.id == message.c.target_id, jobs.c.outcome.is_(None))
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    started: Select[*tuple[Any, ...]] = select(
        message.c.id,
        message.c.target_id,
        message.c.queue,
        message.c.priority,
        cast(message.c.run_at, Text).label("run_at"),
        message.c.task,
        message.c.attempt.label("used_attempts"),
        message.c.crashes.label("past_crashes"),
        job.c.max_attempts,
        job.c.args,
        *_meta_of(job),
    ).select_from(message.join(job, true()))
    return started.cte("started")


def _claimed_columns(started: CTE) -> list[ColumnElement[Any]]:
    """The first three columns are the order in which jobs start, so plain rows sort in it."""
    names = ["priority", "run_at", "id", "target_id", "queue", "task", "args", "max_attempts"]
    return [started.c[name] for name in names]


def _meta_column(started: CTE) -> ColumnElement[Any]:
    """The column ``meta``, NULL if it is not read: all rows then have the same columns."""
    return started.c.meta if "meta" in started.c else null().label("meta")


def _meta_of(rows: FromClause) -> list[ColumnElement[Any]]:
    return [rows.c.meta] if "meta" in rows.c else []


def _leases_for(started: CTE) -> CTE:
    """Insert one lease for each job.  If the data are damaged and a job has a lease already, or two
    messages, the other message gets no lease."""
    rows = select(
        started.c.target_id,
        started.c.id,
        started.c.used_attempts + 1,
        started.c.past_crashes,
        WORKER,
    )
    columns = ["target_id", "message_id", "attempt", "crashes", "worker_id"]
    new = insert_or_skip(leases).from_select(columns, rows).on_conflict_do_nothing()
    return new.returning(leases.c.message_id, leases.c.attempt, leases.c.crashes).cte("lease")


def _moment(message: CTE, *, passed: ColumnElement[Any]) -> Subquery:
    """The database's time, how many messages were taken, and the priorities of those that a claim
    ahead has left, in one row that always exists."""
    second_ago = pg.statement_timestamp() - literal_column("interval '1 second'")
    return select(
        cast(pg.statement_timestamp(), Text).label("read_at"),
        cast(second_ago, Text).label("quiet_until"),
        select(count_rows()).select_from(message).scalar_subquery().label("taken"),
        passed.label("passed"),
    ).subquery("moment")
