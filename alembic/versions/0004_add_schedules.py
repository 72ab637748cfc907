"""Creates the table `schedules`.

Nothing that exists changes: code of version 3 works on, and fires no schedule.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0004"
down_revision = "pgqueue_0003"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
TIMES = "'2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'"


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("args", JSONB, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("options", JSONB, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("cron", sa.Text),
        sa.Column("every", sa.Interval),
        sa.Column("timezone", sa.Text, server_default="UTC", nullable=False),
        sa.Column("catch_up", sa.SmallInteger, server_default=sa.text("1"), nullable=False),
        sa.Column("overlap", sa.Text, server_default="allow", nullable=False),
        sa.Column("declared_in", sa.Text),
        sa.Column("declaration", JSONB),
        sa.Column("next_at", MOMENT),
        sa.Column("last_tick_at", MOMENT),
        sa.Column("last_job_id", sa.BigInteger),
        sa.Column("paused_at", MOMENT),
        sa.Column(
            "created_at", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("schedules_pkey")),
        sa.CheckConstraint("(cron IS NULL) <> (every IS NULL)", name=op.f("schedules_rule")),
        sa.CheckConstraint(
            "every BETWEEN '1 second' AND '36525 days'", name=op.f("schedules_every")
        ),
        sa.CheckConstraint("catch_up BETWEEN 0 AND 1000", name=op.f("schedules_catch_up")),
        sa.CheckConstraint("overlap IN ('allow', 'skip', 'wait')", name=op.f("schedules_overlap")),
        sa.CheckConstraint(f"next_at BETWEEN {TIMES}", name=op.f("schedules_next_at")),
        sa.CheckConstraint(f"last_tick_at BETWEEN {TIMES}", name=op.f("schedules_last_tick_at")),
        sa.CheckConstraint("next_at > last_tick_at", name=op.f("schedules_tick")),
        schema=SCHEMA,
    )
    op.create_index(
        op.f("schedules_next_tick"),
        "schedules",
        ["next_at", "name"],
        schema=SCHEMA,
        postgresql_where=sa.text("paused_at IS NULL"),
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 4')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 3')  # noqa: S608  # checked
    op.drop_table("schedules", schema=SCHEMA)
