"""Batches: create them, add jobs to them, and find out when the last job has ended.

A settle knows nothing of batches.  Each open batch names one job for which it waits, and only when
that job has ended does a worker look for the next unfinished one.  So a batch of a million jobs
costs one probe by key at each look.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Executable,
    Float,
    Select,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_or_skip

from pgqueue.statements.reading import moment
from pgqueue.statements.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CTID,
    FAILED,
    among,
    batch_jobs,
    batches,
    clock,
    count_rows,
    jobs,
    json_parameter,
    pg,
    seconds,
    text_parameter,
)

BATCH = bindparam("batch_id", type_=BigInteger)
AFTER = bindparam("after", type_=BigInteger)
IS_OPEN = batches.c.ended_at.is_(None)
A_DAY = literal_column("86400::double precision", Float)
"""An ended batch stays so long at least: its callback reads it."""


@cache
def add_batch(*, named: bool) -> Executable:
    """Insert a batch without callbacks; returns its id.

    ``named``: of an application with a name.  Without one, an older grant of rights is enough.
    """
    row = {"name": bindparam("name", type_=Text), "meta": json_parameter("meta")}
    if named:
        row["application"] = text_parameter("of_application")
    return insert(batches).values(row).returning(batches.c.id)


@cache
def set_callbacks() -> Executable:
    values = {name: json_parameter(name) for name in ("on_success", "on_failure")}
    return update(batches).where(batches.c.id == BATCH).values(values)


@cache
def keep_open() -> Executable:
    """Lock an open batch, so that it cannot end before this transaction does; no row if it has.

    FOR KEY SHARE: any number of transactions may add jobs at once, and only the FOR UPDATE of an
    end conflicts with it.  After a wait for an end, READ COMMITTED compares ``ended_at`` again.
    """
    return (
        select(batches.c.id)
        .where(batches.c.id == BATCH, IS_OPEN)
        .with_for_update(read=True, key_share=True)
    )


@cache
def is_known() -> Executable:
    return select(batches.c.id).where(batches.c.id == BATCH)


@cache
def add_jobs() -> Executable:
    """Add jobs by their ids.  Those that a savepoint has undone meanwhile are left out."""
    ids = cast(bindparam("job_ids"), ARRAY(BigInteger))
    rows = select(cast(BATCH, BigInteger), jobs.c.id).where(jobs.c.id == any_(ids))
    return (
        insert_or_skip(batch_jobs)
        .from_select(["batch_id", "job_id"], rows)
        .on_conflict_do_nothing()
    )


def may_have_ended() -> ColumnElement[bool]:
    """Whether a batch is open, and the job for which it waits has ended or was never chosen."""
    return and_(IS_OPEN, ~_is_unfinished(batches.c.waits_for))


def has_candidates() -> ColumnElement[bool]:
    """Whether a batch may have ended; one probe for each open batch.

    The order makes the planner read the index of the open batches, and not those that have ended.
    """
    first = select(batches.c.id).where(may_have_ended()).order_by(batches.c.id)
    return first.limit(literal_column("1")).scalar_subquery().is_not(None)


@cache
def candidates() -> Executable:
    """The first batches that may have ended, after another id."""
    return (
        select(batches.c.id)
        .where(may_have_ended(), batches.c.id > AFTER)
        .order_by(batches.c.id)
        .limit(bindparam("limit", type_=BigInteger))
    )


@cache
def lock_candidate() -> Executable:
    """Lock a batch that may have ended.

    No row if a transaction adds jobs to it, or another worker looks at it.
    """
    callbacks = (cast(batches.c.on_success, Text), cast(batches.c.on_failure, Text))
    return (
        select(batches.c.waits_for, *callbacks)
        .where(may_have_ended(), batches.c.id == BATCH)
        .with_for_update(skip_locked=True)
    )


@cache
def candidates_in_full() -> Executable:
    """The batches that may have ended, with their callbacks, and for how long.  For an operator."""
    ended_at = select(jobs.c.finished_at).where(jobs.c.id == batches.c.waits_for).scalar_subquery()
    since = func.coalesce(ended_at, batches.c.created_at)
    return (
        select(
            batches.c.id,
            cast(batches.c.on_success, Text),
            cast(batches.c.on_failure, Text),
            pg.statement_timestamp() - since,
        )
        .where(may_have_ended())
        .order_by(batches.c.id)
    )


@cache
def next_unfinished() -> Executable:
    """The first unfinished job of a batch after another job.

    A separate statement, after the lock: the snapshot of the statement that locks may be older
    than the last addition.
    """
    job_id = batch_jobs.c.job_id
    return (
        select(job_id)
        .where(batch_jobs.c.batch_id == BATCH, job_id > AFTER, _is_unfinished(job_id))
        .order_by(job_id)
        .limit(literal_column("1"))
    )


@cache
def count_jobs() -> Executable:
    """How many jobs a batch has, how they have ended, and its first unfinished job."""
    return _counts(BATCH)


@cache
def wait_for() -> Executable:
    job_id = bindparam("job_id", type_=BigInteger)
    return update(batches).where(batches.c.id == BATCH).values(waits_for=job_id)


@cache
def end_batch() -> Executable:
    names = ("outcome", "total", "failed", "cancelled", "callback_id")
    values = {name: bindparam(name, type_=batches.c[name].type) for name in names}
    return (
        update(batches)
        .where(batches.c.id == BATCH, IS_OPEN)
        .values(**values, waits_for=null(), ended_at=clock())
    )


@cache
def batch_states(*, one: bool) -> Executable:
    """Batches with their progress, the newest first; ``one``: the batch with this id.

    An open batch is counted, which reads all of its jobs; an ended one has its numbers.
    """
    counted = _counts(batches.c.id, IS_OPEN).lateral("counted")
    columns = batches.c
    found = (
        select(
            *(columns.id, columns.name, cast(columns.meta, Text)),
            func.coalesce(columns.total, counted.c.total),
            func.coalesce(columns.total, counted.c.total - counted.c.unfinished),
            func.coalesce(columns.failed, counted.c.failed),
            func.coalesce(columns.cancelled, counted.c.cancelled),
            columns.outcome,
            columns.callback_id,
            moment(columns.created_at),
            moment(columns.ended_at),
        )
        .select_from(batches)
        .join(counted, true())
        .order_by(columns.id.desc())
    )
    if one:
        return found.where(columns.id == BATCH)
    return found.limit(bindparam("limit", type_=BigInteger))


@cache
def next_due_batch() -> Executable:
    """The first batch of an application, after another id, whose time is over."""
    return (
        select(batches.c.id)
        .where(batches.c.id > AFTER, *_is_due())
        .order_by(batches.c.id)
        .limit(literal_column("1"))
    )


@cache
def prune_batch() -> Executable:
    """Delete a batch whose time is over, or at most so many of its rows.

    Returns how many rows were deleted.  A batch whose callback has not ended stays.
    """
    due = select(batches.c.id).where(batches.c.id == BATCH, *_is_due())
    old = due.with_for_update(skip_locked=True).cte("old")
    id = select(old.c.id).scalar_subquery()
    size = bindparam("size", type_=BigInteger)
    places = select(CTID).select_from(batch_jobs).where(batch_jobs.c.batch_id == id).limit(size)
    those = among(places) == CTID
    parts = delete(batch_jobs).where(those).returning(batch_jobs.c.job_id).cte("parts")
    parts_gone = select(count_rows()).select_from(parts).scalar_subquery()
    whole = delete(batches).where(batches.c.id == id, parts_gone < size)
    gone = whole.returning(batches.c.id).cte("gone")
    return select(parts_gone + select(count_rows()).select_from(gone).scalar_subquery())


def is_in_open_batch() -> ColumnElement[bool]:
    """Whether a job must stay, because its outcome counts at the end of a batch.

    Two probes by key for a job of a batch, one for any other.
    """
    is_open = select(batches.c.id).where(batches.c.id == batch_jobs.c.batch_id, IS_OPEN)
    return (
        select(batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == jobs.c.id, is_open.offset(AS_IT_STANDS).exists())
        .offset(AS_IT_STANDS)
        .exists()
    )


def _is_due() -> tuple[ColumnElement[bool], ...]:
    keep = select(json_parameter("keep_of_others")).scalar_subquery()
    span = cast(keep.op("->>")(batches.c.outcome), Float)
    return (
        batches.c.ended_at <= pg.statement_timestamp() - seconds(func.greatest(span, A_DAY)),
        span >= literal_column("0::double precision", Float),
        ~_is_unfinished(batches.c.callback_id),
        batches.c.application == text_parameter("of_application"),
    )


def _counts(
    batch_id: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> Select[*tuple[Any, ...]]:
    """A job that is gone has ended and has not failed: pruning leaves the jobs of open batches."""
    is_unfinished = and_(jobs.c.id.is_not(None), jobs.c.outcome.is_(None))
    return (
        select(
            count_rows().label("total"),
            _count_if(is_unfinished).label("unfinished"),
            _count_if(jobs.c.outcome == FAILED).label("failed"),
            _count_if(jobs.c.outcome == CANCELLED).label("cancelled"),
            pg.min(case((is_unfinished, jobs.c.id))).label("first_unfinished"),
        )
        .select_from(batch_jobs.outerjoin(jobs, jobs.c.id == batch_jobs.c.job_id))
        .where(batch_jobs.c.batch_id == batch_id, *conditions)
    )


def _count_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return count_rows().filter(condition)


def _is_unfinished(job_id: ColumnElement[Any]) -> ColumnElement[bool]:
    """One probe by key for each row: the OFFSET keeps the planner from reading all jobs."""
    unfinished = select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
    return unfinished.offset(AS_IT_STANDS).exists()
