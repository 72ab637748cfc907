"""What may be wrong around the tables: the server's settings, other sessions, jobs nobody runs."""

from datetime import timedelta
from functools import cache

from sqlalchemy import (
    ColumnElement,
    Executable,
    Text,
    all_,
    bindparam,
    exists,
    func,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgqueue.models import SCHEMA
from pgqueue.statements.tables import message_queue, workers


@cache
def due_jobs_of_unknown_tasks() -> Executable:
    """Tasks that these are not, with their due messages.  Reads all messages."""
    unknown = message_queue.c.task != all_(bindparam("known", type_=ARRAY(Text)))
    return (
        select(message_queue.c.task, func.count(), _waits())
        .where(_is_due(), unknown)
        .group_by(message_queue.c.task)
        .order_by(func.count().desc(), message_queue.c.task)
    )


@cache
def due_jobs_nobody_serves() -> Executable:
    """Queues with due messages that no living worker looks at.  Reads all messages."""
    due = (
        select(message_queue.c.queue, func.count().label("jobs"), _waits().label("waits"))
        .where(_is_due())
        .group_by(message_queue.c.queue)
        .subquery("due")
    )
    served = exists().where(workers.c.dead_at.is_(None), workers.c.queues.has_key(due.c.queue))
    return select(due.c.queue, due.c.jobs, due.c.waits).where(~served).order_by(due.c.queue)


@cache
def settings() -> Executable:
    """Settings of this session, and what set them."""
    return text("SELECT name, setting, source FROM pg_settings WHERE name = ANY(:names)")


@cache
def settings_of_others() -> Executable:
    """Settings that other roles get in this database: role, name, value."""
    return text(
        """
        SELECT rolname, split_part(setting, '=', 1), split_part(setting, '=', 2)
        FROM pg_db_role_setting
        JOIN pg_roles ON pg_roles.oid = setrole
        CROSS JOIN unnest(setconfig) AS setting
        WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
          AND rolname <> current_user
          AND split_part(setting, '=', 1) = ANY(:names)
        ORDER BY rolname, setting
        """
    )


@cache
def old_transactions() -> Executable:
    """Sessions and prepared transactions that vacuum has to wait for: who, state, seconds, remedy.

    Snapshots of other databases hold back nothing here, but for the shared catalogs.
    """
    return text(
        """
        SELECT concat('session ', pid, ' of ', usename,
                      CASE WHEN application_name <> ''
                           THEN concat(' (', application_name, ')') END),
               state, extract(epoch FROM clock_timestamp() - xact_start),
               concat('SELECT pg_terminate_backend(', pid, ')')
        FROM pg_stat_activity
        WHERE datname = current_database() AND backend_type = 'client backend'
          AND pid <> pg_backend_pid()
          AND xact_start < clock_timestamp() - :age
          AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL
               OR backend_xid IS NOT NULL)
        UNION ALL
        SELECT concat('prepared transaction ', quote_literal(gid), ' of ', owner), 'prepared',
               extract(epoch FROM clock_timestamp() - prepared),
               concat('ROLLBACK PREPARED ', quote_literal(gid))
        FROM pg_prepared_xacts
        WHERE database = current_database() AND prepared < clock_timestamp() - :age
        ORDER BY 3 DESC
        """
    )


@cache
def tables_without_autovacuum() -> Executable:
    return text(
        f"""
        SELECT relname
        FROM pg_class
        CROSS JOIN pg_options_to_table(reloptions)
        WHERE relnamespace = to_regnamespace('"{SCHEMA}"')
          AND option_name = 'autovacuum_enabled' AND NOT option_value::boolean
        ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    )


@cache
def limits_of_others() -> Executable:
    """Timeouts, in milliseconds, that other roles get in this database: role, name, value."""
    return text(
        """
        SELECT rolname, name, CASE WHEN value ~ '^[0-9]+$' THEN value
                                   ELSE (extract(epoch FROM value::interval) * 1000)::bigint::text
                              END
        FROM pg_db_role_setting
        JOIN pg_roles ON pg_roles.oid = setrole
        CROSS JOIN unnest(setconfig) AS setting
        CROSS JOIN LATERAL (
            SELECT split_part(setting, '=', 1) AS name, split_part(setting, '=', 2) AS value
        ) AS part
        WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
          AND rolname <> current_user AND name = ANY(:names)
        ORDER BY rolname, name
        """
    )


@cache
def replication_slots() -> Executable:
    """Slots that may hold back this database: name, whether somebody reads, transactions held."""
    return text(
        """
        SELECT slot_name, active, nullif(greatest(age(xmin), age(catalog_xmin)), 0)
        FROM pg_replication_slots
        WHERE NOT temporary AND (database IS NULL OR database = current_database())
        ORDER BY slot_name
        """
    )


@cache
def tables() -> Executable:
    """Our tables with the rows that live, those that are dead, and the last autovacuum."""
    return text(
        """
        SELECT relname, n_live_tup, n_dead_tup, last_autovacuum
        FROM pg_stat_user_tables WHERE schemaname = :schema ORDER BY relname
        """
    )


@cache
def connection() -> Executable:
    """The server's address as this connection reaches it, and whether it is encrypted."""
    return text(
        """
        SELECT host(inet_server_addr()),
               coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false)
        """
    )


@cache
def notification_queue_usage() -> Executable:
    return text("SELECT pg_notification_queue_usage()")


@cache
def is_standby() -> Executable:
    return text("SELECT pg_is_in_recovery()")


def _is_due() -> ColumnElement[bool]:
    return message_queue.c.run_at <= func.statement_timestamp()


def _waits() -> ColumnElement[timedelta]:
    return func.statement_timestamp() - func.min(message_queue.c.run_at)
