"""Problems around the tables: server settings, other sessions, jobs that no worker runs."""

from datetime import timedelta
from functools import cache

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Subquery,
    Text,
    all_,
    bindparam,
    column,
    exists,
    literal_column,
    select,
    text,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from pgqueue.models import SCHEMA
from pgqueue.statements.reading import Moment, span
from pgqueue.statements.tables import (
    count_rows,
    jobs,
    leases,
    message_queue,
    pg,
    unreadable_jobs,
    waiting_messages,
    workers,
)


@cache
def due_jobs_of_unknown_tasks() -> Executable:
    """Tasks other than these, with their due messages.  Reads all messages."""
    due = _due_messages()
    unknown = due.c.task != all_(bindparam("known", type_=ARRAY(Text)))
    return (
        select(due.c.task, count_rows(), _waits(due))
        .where(unknown)
        .group_by(due.c.task)
        .order_by(count_rows().desc(), due.c.task)
    )


@cache
def unreadable() -> Executable:
    """Tasks with jobs whose arguments no worker could read so far, and the error of the first one.

    A row that its job no longer needs stays until the job is deleted: one of a job that has ended,
    or that a worker runs now.
    """
    met = unreadable_jobs
    reasons = pg.array_agg(aggregate_order_by(met.c.reason, met.c.since), type_=ARRAY(Text))
    oldest = span(pg.statement_timestamp() - pg.min(met.c.since))
    return (
        select(met.c.task, count_rows(), oldest, reasons[literal_column("1", Integer)])
        .join_from(met, jobs, jobs.c.id == met.c.job_id)
        .where(jobs.c.outcome.is_(None), ~exists().where(leases.c.target_id == met.c.job_id))
        .group_by(met.c.task)
        .order_by(count_rows().desc(), met.c.task)
    )


@cache
def ended_jobs_of_unknown_tasks() -> Executable:
    """Tasks other than these, with their ended jobs.  Reads all jobs."""
    unknown = jobs.c.task != all_(bindparam("known", type_=ARRAY(Text)))
    return (
        select(jobs.c.task, count_rows())
        .where(jobs.c.outcome.is_not(None), unknown)
        .group_by(jobs.c.task)
        .order_by(count_rows().desc(), jobs.c.task)
    )


@cache
def due_jobs_nobody_serves() -> Executable:
    """Queues with due messages that no live worker serves.  Reads all messages."""
    messages = _due_messages()
    due = (
        select(messages.c.queue, count_rows().label("jobs"), _waits(messages).label("waits"))
        .group_by(messages.c.queue)
        .subquery("due")
    )
    served = exists().where(workers.c.dead_at.is_(None), workers.c.queues.has_key(due.c.queue))
    return select(due.c.queue, due.c.jobs, due.c.waits).where(~served).order_by(due.c.queue)


@cache
def depths() -> Executable:
    """Queues with their messages, those that are due, and the age of the oldest due message.

    Reads all messages.
    """
    is_due = message_queue.c.run_at <= pg.statement_timestamp()
    oldest = pg.min(message_queue.c.run_at).filter(is_due)
    return (
        select(
            message_queue.c.queue,
            count_rows(),
            count_rows().filter(is_due),
            span(pg.statement_timestamp() - oldest),
        )
        .group_by(message_queue.c.queue)
        .order_by(message_queue.c.queue)
    )


@cache
def settings() -> Executable:
    """Settings of this session, and their sources."""
    return text("SELECT name, setting, source FROM pg_catalog.pg_settings WHERE name = ANY(:names)")


@cache
def settings_of_others() -> Executable:
    """Settings that other roles get in this database: role, name, value; timeouts in ms."""
    return text(
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
def old_transactions() -> Executable:
    """Sessions and prepared transactions that hold back vacuum: who, state, seconds, remedy.

    Snapshots of other databases hold back only the shared catalogs here.
    """
    return text(
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
               pg_catalog.concat('ROLLBACK PREPARED ', pg_catalog.quote_literal(gid))
        FROM pg_catalog.pg_prepared_xacts
        WHERE database = pg_catalog.current_database()
          AND prepared < pg_catalog.clock_timestamp() - CAST(:age AS interval)
        ORDER BY 3 DESC
        """
    )


@cache
def tables_without_autovacuum() -> Executable:
    return text(
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
def tables() -> Executable:
    """Our tables with their numbers of live and dead rows, and the last autovacuum."""
    return text(
        f"""
        SELECT relname, n_live_tup, n_dead_tup,
               extract(epoch FROM last_autovacuum) AS vacuumed_at
        FROM pg_catalog.pg_stat_user_tables WHERE schemaname = '{SCHEMA}' ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    ).columns(
        column("relname"),
        column("n_live_tup"),
        column("n_dead_tup"),
        column("vacuumed_at", Moment()),
    )


@cache
def notification_queue_usage() -> Executable:
    return text("SELECT pg_catalog.pg_notification_queue_usage()")


@cache
def is_standby() -> Executable:
    return text("SELECT pg_catalog.pg_is_in_recovery()")


def _due_messages() -> Subquery:
    """The messages that are due, and those of jobs that wait to be admitted."""
    parts = [
        select(table.c.queue, table.c.task, table.c.run_at).where(
            table.c.run_at <= pg.statement_timestamp()
        )
        for table in (message_queue, waiting_messages)
    ]
    return union_all(*parts).subquery("message")


def _waits(due: Subquery) -> ColumnElement[timedelta]:
    return span(pg.statement_timestamp() - pg.min(due.c.run_at))
