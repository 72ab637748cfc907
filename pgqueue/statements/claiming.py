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
    case,
    cast,
    column,
    delete,
    exists,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.dialects.postgresql import insert as insert_or_take_over
from sqlalchemy.sql.selectable import CTE, Subquery, TableValuedAlias

from pgqueue.statements.tables import (
    AS_IT_STANDS,
    CTID,
    among,
    array_parameter,
    clock,
    count_rows,
    crashed,
    document,
    jobs,
    leases,
    left_of_older_message,
    message_queue,
    pg,
    seconds,
    workers,
)

LIMIT = bindparam("limit", type_=Integer)
WORKER = bindparam("worker_id", type_=Uuid)


@cache
def claim(*, ahead: bool, suspects: bool, meta: bool = False) -> Executable:
    """Lease mode: delete the messages, insert the leases, read the jobs.

    ``ahead`` claims for slots that are not free yet.  Such a claim does not take messages whose
    jobs must not wait in a worker, which may die; it returns their priorities.  These messages
    count towards the limit, so that a large number of them does not slow the claim down.

    Without ``suspects``, the claim skips jobs that a worker held when it crashed.  ``meta`` reads
    the meta of the jobs, which is NULL otherwise.  At least one row is returned, with the
    database's time; its other columns are NULL if nothing was claimed.
    """
    found = _due_messages(ahead=ahead, suspects=suspects)
    columns = found.selected_columns
    # No more columns than needed: a CTE that is read twice is materialized.
    needed = [columns.ctid, columns.priority, columns.must_not_wait] if ahead else [columns.ctid]
    due = found.with_only_columns(*needed).cte("due")
    message = _taken_messages(due, ahead=ahead)
    started = _unfinished_jobs_of(message, meta=meta)
    lease = _leases_for(started)
    past = _crashed_attempts(started, lease)
    claimed = (
        select(*_claimed_columns(started), lease.c.attempt, lease.c.crashes, _meta_column(started))
        .select_from(started.join(lease, started.c.id == lease.c.message_id))
        .subquery("claimed")
    )
    moment = _moment(message, passed=_passed_priorities(due) if ahead else null())
    return select(moment, claimed).select_from(moment.outerjoin(claimed, true())).add_cte(past)


