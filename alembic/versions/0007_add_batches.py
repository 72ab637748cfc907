"""Adds batches: sets of jobs whose end enqueues one more job.

The tables `batches` and `batch_jobs` are new.  Nothing that exists changes: code of version 6 works
on, and ends no batch.  Its pruning may delete failed jobs of an open batch.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0007"
down_revision = "pgqueue_0006"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("meta", JSONB),
        sa.Column("on_success", JSONB),
        sa.Column("on_failure", JSONB),
        sa.Column(
            "created_at", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("waits_for", sa.BigInteger),
        sa.Column("outcome", sa.Text),
        sa.Column("total", sa.BigInteger),
        sa.Column("failed", sa.BigInteger),
        sa.Column("cancelled", sa.BigInteger),
        sa.Column("callback_id", sa.BigInteger),
        sa.Column("ended_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name=op.f("batches_pkey")),
        sa.CheckConstraint("outcome IN ('succeeded', 'failed')", name=op.f("batches_outcome")),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name=op.f("batches_ended_at")),
        schema=SCHEMA,
    )
    op.create_index(
        op.f("batches_open"),
        "batches",
        ["id"],
        schema=SCHEMA,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "batch_jobs",
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        sa.Column("job_id", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "job_id", name=op.f("batch_jobs_pkey")),
        schema=SCHEMA,
    )
    op.create_index(op.f("batch_jobs_job_id"), "batch_jobs", ["job_id"], schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 7')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 6')  # noqa: S608  # checked
    op.drop_table("batch_jobs", schema=SCHEMA)
    op.drop_table("batches", schema=SCHEMA)
