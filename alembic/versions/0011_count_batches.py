"""Lets a batch end as cancelled, with a callback of its own, and keeps its progress in its row.

Code of version 10 works on: it ends a batch with cancelled jobs as succeeded, as before, and does
not count those that are open.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0011"
down_revision = "pgqueue_0010"
branch_labels = None
depends_on = None

FIRST, LAST = "'2000-01-01 00:00:00+00'", "'9999-12-31 00:00:00+00'"


def constrain(*, times: tuple[str, ...], outcomes: str) -> None:
    conditions = {
        "batches_times": " AND ".join(f"{name} BETWEEN {FIRST} AND {LAST}" for name in times),
        "batches_outcome": f"outcome IN ({outcomes})",
    }
    for name, condition in conditions.items():
        op.drop_constraint(op.f(name), "batches", schema=SCHEMA)
        op.create_check_constraint(op.f(name), "batches", condition, schema=SCHEMA)


def upgrade() -> None:
    for column in (
        sa.Column("on_cancelled", JSONB(none_as_null=True)),
        sa.Column("counted", JSONB(none_as_null=True)),
        sa.Column("count_at", sa.DateTime(timezone=True)),
    ):
        op.add_column("batches", column, schema=SCHEMA)
    constrain(
        times=("created_at", "ended_at", "count_at"),
        outcomes="'succeeded', 'failed', 'cancelled'",
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 11')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 10')  # noqa: S608  # checked
    op.execute(f"UPDATE \"{SCHEMA}\".batches SET outcome = 'succeeded' WHERE outcome = 'cancelled'")  # noqa: S608  # checked
    constrain(times=("created_at", "ended_at"), outcomes="'succeeded', 'failed'")
    for name in ("count_at", "counted", "on_cancelled"):
        op.drop_column("batches", name, schema=SCHEMA)
