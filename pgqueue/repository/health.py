"""Problems around the tables: server settings, other sessions, jobs that no worker runs."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from pgqueue.models import SCHEMA, STATES, WAITING, JobStatus, State
from pgqueue.repository.blocked import ZERO, is_unfinished
from pgqueue.repository.reading import Moment, span
from pgqueue.repository.signals import BATCH_HAS_ENDED, is_open_wait
from pgqueue.repository.tables import (
    NEWLINE,
    SPACE,
    SUCCEEDED,
    Executor,
    batches,
    blocked,
    count_rows,
    dead_letters,
    job_steps,
    jobs,
    leases,
    message_queue,
    pg,
    unreadable_jobs,
    waiting_messages,
    workers,
)

LONGEST_SILENCE = 60.0
"""Seconds without an answer of the database, or without a look for jobs, after which a worker
counts as not live.  Longer than an outage for which a restart of the worker would not help."""


@cache
def count_jobs(*, succeeded: bool) -> sa.Executable:
    """By queue and status, each from the table that has its jobs.

    ``succeeded``: count these jobs too, which are the most, and for which all jobs are read.
    """
    # Without the conditions of STATES: to look for leases costs more than to count, and a job has
    # a message or a lease.
    waiting = (_count(_queues_of(STATES[status]), status) for status in WAITING)
    running = _count(jobs.c.queue, JobStatus.RUNNING).join_from(
        leases, jobs, leases.c.target_id == jobs.c.id
    )
    by = (dead_letters.c.queue, dead_letters.c.outcome)
    counts = [*waiting, running, sa.select(*by, count_rows()).group_by(*by)]
    if succeeded:
        counts.append(_count(jobs.c.queue, JobStatus.SUCCEEDED).where(jobs.c.outcome == SUCCEEDED))
    return sa.union_all(*counts)


def _queues_of(state: State) -> sa.ColumnElement[str]:
    """The queue of each job that stands in the table of a state, or elsewhere."""
    if state.elsewhere is None:
        queue: sa.ColumnElement[str] = state.table.c.queue
        return queue
    others = sa.select(jobs.c.queue).join(state.elsewhere.table, state.elsewhere == jobs.c.id)
    return sa.union_all(sa.select(state.table.c.queue), others).subquery("waiting").c.queue


def _count(queue: sa.ColumnElement[str], status: JobStatus) -> sa.Select[str, str, int]:
    return sa.select(queue, sa.literal(status.value), count_rows()).group_by(queue)


@cache
def estimate_jobs() -> sa.Executable:
    """The number of jobs that the last VACUUM or ANALYZE has found; -1 before the first."""
    return sa.text(
        f"""
        SELECT reltuples::bigint FROM pg_catalog.pg_class
        WHERE oid = '"{SCHEMA}".jobs'::regclass::oid
        """  # noqa: S608  # the schema name is checked where it is read
    )


@cache
def due_jobs_of_unknown_tasks() -> sa.Executable:
    """Tasks other than these, with their due messages.  Reads all messages."""
    due = _due_messages()
    unknown = due.c.task != sa.all_(sa.bindparam("known", type_=ARRAY(sa.Text)))
    return (
        sa.select(due.c.task, count_rows(), _waits(due))
        .where(unknown)
        .group_by(due.c.task)
        .order_by(count_rows().desc(), due.c.task)
    )


@cache
def unreadable() -> sa.Executable:
    """Tasks with jobs whose arguments no worker could read so far, and the error of the first one.

    A row that its job no longer needs stays until the job is deleted: one of a job that has ended,
    or that a worker runs now.
    """
    met = unreadable_jobs
    reasons = pg.array_agg(aggregate_order_by(met.c.reason, met.c.since), type_=ARRAY(sa.Text))
    oldest = span(pg.statement_timestamp() - pg.min(met.c.since))
    return (
        sa.select(met.c.task, count_rows(), oldest, reasons[sa.literal_column("1", sa.Integer)])
        .join_from(met, jobs, jobs.c.id == met.c.job_id)
        .where(jobs.c.outcome.is_(None), ~sa.exists().where(leases.c.target_id == met.c.job_id))
        .group_by(met.c.task)
        .order_by(count_rows().desc(), met.c.task)
    )


@cache
def ended_jobs_of_unknown_tasks() -> sa.Executable:
    """Tasks other than these, with their ended jobs.  Reads all jobs."""
    unknown = jobs.c.task != sa.all_(sa.bindparam("known", type_=ARRAY(sa.Text)))
    return (
        sa.select(jobs.c.task, count_rows())
        .where(jobs.c.outcome.is_not(None), unknown)
        .group_by(jobs.c.task)
        .order_by(count_rows().desc(), jobs.c.task)
    )


@cache
def due_jobs_nobody_serves() -> sa.Executable:
    """Queues with due messages that no live worker serves.  Reads all messages."""
    messages = _due_messages()
    due = (
        sa.select(messages.c.queue, count_rows().label("jobs"), _waits(messages).label("waits"))
        .group_by(messages.c.queue)
        .subquery("due")
    )
    unserved = sa.select(due.c.queue, due.c.jobs, due.c.waits).where(~is_served(due.c.queue))
    return unserved.order_by(due.c.queue)


def is_served(queue: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether a live worker serves a queue, by its name or by a pattern."""
    return sa.select(sa.true()).select_from(workers).where(is_live(), serves(queue)).exists()


