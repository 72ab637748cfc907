"""The tables as SQLAlchemy Core sees them, and expressions that all statements share."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm import Session
from sqlalchemy.types import TypeEngine

from pgqueue.models import (
    SCHEMA,
    Batch,
    BatchJob,
    Blocked,
    DeadLetter,
    DeclaredTask,
    Dependency,
    Deploy,
    ErrorGroup,
    Job,
    JobAttempt,
    JobStep,
    Lease,
    LimitBucket,
    LimitPlace,
    LimitSettings,
    MessageQueue,
    OperatorAction,
    PausedTask,
    QueueMinute,
    QueueSettings,
    Schedule,
    Signal,
    TaskMinute,
    UnreadableJob,
    WaitingMessage,
    WorkerProcess,
)
from pgqueue.models.base import table_of
from pgqueue.outcomes import ErrorReport
from pgqueue.rules.unique import KEY_ACROSS_QUEUES, KEY_OF_PERIOD, KEY_UNTIL_SUCCEEDED

Executor = Session | sa.Connection
"""What a statement is run by."""


jobs = table_of(Job)
message_queue = table_of(MessageQueue)
leases = table_of(Lease)
job_attempts = table_of(JobAttempt)
job_steps = table_of(JobStep)
signals = table_of(Signal)
dead_letters = table_of(DeadLetter)
unreadable_jobs = table_of(UnreadableJob)
workers = table_of(WorkerProcess)
queues = table_of(QueueSettings)
paused_tasks = table_of(PausedTask)
schedules = table_of(Schedule)
waiting_messages = table_of(WaitingMessage)
limit_places = table_of(LimitPlace)
limits = table_of(LimitSettings)
limit_buckets = table_of(LimitBucket)
batches = table_of(Batch)
batch_jobs = table_of(BatchJob)
blocked = table_of(Blocked)
dependencies = table_of(Dependency)
task_minutes = table_of(TaskMinute)
error_groups = table_of(ErrorGroup)
queue_minutes = table_of(QueueMinute)
deploys = table_of(Deploy)
declared_tasks = table_of(DeclaredTask)
operator_actions = table_of(OperatorAction)

AS_IT_STANDS: sa.ColumnElement[Any] = sa.literal_column("0")
"""An OFFSET that keeps the planner from reordering a sub-query: one probe by key for each row."""
POSITION = ("queue", "priority", "run_at")
"""The columns that say where in the queue a job and its message stand."""
CTID: sa.ColumnElement[Any] = sa.column("ctid")
"""The physical location of a row.  Safe in a statement that has itself locked the row, and only on
a plain table: in a partitioned one, each partition may have a row with the same ctid."""

A_WRITE: dict[str, Any] = {"mapper": Job, "clause": sa.update(jobs)}
"""Which bind a Session is asked for.  A ``get_bind`` that sends reads to a replica recognizes a
write by its clause, and all but reads by an operator write."""

SUCCEEDED = sa.literal_column("'succeeded'", sa.Text)
FAILED = sa.literal_column("'failed'", sa.Text)
CANCELLED = sa.literal_column("'cancelled'", sa.Text)

AS_IF_NEW = {
    **dict.fromkeys(("attempts", "snoozes", "interruptions"), 0),
    **dict.fromkeys(
        (
            *("outcome", "result", "progress", "started_at", "finished_at"),
            *("cancel_requested_at", "kill_requested_at"),
        ),
        sa.null(),
    ),
    "held_unique_key": jobs.c.unique_key,
}
"""The values of a job that is put back as if new; its old attempts stay on record."""

CRASHED = "The worker that ran this attempt died, or was cut off from the database."
CRASH = ErrorReport("WorkerCrashed", CRASHED, "")
INTERRUPTED = "The worker was stopped, and the handler did not end within the grace period."
INTERRUPTION = ErrorReport("Interrupted", INTERRUPTED, "")


def lock_key(purpose: str) -> int:
    """The key of an advisory lock of this schema; another schema of the database has other keys."""
    digest = sha256(f"pgqueue:{SCHEMA}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


SLEEPERS = lock_key("sleepers")
"""Held in shared mode by every sleeping worker."""

CHANNEL = f"pgqueue_{sha256(SCHEMA.encode()).hexdigest()[:8]}"
"""One fixed channel for each schema: no user's text becomes part of an identifier."""

