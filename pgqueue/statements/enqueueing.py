"""Enqueue: a job and its message in one statement of the caller's transaction."""

from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Executable,
    Float,
    Interval,
    Select,
    SmallInteger,
    Text,
    bindparam,
    cast,
    column,
    extract,
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
from pgqueue.statements.reading import moment
from pgqueue.statements.tables import (
    clock,
    document,
    jobs,
    json_parameter,
    message_queue,
    pg,
    text_parameter,
    waiting_messages,
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

UNDER_LIMITS = (*DISPATCHED, jobs.c.limit_keys)
"""The columns that a waiting message copies."""

MESSAGE_COLUMNS = ["queue", "priority", "run_at", "target_id", "task", "alone"]


@cache
def enqueue_job(
    *, start: Start, unique: bool, notify: bool, labelled: bool = False, limited: bool = False
) -> Executable:
    """Insert one job and its message; returns the values that the database chose.

    ``labelled`` writes meta and tags too.  ``limited``: the message waits to be admitted.  Returns
    no row if another unfinished job holds the unique key.  DO NOTHING, because DO UPDATE of the
    holder costs twelve times as much under contention.
    """
    values: dict[str, Any] = {
        "queue": bindparam("queue", type_=Text),
        "task": bindparam("task", type_=Text),
        "args": json_parameter("args"),
        "priority": bindparam("priority", type_=SmallInteger),
        "max_attempts": bindparam("max_attempts", type_=SmallInteger),
        "run_at": start_time(start),
        **(labels() if labelled else {}),
        **({"limit_keys": bindparam("limit_keys", type_=Text)} if limited else {}),
    }
    if unique:
        values["unique_key"] = bindparam("unique_key", type_=Text)
        values["held_unique_key"] = bindparam("unique_key", type_=Text)
    taken = Taken.SKIP if unique else Taken.NEVER
    job = _inserted(insert_or_skip(jobs).values(values), taken, limited=limited)
    message = (waiting_message_of if limited else message_of)(job).cte("message")
    woken = wake_up_call() if notify else true()
    times = (moment(job.c.run_at), moment(job.c.created_at))
    return select(job.c.id, *times, woken).select_from(job).add_cte(message)


@cache
def enqueue_jobs(*, start: Start, notify: bool, labelled: bool = False) -> Executable:
    """Insert a chunk of jobs of one task from one JSON array of arguments; returns their ids."""
    payloads = (
        pg.jsonb_array_elements(json_parameter("documents"))
        .table_valued(column("args", JSONB))
        .render_derived(name="payload")
    )
    own = {"args": payloads.c.args, **(labels() if labelled else {})}
    return _enqueue_from(payloads, own, start, Taken.NEVER, notify=notify)


@cache
def enqueue_unique_jobs(
    *, start: Start, notify: bool, labelled: bool = False, limited: bool = False
) -> Executable:
    """The same with a unique key each; returns the new jobs and the holders of taken keys.

    Also for jobs under limits, whose keys differ from job to job.

    The holders are read in the statement's snapshot, so that a holder which ends while the
    statement runs, perhaps waiting for other enqueuers, is still found.
    """
    new = _enqueue_with_keys(start, Taken.SKIP, notify=notify, labelled=labelled, limited=limited)
    wanted = document("documents", column("unique_key", Text))
    holder = select(jobs.c.id, jobs.c.held_unique_key, false(), null())
    return union_all(new, _that_hold(holder, select(wanted.c.unique_key)))


@cache
def enqueue_or_lock_jobs(*, start: Start, notify: bool, labelled: bool = False) -> Executable:
    """The same, but lock the holders of taken keys until the transaction ends, and return only the
    new jobs.

    DO UPDATE locks a row also if its WHERE is false, and writes nothing then.  Rows are inserted or
    locked one by one in the order of the document, so that two callers who use the same keys in
    one order do not deadlock.
    https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT
    """
    return _enqueue_with_keys(start, Taken.LOCK, notify=notify, labelled=labelled)


@cache
def period_of_start(start: Start) -> Executable:
    """When the period begins in which a job is due that is enqueued now, in seconds since 1970."""
    period = cast(bindparam("period", type_=Float), Float)
    since = cast(extract("epoch", start_time(start)), Float)
    return select(cast(pg.floor(since / period) * period, BigInteger))


@cache
def holders_of_unique_keys() -> Executable:
    """The unfinished jobs of a queue that hold these keys, and whether the role may read them."""
    all_of_jobs = literal_column(f"""'"{SCHEMA}".jobs', 'SELECT'""", Text)
    may_read = pg.has_table_privilege(all_of_jobs)
    keys = pg.jsonb_array_elements_text(json_parameter("keys"))
    holder = select(jobs.c.id, jobs.c.held_unique_key, may_read)
    return _that_hold(holder, select(keys.column_valued("key")))


@cache
def dispatch_flushed_job(*, unique: bool, notify: bool, limited: bool = False) -> Executable:
    """Insert the message of a job that a flush has just inserted, and take its unique key.

    Returns the times that the database chose.
    """
    this_job = jobs.c.id == bindparam("job_id", type_=BigInteger)
    columns = UNDER_LIMITS if limited else DISPATCHED
    if unique:
        taken = update(jobs).where(this_job).values(held_unique_key=jobs.c.unique_key)
        job = taken.returning(*columns, jobs.c.created_at).cte("job")
    else:
        job = select(*columns, jobs.c.created_at).where(this_job).cte("job")
    woken = wake_up_call() if notify else true()
    message = (waiting_message_of if limited else message_of)(job)
    times = (moment(job.c.run_at), moment(job.c.created_at))
    return select(*times, woken).select_from(job).add_cte(message.cte("message"))


class Taken(StrEnum):
    """What an insert does with a row whose unique key is taken."""

    NEVER = "never"
    SKIP = "skip"
    LOCK = "lock"


def labels(prefix: str = "") -> dict[str, Any]:
    return {name: json_parameter(f"{prefix}{name}") for name in ("meta", "tags")}


def start_time(start: Start, prefix: str = "") -> ColumnElement[Any]:
    """Never in the past: claims find a message behind their cursors late."""
    if start is Start.NOW:
        return clock()
    if start is Start.AFTER:
        return clock() + cast(bindparam(f"{prefix}delay", type_=Interval), Interval)
    moment = bindparam(f"{prefix}run_at", type_=DateTime(timezone=True))
    return func.greatest(moment, clock())


def _that_hold(holder: Select[Any], keys: Select[Any]) -> Select[Any]:
    return holder.where(
        jobs.c.queue == text_parameter("queue"),
        jobs.c.held_unique_key.in_(keys),
        jobs.c.held_unique_key.is_not(None),
    )


def _enqueue_with_keys(
    start: Start, taken: Taken, *, notify: bool, labelled: bool, limited: bool = False
) -> Select[Any]:
    more = [column("limit_keys", Text)] if limited else []
    payloads = document("documents", column("args", JSONB), column("unique_key", Text), *more)
    key = payloads.c.unique_key
    own = {"args": payloads.c.args, "unique_key": key, "held_unique_key": key}
    own |= {"limit_keys": payloads.c.limit_keys} if limited else {}
    own |= labels() if labelled else {}
    return _enqueue_from(payloads, own, start, taken, notify=notify, limited=limited)


def _enqueue_from(
    payloads: Any,
    own: dict[str, Any],
    start: Start,
    taken: Taken,
    *,
    notify: bool,
    limited: bool = False,
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
    job = _inserted(insert_or_skip(jobs).from_select(list(values), rows), taken, limited=limited)
    woken = wake_up_call() if notify else true()
    # An uncorrelated sub-select is evaluated once, whatever the number of jobs.
    woken_count = select(woken).scalar_subquery()
    columns = (job.c.id, job.c.held_unique_key, true(), woken_count)
    message = (waiting_message_of if limited else message_of)(job)
    return select(*columns).add_cte(message.cte("message"))


def _inserted(job: Any, taken: Taken, *, limited: bool = False) -> CTE:
    index: dict[str, Any] = {
        "index_elements": [jobs.c.queue, jobs.c.held_unique_key],
        "index_where": jobs.c.held_unique_key.is_not(None),
    }
    match taken:
        case Taken.SKIP:
            job = job.on_conflict_do_nothing(**index)
        case Taken.LOCK:
            same = {"held_unique_key": jobs.c.held_unique_key}
            job = job.on_conflict_do_update(**index, set_=same, where=false())
    columns = UNDER_LIMITS if limited else DISPATCHED
    cte: CTE = job.returning(*columns, jobs.c.held_unique_key, jobs.c.created_at).cte("job")
    return cte


def message_of(job: CTE) -> Any:
    return insert(message_queue).from_select(MESSAGE_COLUMNS, message_rows(job))


def waiting_message_of(job: CTE) -> Any:
    """The message of a job under limits, which waits to be admitted."""
    names = ["limit_keys", "queue", "priority", "run_at", "id", "task"]
    columns = ["target_id" if name == "id" else name for name in names]
    return insert(waiting_messages).from_select(columns, select(*(job.c[name] for name in names)))


def message_rows(job: CTE) -> Select[Any]:
    """Built from the job's own row, not from the caller's values: they cannot differ."""
    return select(
        job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task, job.c.max_attempts == 1
    )
