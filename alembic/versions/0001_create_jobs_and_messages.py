"""Creates the tables of the queue, the view `job_overview` and the row that says version 1.

Downgrading removes all of it but the schema itself, which may hold the version table of the
stand-alone history.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0001"
down_revision = None
branch_labels = ("pgqueue",)
depends_on = None

# Names pass through op.f: the naming convention of a host's metadata must not change them.

MOMENT = sa.DateTime(timezone=True)
CLOCK = sa.text("clock_timestamp()")
ZERO = sa.text("0")
ROOM_FOR_UPDATES = "fillfactor = 45"
EMPTIED_OFTEN = "autovacuum_vacuum_scale_factor = 0.05"


def upgrade() -> None:
    create_schema()
    create_jobs()
    create_message_queue()
    create_leases()
    create_job_attempts()
    create_dead_letters()
    create_workers()
    create_queues()
    create_job_overview()
    create_schema_version()


def downgrade() -> None:
    op.execute(f'DROP VIEW "{SCHEMA}".job_overview')
    op.drop_table("schema_version", schema=SCHEMA)
    op.drop_table("queues", schema=SCHEMA)
    op.drop_table("workers", schema=SCHEMA)
    op.drop_table("dead_letters", schema=SCHEMA)
    op.drop_table("job_attempts", schema=SCHEMA)
    op.drop_table("leases", schema=SCHEMA)
    op.drop_table("message_queue", schema=SCHEMA)
    op.drop_table("jobs", schema=SCHEMA)


def create_schema() -> None:
    # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where there is one.
    op.execute(
        f"""
        DO $$ BEGIN
            IF to_regnamespace('"{SCHEMA}"') IS NULL THEN CREATE SCHEMA "{SCHEMA}"; END IF;
        END $$
        """
    )


def set_storage(table: str, parameters: str) -> None:
    # As a statement of its own: create_table takes postgresql_with from SQLAlchemy 2.1 on.
    op.execute(f'ALTER TABLE "{SCHEMA}".{table} SET ({parameters})')


def create_jobs() -> None:
    op.create_table(
        "jobs",
        *columns_of_jobs(),
        sa.PrimaryKeyConstraint("id", name=op.f("jobs_pkey")),
        *checks_of_jobs(),
        schema=SCHEMA,
    )
    set_storage("jobs", ROOM_FOR_UPDATES)
    op.create_index(
        op.f("jobs_held_unique_key"),
        "jobs",
        ["queue", "held_unique_key"],
        unique=True,
        schema=SCHEMA,
        postgresql_where=sa.text("held_unique_key IS NOT NULL"),
    )


def columns_of_jobs() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("queue", sa.Text, server_default="default", nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("args", JSONB, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("priority", sa.SmallInteger, server_default=sa.text("5"), nullable=False),
        sa.Column("run_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.Column("max_attempts", sa.SmallInteger, server_default=sa.text("10"), nullable=False),
        sa.Column("attempts", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("snoozes", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("outcome", sa.Text),
        sa.Column("result", JSONB),
        sa.Column("last_error", sa.Text),
        sa.Column("unique_key", sa.Text),
        sa.Column("held_unique_key", sa.Text),
        sa.Column("tags", JSONB),
        sa.Column("meta", JSONB),
        sa.Column("created_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT),
        sa.Column("cancel_requested_at", MOMENT),
    )


def checks_of_jobs() -> tuple[sa.CheckConstraint, ...]:
    return (
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("jobs_priority")),
        sa.CheckConstraint(
            "run_at BETWEEN '2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'",
            name=op.f("jobs_run_at"),
        ),
        sa.CheckConstraint("max_attempts BETWEEN 1 AND 30000", name=op.f("jobs_max_attempts")),
        sa.CheckConstraint(
            "outcome IN ('succeeded', 'failed', 'cancelled')", name=op.f("jobs_outcome")
        ),
        sa.CheckConstraint(
            "(outcome IS NULL) = (finished_at IS NULL)", name=op.f("jobs_finished_at")
        ),
    )


def create_message_queue() -> None:
    op.create_table(
        "message_queue",
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("run_at", MOMENT, nullable=False),
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("target_id", sa.BigInteger, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("attempt", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("crashes", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("alone", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.PrimaryKeyConstraint(
            "queue", "priority", "run_at", "id", name=op.f("message_queue_pkey")
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("message_queue_priority")),
        sa.CheckConstraint(
            "run_at BETWEEN '2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'",
            name=op.f("message_queue_run_at"),
        ),
        sa.CheckConstraint("attempt BETWEEN 0 AND 31000", name=op.f("message_queue_attempt")),
        sa.CheckConstraint("crashes BETWEEN 0 AND 31000", name=op.f("message_queue_crashes")),
        schema=SCHEMA,
    )
    set_storage("message_queue", EMPTIED_OFTEN)


def create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("target_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("message_id", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.SmallInteger, nullable=False),
        sa.Column("crashes", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("worker_id", sa.Uuid, nullable=False),
        sa.Column("held", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.Column("started_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.PrimaryKeyConstraint("target_id", name=op.f("leases_pkey")),
        sa.CheckConstraint("attempt BETWEEN 1 AND 32000", name=op.f("leases_attempt")),
        sa.CheckConstraint("crashes BETWEEN 0 AND 32000", name=op.f("leases_crashes")),
        schema=SCHEMA,
    )
    set_storage("leases", EMPTIED_OFTEN)


def create_job_attempts() -> None:
    op.create_table(
        "job_attempts",
        sa.Column("job_id", sa.BigInteger, nullable=False),
        sa.Column("message_id", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.SmallInteger, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error_type", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("traceback", sa.Text),
        sa.Column("worker_id", sa.Uuid),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "message_id", "attempt", name=op.f("job_attempts_pkey")),
        schema=SCHEMA,
    )


def create_dead_letters() -> None:
    op.create_table(
        "dead_letters",
        sa.Column("job_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("finished_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("dead_letters_pkey")),
        sa.CheckConstraint("outcome IN ('failed', 'cancelled')", name=op.f("dead_letters_outcome")),
        schema=SCHEMA,
    )
    op.create_index(
        op.f("dead_letters_by_outcome"), "dead_letters", ["outcome", "job_id"], schema=SCHEMA
    )


def create_workers() -> None:
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("backend_pid", sa.Integer, nullable=False),
        sa.Column("queues", JSONB, nullable=False),
        sa.Column("slots", sa.SmallInteger, nullable=False),
        sa.Column("started_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.Column("heartbeat_at", MOMENT, server_default=CLOCK, nullable=False),
        sa.Column("dead_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name=op.f("workers_pkey")),
        schema=SCHEMA,
    )
    set_storage("workers", ROOM_FOR_UPDATES)


def create_queues() -> None:
    op.create_table(
        "queues",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("paused_at", MOMENT),
        sa.PrimaryKeyConstraint("name", name=op.f("queues_pkey")),
        schema=SCHEMA,
    )


def create_job_overview() -> None:
    # Without args and result, which may be secret: the view can be granted where jobs cannot.
    # A lease wins over a message: after a crash in transaction mode a job has both.
    op.execute(
        f"""
        CREATE VIEW "{SCHEMA}".job_overview AS
        SELECT jobs.id, jobs.queue, jobs.task, jobs.priority, jobs.run_at,
               CASE WHEN jobs.outcome IS NOT NULL THEN jobs.outcome
                    WHEN leases.target_id IS NOT NULL THEN 'running'
                    WHEN EXISTS (SELECT FROM "{SCHEMA}".message_queue AS messages
                                 WHERE messages.queue = jobs.queue
                                   AND messages.priority = jobs.priority
                                   AND messages.run_at = jobs.run_at
                                   AND messages.target_id = jobs.id) THEN 'pending'
                    ELSE 'blocked' END AS status,
               jobs.outcome, jobs.attempts, jobs.max_attempts, jobs.snoozes, jobs.last_error,
               jobs.unique_key, jobs.tags, jobs.meta,
               jobs.created_at, jobs.started_at, jobs.finished_at, jobs.cancel_requested_at,
               leases.worker_id, leases.started_at AS lease_started_at
        FROM "{SCHEMA}".jobs
        LEFT JOIN "{SCHEMA}".leases ON leases.target_id = jobs.id AND jobs.outcome IS NULL
        """  # noqa: S608  # the schema name is checked where it is read
    )


def create_schema_version() -> None:
    schema_version = op.create_table(
        "schema_version",
        sa.Column("only_row", sa.Boolean, server_default=sa.true(), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("oldest_code", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("only_row", name=op.f("schema_version_pkey")),
        sa.CheckConstraint("only_row", name=op.f("schema_version_only_row")),
        schema=SCHEMA,
    )
    op.bulk_insert(schema_version, [{"version": 1, "oldest_code": 1}])
