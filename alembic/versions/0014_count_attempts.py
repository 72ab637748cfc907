"""Adds statistics of attempts and errors, and the error by which a job has failed.

The tables `task_minutes`, `error_groups` and `deploys` are new; `dead_letters` gets `fingerprint`,
and `workers` gets `attempts_ended`.  Code of the version before works on: it writes no statistics.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0014"
down_revision = "pgqueue_0013"
branch_labels = None
depends_on = None

VERSION, BEFORE = 14, 13
MOMENT = sa.DateTime(timezone=True)
ROOM_FOR_UPDATES = "fillfactor = 70"
"""Each worker adds to the rows of a minute six times."""


def in_range(*columns: str) -> str:
    first, last = "'2000-01-01 00:00:00+00'", "'9999-12-31 00:00:00+00'"
    return " AND ".join(f"{column} BETWEEN {first} AND {last}" for column in columns)


def number(name: str, type: type[sa.Integer] = sa.Integer) -> sa.Column[int]:
    return sa.Column(name, type, server_default=sa.text("0"), nullable=False)


def durations(name: str) -> sa.Column[list[int]]:
    return sa.Column(name, ARRAY(sa.Integer), server_default=sa.text("'{}'"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "task_minutes",
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        *map(number, ("succeeded", "failed", "retried", "cancelled", "other")),
        *map(durations, ("ran", "waited")),
        sa.PrimaryKeyConstraint("at", "task", name=op.f("task_minutes_pkey")),
        sa.CheckConstraint(in_range("at"), name=op.f("task_minutes_times")),
        schema=SCHEMA,
    )
    op.execute(f'ALTER TABLE "{SCHEMA}".task_minutes SET ({ROOM_FOR_UPDATES})')
    op.create_table(
        "error_groups",
        sa.Column("fingerprint", sa.BigInteger, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("error_type", sa.Text, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        number("attempts", sa.BigInteger),
        sa.Column("first_at", MOMENT, nullable=False),
        sa.Column("last_at", MOMENT, nullable=False),
        sa.Column("first_version", sa.Text, server_default=sa.text("''"), nullable=False),
        sa.Column("job_id", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", "task", name=op.f("error_groups_pkey")),
        sa.CheckConstraint(in_range("first_at", "last_at"), name=op.f("error_groups_times")),
        schema=SCHEMA,
    )
    op.create_table(
        "deploys",
        sa.Column("application", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("first_at", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("application", "version", name=op.f("deploys_pkey")),
        sa.CheckConstraint(in_range("first_at"), name=op.f("deploys_times")),
        schema=SCHEMA,
    )
    op.add_column("workers", number("attempts_ended", sa.BigInteger), schema=SCHEMA)
    op.add_column("dead_letters", sa.Column("fingerprint", sa.BigInteger), schema=SCHEMA)
    op.create_index(
        op.f("dead_letters_by_error"),
        "dead_letters",
        ["fingerprint", "job_id"],
        schema=SCHEMA,
        postgresql_where=sa.text("fingerprint IS NOT NULL"),
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = {VERSION}')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = {BEFORE}')  # noqa: S608  # checked
    op.drop_column("dead_letters", "fingerprint", schema=SCHEMA)
    op.drop_column("workers", "attempts_ended", schema=SCHEMA)
    for table in ("deploys", "error_groups", "task_minutes"):
        op.drop_table(table, schema=SCHEMA)
