"""Adds turns between the keys of a limit, and the tasks that are paused.

`limits` gets `is_fair`.  The table `paused_tasks` is new.  Code of version 7 works on: it admits
jobs of a fair limit in the order of their times, and runs paused tasks.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0008"
down_revision = "pgqueue_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    is_fair = sa.Column("is_fair", sa.Boolean, server_default=sa.false(), nullable=False)
    op.add_column("limits", is_fair, schema=SCHEMA)
    op.create_table(
        "paused_tasks",
        sa.Column("task", sa.Text, nullable=False),
        sa.Column(
            "paused_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("task", name=op.f("paused_tasks_pkey")),
        schema=SCHEMA,
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 8')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 7')  # noqa: S608  # checked
    op.drop_table("paused_tasks", schema=SCHEMA)
    op.drop_column("limits", "is_fair", schema=SCHEMA)