@cache
def lock(*, suspects: bool, meta: bool = False) -> Executable:
    """Transaction mode: lock the messages until this transaction ends, and read the leases that
    crashed attempts have left."""
    message = _due_messages(suspects=suspects).cte("message")
    started = _unfinished_jobs_of(message, meta=meta)
    stamp = (
        select(leases.c.message_id, leases.c.attempt, leases.c.held)
        .where(leases.c.target_id == started.c.target_id)
        .offset(AS_IT_STANDS)  # by key, however few leases the planner expects
        .lateral("stamp")
    )
    claimed = (
        select(
            *_claimed_columns(started),
            started.c.used_attempts,
            started.c.past_crashes,
            stamp.c.message_id.label("seen_message_id"),
            stamp.c.attempt.label("seen_attempt"),
            stamp.c.held.label("seen_held"),
            _meta_column(started),
        )
        .select_from(started.outerjoin(stamp, true()))
        .subquery("claimed")
    )
    # Compared with the rows just found: a planner with wrong statistics would hash all of jobs.
    useless = select(message.c.ctid).where(~exists().where(started.c.id == message.c.id))
    dropped = delete(message_queue).where(among(useless) == CTID)
    moment = _moment(message, passed=null())
    return (
        select(moment, claimed)
        .select_from(moment.outerjoin(claimed, true()))
        .add_cte(dropped.cte("dropped"))
    )


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

    Locks nothing, because a claim at the same time would skip a locked message.  Transaction mode
    keeps the messages of running jobs locked; these are recognised by their stamps.
    """
    pair = _pairs()
    period = seconds(cast(bindparam("period", type_=Double), Double))
    due = (
        select(message_queue.c.run_at)
        .where(
            _of_pair(pair),
            _is_after_cursor(pair),
            message_queue.c.run_at <= pg.statement_timestamp(),
            ~_has_stamp(),
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
        places = places.where(~due.c.must_not_wait)
    return (
        delete(message_queue).where(among(places) == CTID).returning(message_queue).cte("message")
    )


def _passed_priorities(due: CTE) -> ColumnElement[Any]:
    return select(pg.array_agg(due.c.priority)).where(due.c.must_not_wait).scalar_subquery()


def _due_messages(*, ahead: bool = False, suspects: bool) -> Select[*tuple[Any, ...]]:
    """The first due messages of the pairs, locked: LIMIT in each probe and around all."""
    pair = _pairs()
    due = (
        select(CTID, message_queue, *([_must_not_wait(suspects=suspects)] if ahead else []))
        .where(
            _of_pair(pair),
            _is_after_cursor(pair),
            message_queue.c.run_at <= pg.statement_timestamp(),
            true() if suspects else and_(message_queue.c.crashes == 0, ~_has_stamp()),
        )
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
        .lateral("due")
    )
    return select(due).select_from(pair.join(due, true())).where(_worker_is_alive()).limit(LIMIT)


def _must_not_wait(*, suspects: bool) -> ColumnElement[bool]:
    """Whether a claim ahead does not take the message.  Without suspects, none here has a stamp."""
    alone = message_queue.c.alone
    return (or_(alone, _has_stamp()) if suspects else alone).label("must_not_wait")


def _has_stamp() -> ColumnElement[bool]:
    """Whether a crash in transaction mode has left a stamp."""
    stamp = select(leases.c.target_id).where(leases.c.target_id == message_queue.c.target_id)
    # One probe by key for each message; an EXISTS could become a join that reads all leases.
    return stamp.scalar_subquery().is_not(None)


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
    """Insert one lease for each job, or take over the stamp that transaction mode has left.

    A stamp of the same message shows a crash, which is counted.  A stamp of an older message was
    committed too late, and its handler has not started.  If a job with a lease has a second
    message in any other case, that message gets no lease.
    """
    first = started.alias("first")
    twin = exists().where(first.c.target_id == started.c.target_id, first.c.id < started.c.id)
    proposed = select(
        started.c.target_id,
        started.c.id,
        started.c.used_attempts + 1,
        started.c.past_crashes,
        WORKER,
        false(),
    ).where(~twin)
    new = insert_or_take_over(leases).from_select(
        ["target_id", "message_id", "attempt", "crashes", "worker_id", "held"], proposed
    )
    same = leases.c.message_id == new.excluded.message_id
    taken_over = new.on_conflict_do_update(
        index_elements=[leases.c.target_id],
        set_={
            "message_id": new.excluded.message_id,
            "attempt": case((same, leases.c.attempt + 1), else_=new.excluded.attempt),
            "crashes": case((same, leases.c.crashes + 1), else_=new.excluded.crashes),
            "worker_id": new.excluded.worker_id,
            "held": false(),
            "started_at": clock(),
        },
        where=or_(same, left_of_older_message(new.excluded.message_id)),
    )
    columns = (leases.c.message_id, leases.c.attempt, leases.c.crashes)
    return taken_over.returning(*columns).cte("lease")


def _crashed_attempts(started: CTE, lease: CTE) -> CTE:
    """Record the crashed attempts whose stamps are taken over; reads the leases as they were."""
    old = (
        select(leases.c.worker_id, leases.c.started_at)
        .where(leases.c.target_id == started.c.target_id)
        .offset(AS_IT_STANDS)
        .lateral("old")
    )
    attempts: Select[*tuple[Any, ...]] = select(
        started.c.target_id,
        started.c.id,
        (lease.c.attempt - 1).label("attempt"),
        old.c.worker_id,
        old.c.started_at,
    )
    taken_over = started.join(lease, started.c.id == lease.c.message_id).join(old, true())
    is_crash = lease.c.attempt > started.c.used_attempts + 1
    return crashed(attempts.select_from(taken_over).where(is_crash))


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
