"""Enqueue: a job and its message in one statement of the caller's transaction."""

from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Executable,
    Interval,
    Select,
    SmallInteger,
    Text,
    bindparam,
    cast,
    column,
    false,
    func,
    insert,
    literal_column,
    null,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.sql.selectable import CTE

from pgqueue.models import SCHEMA
from pgqueue.statements.tables import (
    clock,
    document,
    jobs,
    message_queue,
    pg,
    text_parameter,
    wake_up_call,
)


class Start(StrEnum):
    """When a job may start, as the caller of the enqueue requested."""

    NOW = "now"
    AFTER = "after"
    AT = "at"


DISPATCHED = (
    jobs.c.id,
    jobs.c.queue,
    jobs.c.priority,
    jobs.c.run_at,
    jobs.c.task,
    jobs.c.max_attempts,
)
"""The columns a message copies from its job.  A role that may only enqueue reads no arguments."""

MESSAGE_COLUMNS = ["queue", "priority", "run_at", "target_id", "task", "alone"]


@cache
def enqueue_job(*, start: Start, unique: bool, notify: bool, labelled: bool = False) -> Executable:
    """Insert one job and its message; returns the values that the database chose.

    ``labelled`` writes meta and tags too.  Returns no row if another unfinished job holds the
    unique key.  DO NOTHING, because DO UPDATE of the holder costs twelve times as much under
    contention.
    """
    values: dict[str, Any] = {
        "queue": bindparam("queue", type_=Text),
        "task": bindparam("task", type_=Text),
        "args": cast(bindparam("args", type_=Text), JSONB),
        "priority": bindparam("priority", type_=SmallInteger),
        "max_attempts": bindparam("max_attempts", type_=SmallInteger),
        "run_at": start_time(start),
        **(_labels() if labelled else {}),
    }
    if unique:
        values["unique_key"] = bindparam("unique_key", type_=Text)
        values["held_unique_key"] = bindparam("unique_key", type_=Text)
    job = _unless_taken(insert_or_skip(jobs).values(values), unique)
    message = message_of(job).cte("message")
    woken = wake_up_call() if notify else true()
    return select(job.c.id, job.c.run_at, job.c.created_at, woken).select_from(job).add_cte(message)


@cache
def enqueue_jobs(*, start: Start, notify: bool, labelled: bool = False) -> Executable:
    """Insert a chunk of jobs of one task from one JSON array of arguments; returns their ids."""
    payloads = (
        pg.jsonb_array_elements(cast(bindparam("documents", type_=Text), JSONB))
        .table_valued(column("args", JSONB))
        .render_derived(name="payload")
    )
    own = {"args": payloads.c.args, **(_labels() if labelled else {})}
    return _enqueue_from(payloads, own, start, unique=False, notify=notify)


@cache
def enqueue_unique_jobs(*, start: Start, notify: bool, labelled: bool = False) -> Executable:
    """The same with a unique key each; returns the new jobs and the holders of taken keys.

    The holders are read in the statement's snapshot, so that a holder which ends while the
    statement runs, perhaps waiting for other enqueuers, is still found.
    """
    payloads = document("documents", column("args", JSONB), column("unique_key", Text))
    key = payloads.c.unique_key
    own = {"args": payloads.c.args, "unique_key": key, "held_unique_key": key}
    own |= _labels() if labelled else {}
    new = _enqueue_from(payloads, own, start, unique=True, notify=notify)
    wanted = document("documents", column("unique_key", Text))
    holder = select(jobs.c.id, jobs.c.held_unique_key, false(), null())
    return union_all(new, _that_hold(holder, select(wanted.c.unique_key)))


@cache
def holders_of_unique_keys() -> Executable:
    """The unfinished jobs of a queue that hold these keys, and whether the role may read them."""
    all_of_jobs = literal_column(f"""'"{SCHEMA}".jobs', 'SELECT'""", Text)
    may_read = pg.has_table_privilege(all_of_jobs)
    keys = pg.jsonb_array_elements_text(cast(bindparam("keys", type_=Text), JSONB))
    holder = select(jobs.c.id, jobs.c.held_unique_key, may_read)
    return _that_hold(holder, select(keys.column_valued("key")))


@cache
def dispatch_flushed_job(*, unique: bool, notify: bool) -> Executable:
    """Insert the message of a job that a flush has just inserted, and take its unique key."""
    this_job = jobs.c.id == bindparam("job_id", type_=BigInteger)
    if unique:
        taken = update(jobs).where(this_job).values(held_unique_key=jobs.c.unique_key)
        job = taken.returning(*DISPATCHED).cte("job")
    else:
        job = select(*DISPATCHED).where(this_job).cte("job")
    woken = wake_up_call() if notify else true()
    return select(woken).select_from(job).add_cte(message_of(job).cte("message"))


def _labels() -> dict[str, Any]:
    return {
        "meta": cast(bindparam("meta", type_=Text), JSONB),
        "tags": cast(bindparam("tags", type_=Text), JSONB),
    }


def start_time(start: Start) -> ColumnElement[Any]:
    """Never in the past: claims find a message behind their cursors late."""
    if start is Start.NOW:
        return clock()
    if start is Start.AFTER:
        return clock() + cast(bindparam("delay", type_=Interval), Interval)
    return func.greatest(bindparam("run_at", type_=DateTime(timezone=True)), clock())


def _that_hold(holder: Select[Any], keys: Select[Any]) -> Select[Any]:
    return holder.where(
        jobs.c.queue == text_parameter("queue"),
        jobs.c.held_unique_key.in_(keys),
        jobs.c.held_unique_key.is_not(None),
    )


def _enqueue_from(
    payloads: Any, own: dict[str, Any], start: Start, *, unique: bool, notify: bool
) -> Select[Any]:
    shared = {
        "queue": bindparam("queue", type_=Text),
        "task": bindparam("task", type_=Text),
        "priority": bindparam("priority", type_=SmallInteger),
        "max_attempts": bindparam("max_attempts", type_=SmallInteger),
        "run_at": start_time(start),
    }
    values = {**shared, **own}
    rows = select(*values.values()).select_from(payloads)
    job = _unless_taken(insert_or_skip(jobs).from_select(list(values), rows), unique)
    woken = wake_up_call() if notify else true()
    # An uncorrelated sub-select is evaluated once, whatever the number of jobs.
    told = select(woken).scalar_subquery()
    columns = (job.c.id, job.c.held_unique_key, true(), told)
    return select(*columns).add_cte(message_of(job).cte("message"))


def _unless_taken(job: Any, unique: bool) -> CTE:
    if unique:
        job = job.on_conflict_do_nothing(
            index_elements=[jobs.c.queue, jobs.c.held_unique_key],
            index_where=jobs.c.held_unique_key.is_not(None),
        )
    cte: CTE = job.returning(*DISPATCHED, jobs.c.held_unique_key, jobs.c.created_at).cte("job")
    return cte


def message_of(job: CTE) -> Any:
    return insert(message_queue).from_select(MESSAGE_COLUMNS, message_rows(job))


def message_rows(job: CTE) -> Select[Any]:
    """Built from the job's own row, not from the caller's values: they cannot differ."""
    return select(
        job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task, job.c.max_attempts == 1
    )
