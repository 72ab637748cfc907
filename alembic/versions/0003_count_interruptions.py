"""Adds what the second day needs: interruptions, progress, and jobs that wait for newer code.

`jobs` gets `interruptions` and `progress`, and the view `job_overview` shows both.  The table
`unreadable_jobs` is new.  Code of version 2 works on: it leaves the new columns at their defaults.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0003"
down_revision = "pgqueue_0002"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)

# Reads at most ten messages of a job's moment, of which there may be a million.  Only damage leaves
# an unfinished job without a message, so a job that is not among the ten is taken to be pending.
OVERVIEW = f"""
    CREATE VIEW "{SCHEMA}".job_overview AS
    SELECT jobs.id, jobs.queue, jobs.task, jobs.priority, jobs.run_at,
           CASE WHEN jobs.outcome IS NOT NULL THEN jobs.outcome
                WHEN leases.target_id IS NOT NULL THEN 'running'
                WHEN (
                    SELECT bool_or(ten.target_id = jobs.id) OR count(*) = 10
                    FROM (
                        SELECT messages.target_id FROM "{SCHEMA}".message_queue AS messages
                        WHERE messages.queue = jobs.queue
                          AND messages.priority = jobs.priority
                          AND messages.run_at = jobs.run_at
                        ORDER BY messages.id
                        LIMIT 10
                    ) AS ten
                ) THEN 'pending'
                ELSE 'blocked' END AS status,
           jobs.outcome, jobs.attempts, jobs.max_attempts, jobs.snoozes, jobs.interruptions,
           jobs.last_error, jobs.unique_key, jobs.tags, jobs.meta, jobs.progress,
           jobs.created_at, jobs.started_at, jobs.finished_at, jobs.cancel_requested_at,
           leases.worker_id, leases.started_at AS lease_started_at
    FROM "{SCHEMA}".jobs
    LEFT JOIN "{SCHEMA}".leases ON leases.target_id = jobs.id AND jobs.outcome IS NULL
    """  # noqa: S608  # the schema name is checked where it is read

OVERVIEW_BEFORE = f"""
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


def upgrade() -> None:
    op.execute(f'DROP VIEW "{SCHEMA}".job_overview')
    interruptions = sa.Column(
        "interruptions", sa.SmallInteger, server_default=sa.text("0"), nullable=False
    )
    op.add_column("jobs", interruptions, schema=SCHEMA)
    op.add_column("jobs", sa.Column("progress", JSONB), schema=SCHEMA)
    op.execute(OVERVIEW)
    op.create_table(
        "unreadable_jobs",
        sa.Column("job_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("since", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("unreadable_jobs_pkey")),
        schema=SCHEMA,
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 3')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 2')  # noqa: S608  # checked
    op.drop_table("unreadable_jobs", schema=SCHEMA)
    op.execute(f'DROP VIEW "{SCHEMA}".job_overview')
    op.drop_column("jobs", "progress", schema=SCHEMA)
    op.drop_column("jobs", "interruptions", schema=SCHEMA)
    op.execute(OVERVIEW_BEFORE)
