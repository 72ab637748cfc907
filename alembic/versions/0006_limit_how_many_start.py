"""Adds rates: how many jobs may start in a period.

`limits` gets `period` and `burst`.  The table `limit_buckets` is new.  Code of version 5 works on:
it leaves the new columns NULL, and takes a rate for a limit of jobs at once.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0006"
down_revision = "pgqueue_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("limits", sa.Column("period", sa.Interval), schema=SCHEMA)
    op.add_column("limits", sa.Column("burst", sa.Integer), schema=SCHEMA)
    op.create_table(
        "limit_buckets",
        sa.Column("limit_key", sa.Text, nullable=False),
        sa.Column("full_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("limit_key", name=op.f("limit_buckets_pkey")),
        schema=SCHEMA,
    )
    op.create_index(op.f("limit_buckets_full_at"), "limit_buckets", ["full_at"], schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 6')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 5')  # noqa: S608  # checked
    op.drop_table("limit_buckets", schema=SCHEMA)
    op.drop_column("limits", "burst", schema=SCHEMA)
    op.drop_column("limits", "period", schema=SCHEMA)