SEARCH_PATH = "pg_catalog, pg_temp"
"""Where our own connections look up names: only schemas in which no other role can create objects.
A path that does not name pg_temp searches it first.
https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-SEARCH-PATH"""

pg = sa.func.pg_catalog
"""Functions by their full names.  If other roles may create functions in a schema of the path, one
of these may match the arguments better than PostgreSQL's, and would run with our rights.  Names
that remain with ``func`` are syntax.  Operators have no short full name: their operands have
exactly the types of one of PostgreSQL's operators, which then takes precedence.
https://www.postgresql.org/docs/current/typeconv-oper.html"""

clock = pg.clock_timestamp

NEWLINE = pg.chr(sa.literal_column("10", sa.Integer), type_=sa.Text)
"""Between the keys of a job's limits."""
SPACE = sa.cast(sa.literal_column("' '", sa.Text), sa.Text)
"""After the name of a limit in a key."""


def sees_all(*tables: sa.Table) -> sa.ColumnElement[bool]:
    """Whether row security hides no row of these tables from the role of this statement.

    Nothing is deleted, and nothing ends, because a join was empty: a statement that acts on a
    missing row asks this too.  Reads the server's cache of the catalog, once for a statement.
    """
    return sa.and_(*(~pg.row_security_active(_oid_of(table), type_=sa.Boolean) for table in tables))


def _oid_of(table: sa.Table) -> sa.ColumnElement[Any]:
    return sa.literal_column(f"""'"{SCHEMA}".{table.name}'::pg_catalog.regclass::oid""")


def count_rows() -> sa.Function[int]:
    return pg.count(sa.literal_column("*"), type_=sa.Integer)


def text_parameter(name: str) -> sa.ColumnElement[str]:
    """A text to compare with, cast because a driver may send it as varchar."""
    return sa.cast(sa.bindparam(name, type_=sa.Text), sa.Text)


def json_parameter(name: str) -> sa.ColumnElement[Any]:
    """A JSON document, sent as text."""
    return sa.cast(sa.bindparam(name, type_=sa.Text), JSONB)


def array_parameter(name: str, type_: type[TypeEngine[Any]]) -> sa.ColumnElement[Any]:
    """An array, sent as the text that :func:`array_of` writes: psycopg would adapt each item."""
    return sa.cast(sa.bindparam(name, type_=sa.Text), ARRAY(type_))


def given_ids(parameter: str, *, column: str = "id", name: str = "given") -> sa.TableValuedAlias:
    """The ids in an array parameter, as rows."""
    ids = pg.unnest(array_parameter(parameter, sa.BigInteger))
    return ids.table_valued(sa.column(column, sa.BigInteger)).render_derived(name=name)


def wake_up_call(word: str = "enqueued") -> sa.ColumnElement[bool]:
    """Notify, but only if some worker sleeps.

    A sleeper holds the lock in shared mode, so an exclusive lock fails exactly then; otherwise
    it is released at once.  Nothing waits for it.  NOTIFY on every commit would serialise the
    commits of all enqueuers behind a lock on the whole database.
    """
    # A literal column: literal_execute would render the key anew at every enqueue.
    key = sa.literal_column(str(SLEEPERS), sa.BigInteger)
    is_free = pg.pg_try_advisory_lock(key)
    return sa.case((is_free, pg.pg_advisory_unlock(key)), else_=notify(word))


def notify(word: str, channel: str = CHANNEL) -> sa.ColumnElement[bool]:
    return pg.pg_notify(sa.literal_column(f"'{channel}'"), sa.literal_column(f"'{word}'")).is_(None)


def document(name: str, *columns: sa.ColumnElement[Any]) -> sa.TableValuedAlias:
    """One JSON document as rows.

    Bulk parameters are sent so because psycopg adapts a list of strings in Python, item by item,
    which costs more than the statement.
    """
    recordset = pg.jsonb_to_recordset(json_parameter(name))
    return recordset.table_valued(*columns).render_derived(name=name, with_types=True)


def array_of(names: Iterable[str]) -> str:
    """Names as the text of a PostgreSQL array: sent as one string, planned as one constant."""
    quoted = (name.replace("\\", "\\\\").replace('"', '\\"') for name in names)
    return "{" + ",".join(f'"{name}"' for name in quoted) + "}"