def is_live() -> sa.ColumnElement[bool]:
    """Whether the worker of a row of ``workers`` is alive.

    Its heartbeat must be recent: when the last worker dies, no other declares it dead.
    """
    silence = sa.literal_column(f"interval '{LONGEST_SILENCE:g} seconds'", sa.Interval)
    is_recent = workers.c.heartbeat_at > pg.statement_timestamp() - silence
    return sa.and_(workers.c.dead_at.is_(None), is_recent)


def serves(queue: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether the worker of a row of ``workers`` serves a queue, by its name or by a pattern."""
    elements = pg.jsonb_array_elements_text(workers.c.queues)
    given = elements.table_valued(sa.column("name", sa.Text)).render_derived(name="given")
    length = pg.length(given.c.name, type_=sa.Integer) - sa.literal_column("1", sa.Integer)
    prefix = pg.left(given.c.name, length, type_=sa.Text)
    is_pattern = given.c.name == prefix.concat(sa.literal_column("'*'", sa.Text))
    fits = sa.and_(is_pattern, pg.starts_with(queue, prefix, type_=sa.Boolean))
    named = sa.select(sa.true()).select_from(given).where(sa.or_(given.c.name == queue, fits))
    return named.correlate_except(given).exists()


@cache
def depths() -> sa.Executable:
    """Queues with their waiting jobs, those that are due, and the age of the oldest due one.

    The jobs that wait for a limit are counted under its name, the others under NULL.  Reads all
    messages and waiting messages.
    """
    key = pg.unnest(pg.string_to_array(waiting_messages.c.limit_keys, NEWLINE))
    name = pg.split_part(key, SPACE, sa.literal_column("1", sa.Integer), type_=sa.Text)
    free = sa.select(
        message_queue.c.queue,
        sa.cast(sa.null(), sa.Text).label("limit_name"),
        message_queue.c.run_at,
    )
    blocked = sa.select(
        waiting_messages.c.queue, name.label("limit_name"), waiting_messages.c.run_at
    )
    waiting = sa.union_all(free, blocked).subquery("waiting")
    names = (waiting.c.queue, waiting.c.limit_name)
    is_due = waiting.c.run_at <= pg.statement_timestamp()
    oldest = pg.min(waiting.c.run_at).filter(is_due)
    return (
        sa.select(
            *names,
            count_rows(),
            count_rows().filter(is_due),
            span(pg.statement_timestamp() - oldest),
        )
        .group_by(*names)
        .order_by(*names)
    )


@cache
def waiting_for_others() -> sa.Executable:
    """How many jobs wait for other jobs, and how many for a signal.

    The first are blocked, or wait in ``ctx.gather`` as for a signal.  Reads all rows of ``blocked``
    and all open waits, and of ``jobs`` those that wait for a signal.
    """
    blocked_jobs = sa.select(count_rows()).where(blocked.c.node_id > ZERO).scalar_subquery()
    is_gather = job_steps.c.signal == sa.literal_column(f"'{BATCH_HAS_ENDED}'", sa.Text)
    # A job that was cancelled keeps its wait.
    waits = is_open_wait(), is_unfinished(job_steps.c.job_id)
    counts = (blocked_jobs + count_rows().filter(is_gather), count_rows().filter(~is_gather))
    return sa.select(*counts).select_from(job_steps).where(*waits)


@cache
def open_batches() -> sa.Executable:
    """The batches and workflows that have not ended, and the age of the oldest.

    Reads the rows of all open batches and groups.
    """
    age = span(pg.statement_timestamp() - pg.min(batches.c.created_at))
    is_open = (batches.c.ended_at.is_(None), batches.c.workflow_id.is_(None))
    kinds = sa.select(batches.c.is_workflow, count_rows(), age).where(*is_open)
    return kinds.group_by(batches.c.is_workflow)


@cache
def settings() -> sa.Executable:
    """Settings of this session, and their sources."""
    return sa.text(
        "SELECT name, setting, source FROM pg_catalog.pg_settings WHERE name = ANY(:names)"
    )


@cache
def settings_of_others() -> sa.Executable:
    """Settings that other roles get in this database: role, name, value; timeouts in ms."""
    return sa.text(
        """
        SELECT rolname, name,
               CASE WHEN value ~ '^[0-9]+$' OR name NOT LIKE '%timeout' THEN value
                    ELSE (extract(epoch FROM value::interval) * 1000.0)::bigint::text END
        FROM pg_catalog.pg_db_role_setting
        JOIN pg_catalog.pg_roles ON pg_roles.oid = setrole
        CROSS JOIN pg_catalog.unnest(setconfig) AS setting
        CROSS JOIN LATERAL (
            SELECT pg_catalog.split_part(setting, '=', 1) AS name,
                   pg_catalog.split_part(setting, '=', 2) AS value
        ) AS part
        WHERE setdatabase IN (0::oid, (SELECT oid FROM pg_catalog.pg_database
                                       WHERE datname = pg_catalog.current_database()))
          AND rolname <> current_user AND name = ANY(:names)
        ORDER BY rolname, setting
        """
    )


@cache
def old_transactions() -> sa.Executable:
    """Sessions and prepared transactions that hold back vacuum: who, state, seconds, remedy.

    Snapshots of other databases hold back only the shared catalogs here.
    """
    return sa.text(
        """
        SELECT pg_catalog.concat('session ', pid, ' of ', usename,
                                 CASE WHEN application_name <> ''
                                      THEN pg_catalog.concat(' (', application_name, ')') END),
               state, extract(epoch FROM pg_catalog.clock_timestamp() - xact_start),
               pg_catalog.concat('SELECT pg_terminate_backend(', pid, ')')
        FROM pg_catalog.pg_stat_activity
        WHERE datname = pg_catalog.current_database() AND backend_type = 'client backend'
          AND pid <> pg_catalog.pg_backend_pid()
          AND xact_start < pg_catalog.clock_timestamp() - CAST(:age AS interval)
          AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL
               OR backend_xid IS NOT NULL)
        UNION ALL
        SELECT pg_catalog.concat('prepared transaction ', pg_catalog.quote_literal(gid),
                                 ' of ', owner),
               'prepared',
               extract(epoch FROM pg_catalog.clock_timestamp() - prepared),
               CASE WHEN pg_catalog.starts_with(gid, 'citus_')
                    THEN 'SELECT recover_prepared_transactions() on the coordinator of Citus'
                    ELSE pg_catalog.concat('ROLLBACK PREPARED ', pg_catalog.quote_literal(gid)) END
        FROM pg_catalog.pg_prepared_xacts
        WHERE database = pg_catalog.current_database()
          AND prepared < pg_catalog.clock_timestamp() - CAST(:age AS interval)
        ORDER BY 3 DESC
        """
    )


@cache
def tables_without_autovacuum() -> sa.Executable:
    return sa.text(
        f"""
        SELECT relname
        FROM pg_catalog.pg_class
        CROSS JOIN pg_catalog.pg_options_to_table(reloptions)
        WHERE relnamespace = pg_catalog.to_regnamespace('"{SCHEMA}"')::oid
          AND option_name = 'autovacuum_enabled' AND NOT option_value::boolean
        ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    )


