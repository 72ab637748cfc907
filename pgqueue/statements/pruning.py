"""Prune: delete ended jobs whose time is over.

No index shows which jobs have ended: it would have to change at each end, which would then not be a
HOT update.  So a round walks over ``jobs`` by id, and ends at the first young ones: ids grow with
time.  Failed and cancelled jobs may stay longer or shorter; ``dead_letters`` lists them.
"""

from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Executable,
    Float,
    Integer,
    and_,
    bindparam,
    cast,
    column,
    exists,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    table,
    text,
)

from pgqueue.models import SCHEMA
from pgqueue.models.job_status import status_of
from pgqueue.statements.batches import is_in_open_batch
from pgqueue.statements.tables import (
    CANCELLED,
    among,
    clock,
    count_rows,
    dead_letters,
    delete_unlocked,
    deleted_records,
    jobs,
    json_parameter,
    lock_key,
    pg,
    seconds,
)

AFTER = bindparam("after", type_=BigInteger)


class Reference(NamedTuple):
    """A column of the application whose rows keep the jobs to which they refer."""

    schema: str
    table: str
    column: str


@cache
def try_lock() -> Executable:
    """Only one worker prunes at a time.  The lock saves work; SKIP LOCKED makes two safe."""
    return select(pg.pg_try_advisory_xact_lock(literal_column(str(lock_key("prune")), BigInteger)))


@cache
def references() -> Executable:
    """The foreign keys to ``jobs`` that refuse a delete, as far as this role may read them.

    The statements below skip the jobs to which such rows refer: each refusal would be an error in
    the log of the server.
    """
    return text(
        f"""
        SELECT nspname, relname, attname
        FROM pg_catalog.pg_constraint
        JOIN pg_catalog.pg_class ON pg_class.oid = conrelid
        JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
        JOIN pg_catalog.pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
        WHERE contype = 'f' AND confdeltype IN ('a', 'r') AND conparentid = 0::oid
          AND confrelid = pg_catalog.to_regclass('"{SCHEMA}".jobs')::oid
          AND pg_catalog.has_schema_privilege(relnamespace, 'USAGE')
          AND pg_catalog.has_column_privilege(conrelid, attnum, 'SELECT')
        ORDER BY 1, 2, 3
        """  # noqa: S608  # the schema name is checked where it is read
    )


@cache
def prune(references: tuple[Reference, ...], *, dead: bool) -> Executable:
    """Delete the jobs of one stretch whose time is over, and their records.

    ``dead``: a stretch of the failed and cancelled jobs, otherwise of all jobs.

    Returns the last id of the stretch, whether all of its jobs are too young, and how many were
    deleted.  NULL as the id: there are no more jobs.  A job that is requeued or referred to by
    another transaction meanwhile is skipped.
    """
    first = _first(dead=dead)
    ids = among(select(first.c.id))
    due = delete_unlocked(jobs, jobs.c.id == ids, _is_due(references))
    gone = due.returning(jobs.c.id).cte("gone")
    deleted = select(count_rows()).select_from(gone).scalar_subquery()
    are_young = pg.bool_and(first.c.is_young)
    return select(pg.max(first.c.id), are_young, deleted).add_cte(*deleted_records(gone))


@cache
def count_due(references: tuple[Reference, ...]) -> Executable:
    """The jobs that pruning would delete now, by task and outcome.  Reads all jobs."""
    return (
        select(jobs.c.task, jobs.c.outcome, count_rows())
        .where(_is_due(references))
        .group_by(jobs.c.task, jobs.c.outcome)
        .order_by(jobs.c.task, jobs.c.outcome)
    )


@cache
def next_job(*, dead: bool) -> Executable:
    """The first id after another."""
    id = dead_letters.c.job_id if dead else jobs.c.id
    return select(id).where(id > AFTER).order_by(id).limit(1)


def _first(*, dead: bool) -> CTE:
    youth = clock() - seconds(cast(bindparam("shortest", type_=Float), Float))
    is_young = jobs.c.created_at > youth
    id = jobs.c.id
    if dead:
        id, is_young = dead_letters.c.job_id, false()
    size = bindparam("size", type_=Integer)
    first = select(id.label("id"), is_young.label("is_young"))
    return first.where(id > AFTER).order_by(id).limit(size).cte("first")


def _is_due(references: tuple[Reference, ...]) -> ColumnElement[bool]:
    """Whether a job has ended, its time is over, and no other row needs it.

    A cancelled job may still have a lease or a message: the cancel came while a worker was about to
    start the job.  The job stays until that worker has given it up.
    """
    of_task = _rules("keep_of_tasks").op("->")(jobs.c.task)
    of_queue = _rules("keep_of_queues").op("->")(jobs.c.queue)
    kept = (_seconds_of(keep) for keep in (of_task, of_queue, _rules("keep_of_others")))
    span = cast(func.coalesce(*kept), Float)
    place = status_of(
        jobs.c.id, null(), jobs.c.queue, jobs.c.priority, jobs.c.run_at, jobs.c.limit_keys
    )
    return and_(
        jobs.c.outcome.is_not(None),
        of_task.is_not(None),
        span >= literal_column("0::double precision", Float),
        jobs.c.finished_at <= pg.statement_timestamp() - seconds(span),
        or_(jobs.c.outcome != CANCELLED, place == literal_column("'blocked'")),
        ~is_in_open_batch(),
        *(_is_free(reference) for reference in references),
    )


def _rules(name: str) -> ColumnElement[Any]:
    """A document, in a sub-select: a generic plan would read a parameter again for each row."""
    return select(json_parameter(name)).scalar_subquery()


def _seconds_of(keep: ColumnElement[Any]) -> ColumnElement[Any]:
    return keep.op("->>")(jobs.c.outcome)


def _is_free(reference: Reference) -> ColumnElement[bool]:
    rows = table(reference.table, column(reference.column), schema=reference.schema)
    return ~exists().where(rows.c[reference.column] == jobs.c.id)