def seconds(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """A number of seconds as an interval."""
    return value * sa.literal_column("interval '1 second'")


def has_key_of_period() -> sa.ColumnElement[bool]:
    """Whether a job holds a key that stays taken after it has succeeded; NULL without a key."""
    prefix = sa.cast(sa.literal_column(f"'{KEY_OF_PERIOD}'", sa.Text), sa.Text)
    return pg.starts_with(jobs.c.held_unique_key, prefix, type_=sa.Boolean)


def has_key_until_succeeded() -> sa.ColumnElement[bool]:
    """Whether a job holds a key that stays taken after it has failed; NULL without a key."""
    prefix = sa.cast(sa.literal_column(f"'{KEY_UNTIL_SUCCEEDED}'", sa.Text), sa.Text)
    return pg.starts_with(jobs.c.held_unique_key, prefix, type_=sa.Boolean)


def is_key_across_queues(job: sa.FromClause = jobs) -> sa.ColumnElement[bool]:
    """The condition of the index of keys that only one job of all queues may hold."""
    prefix = sa.literal_column(f"'{KEY_ACROSS_QUEUES}'", sa.Text)
    return pg.starts_with(job.c.held_unique_key, prefix, type_=sa.Boolean)


def key_after_success() -> sa.ColumnElement[Any]:
    return sa.case((has_key_of_period(), jobs.c.held_unique_key))


def key_after_failure() -> sa.ColumnElement[Any]:
    return sa.case((has_key_until_succeeded(), jobs.c.held_unique_key))


def equal(
    left: sa.FromClause, right: sa.FromClause, names: Iterable[str]
) -> list[sa.ColumnElement[bool]]:
    """Whether these columns have the same names and values on both sides."""
    return [left.c[name] == right.c[name] for name in names]


def stands_at_place_of(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """A message of this job, found by the job's queue, priority and time.

    These are the key of the message without its id: no index finds a message by its job alone.
    """
    return _is_at_place(message_queue, POSITION, job_id)


def waits_at_place_of(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """The waiting message of this job, found by its whole key, which the job's row has."""
    return _is_at_place(waiting_messages, ("limit_keys", *POSITION), job_id)


def _is_at_place(
    messages: sa.Table, names: Iterable[str], job_id: sa.ColumnElement[Any]
) -> sa.ColumnElement[bool]:
    # Correlated by name: SQLAlchemy would otherwise repeat the table of an enclosing DELETE here.
    job = sa.select(jobs).where(jobs.c.id == job_id).correlate_except(jobs)
    key = [
        messages.c[name] == job.with_only_columns(jobs.c[name]).scalar_subquery() for name in names
    ]
    return sa.and_(*key, messages.c.target_id == job_id)


def among(values: sa.Select[Any]) -> sa.ColumnElement[Any]:
    """Compare with these values: an array is read once, whatever the planner expects."""
    return sa.any_(sa.func.array(values.scalar_subquery()))


def delete_unlocked(table: sa.Table, *conditions: sa.ColumnElement[bool]) -> sa.Delete:
    """Delete these rows, except those that another transaction has locked: never waits."""
    rows = sa.select(CTID).select_from(table).where(*conditions).with_for_update(skip_locked=True)
    return sa.delete(table).where(among(rows) == CTID)


LETTER = (jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
"""The columns that a dead letter copies from its job."""


def dead_letter_of(job: sa.CTE) -> sa.CTE:
    """Insert the dead letters of jobs that were cancelled, unless a settle has done so."""
    names = ["job_id", "outcome", "queue", "task", "finished_at"]
    letter = pg_insert(dead_letters).from_select(names, sa.select(job))
    return letter.on_conflict_do_nothing().cte("letter")


def deleted_records(gone: sa.CTE) -> list[sa.CTE]:
    """Delete what is on record about deleted jobs, by key."""
    ids = among(sa.select(gone.c.id))
    return [
        sa.delete(job_attempts).where(job_attempts.c.job_id == ids).cte("attempts"),
        sa.delete(dead_letters).where(dead_letters.c.job_id == ids).cte("letters"),
        sa.delete(unreadable_jobs).where(unreadable_jobs.c.job_id == ids).cte("unreadable"),
        sa.delete(dependencies).where(dependencies.c.job_id == ids).cte("edges"),
        sa.delete(job_steps).where(job_steps.c.job_id == ids).cte("steps"),
    ]