@cache
def tables() -> sa.Executable:
    """Our tables with their numbers of live and dead rows, and the last autovacuum."""
    return sa.text(
        f"""
        SELECT relname, n_live_tup, n_dead_tup,
               extract(epoch FROM last_autovacuum) AS vacuumed_at
        FROM pg_catalog.pg_stat_user_tables WHERE schemaname = '{SCHEMA}' ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    ).columns(
        sa.column("relname"),
        sa.column("n_live_tup"),
        sa.column("n_dead_tup"),
        sa.column("vacuumed_at", Moment()),
    )


@cache
def notification_queue_usage() -> sa.Executable:
    return sa.text("SELECT pg_catalog.pg_notification_queue_usage()")


@cache
def is_standby() -> sa.Executable:
    return sa.text("SELECT pg_catalog.pg_is_in_recovery()")


def _due_messages() -> sa.Subquery:
    """The messages that are due, and those of jobs that wait to be admitted."""
    parts = [
        sa.select(table.c.queue, table.c.task, table.c.run_at).where(
            table.c.run_at <= pg.statement_timestamp()
        )
        for table in (message_queue, waiting_messages)
    ]
    return sa.union_all(*parts).subquery("message")


def _waits(due: sa.Subquery) -> sa.ColumnElement[timedelta]:
    return span(pg.statement_timestamp() - pg.min(due.c.run_at))


class StatusCount(NamedTuple):
    queue: str
    status: JobStatus
    jobs: int


LIMITS = ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout")
"""Settings by which the server ends long statements and transactions."""


class WaitingJobs(NamedTuple):
    """Due jobs that no worker runs, by task or by queue."""

    name: str
    jobs: int
    since: timedelta


class UnreadableJobs(NamedTuple):
    """Jobs of a task that wait because no worker could read their arguments so far."""

    task: str
    jobs: int
    since: timedelta
    """How long ago a worker has met the first of them."""
    reason: str
    """The error message of the worker that has met the first of them."""


class QueueDepth(NamedTuple):
    """The jobs of a queue that wait for a worker, or for room in one limit."""

    queue: str
    limit: str | None
    """The name of the limit that blocks the jobs; a job under two limits counts under both."""
    waiting: int
    due: int
    oldest_due: timedelta | None
    """How long the oldest due job has been due; None if no job is due."""


class WaitingForOthers(NamedTuple):
    """How many jobs wait for what is neither a worker nor room in a limit."""

    jobs: int
    """Those that wait for other jobs, with the callbacks of batches."""
    signals: int


class OpenBatches(NamedTuple):
    """The batches that have not ended, or the workflows."""

    is_workflow: bool
    batches: int
    oldest: timedelta
    """How long ago the oldest was created."""


class Setting(NamedTuple):
    name: str
    value: str
    source: str
    """Where the value was set: a file, the database, the role, the session."""


class RoleSetting(NamedTuple):
    role: str
    name: str
    value: str


class OldTransaction(NamedTuple):
    """A transaction that keeps vacuum from removing newer dead rows, in every table."""

    who: str
    state: str
    seconds: float
    remedy: str


class TableHealth(NamedTuple):
    """The statistics of a table."""

    name: str
    live: int
    dead: int
    vacuumed_at: datetime | None


class Health:
    """The server behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def counts(self, *, succeeded: bool) -> list[StatusCount]:
        """The number of jobs by queue and status; ``succeeded``: of these too."""
        rows = self._executor.execute(count_jobs(succeeded=succeeded))
        counts = (StatusCount(queue, JobStatus(status), count) for queue, status, count in rows)
        return sorted(counts)

    def about_jobs(self) -> int:
        """The approximate number of jobs, from the server's statistics."""
        return max(0, int(self._executor.execute(estimate_jobs()).scalar_one()))

    def unknown_tasks(self, known: Iterable[str]) -> list[WaitingJobs]:
        """Due jobs whose tasks are not in ``known``."""
        parameters = {"known": sorted(known)}
        rows = self._executor.execute(due_jobs_of_unknown_tasks(), parameters)
        return [WaitingJobs(*row) for row in rows]

    def unreadable(self) -> list[UnreadableJobs]:
        """Jobs whose arguments no worker could read so far, by task."""
        return [UnreadableJobs(*row) for row in self._executor.execute(unreadable())]

    def unpruned_tasks(self, known: Iterable[str]) -> dict[str, int]:
        """Tasks not in ``known``, and the number of their ended jobs."""
        parameters = {"known": sorted(known)}
        rows = self._executor.execute(ended_jobs_of_unknown_tasks(), parameters)
        return {row[0]: row[1] for row in rows}

    def depths(self) -> list[QueueDepth]:
        """The queues in which jobs wait, and for each limit the jobs that it blocks."""
        return [QueueDepth(*row) for row in self._executor.execute(depths())]

    def waiting_for_others(self) -> WaitingForOthers:
        """How many jobs wait for other jobs, and how many for a signal."""
        return WaitingForOthers(*self._executor.execute(waiting_for_others()).one())

    def open_batches(self) -> list[OpenBatches]:
        """The batches and the workflows that have not ended; nothing of a kind without any."""
        return [OpenBatches(*row) for row in self._executor.execute(open_batches())]

    def unserved_queues(self) -> list[WaitingJobs]:
        """Due jobs in queues that no live worker serves."""
        rows = self._executor.execute(due_jobs_nobody_serves())
        return [WaitingJobs(*row) for row in rows]

    def settings(self, names: Iterable[str]) -> dict[str, Setting]:
        rows = self._executor.execute(settings(), {"names": list(names)})
        return {row[0]: Setting(*row) for row in rows}

    def settings_of_other_roles(self, names: Iterable[str]) -> list[RoleSetting]:
        rows = self._executor.execute(settings_of_others(), {"names": list(names)})
        return [RoleSetting(*row) for row in rows]

    def old_transactions(self, age: timedelta) -> list[OldTransaction]:
        """What keeps vacuum from removing rows that have been dead for ``age``."""
        rows = self._executor.execute(old_transactions(), {"age": age})
        return [OldTransaction(row[0], row[1], float(row[2]), row[3]) for row in rows]

    def tables_without_autovacuum(self) -> list[str]:
        return [row[0] for row in self._executor.execute(tables_without_autovacuum())]

    def tables(self) -> list[TableHealth]:
        rows = self._executor.execute(tables())
        return [TableHealth(*row) for row in rows]

    def notification_queue_usage(self) -> float:
        return float(self._executor.execute(notification_queue_usage()).scalar_one())

    def is_standby(self) -> bool:
        return bool(self._executor.execute(is_standby()).scalar())
