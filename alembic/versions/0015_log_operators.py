"""Adds the log of operators, the depths of queues, and what the pages of failures need.

The tables `operator_actions` and `queue_minutes` are new; `error_groups` gets `muted_until`, and
`dead_letters` an index by task.  Code of the version before works on: it writes none of them.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0015"
down_revision = "pgqueue_0014"
branch_labels = None
depends_on = None

VERSION, BEFORE = 15, 14
MOMENT = sa.DateTime(timezone=True)
ROOM_FOR_UPDATES = "fillfactor = 70"
"""Workers write to the rows of a minute six times and more."""


def in_range(*columns: str) -> str:
    first, last = "'2000-01-01 00:00:00+00'", "'9999-12-31 00:00:00+00'"
    return " AND ".join(f"{column} BETWEEN {first} AND {last}" for column in columns)


def number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, server_default=sa.text("0"), nullable=False)


def document(name: str) -> sa.Column[dict[str, object]]:
    return sa.Column(name, JSONB, server_default=sa.text("'{}'"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "operator_actions",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("at", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        *map(document, ("target", "options")),
        sa.Column("reason", sa.Text, server_default=sa.text("''"), nullable=False),
        *map(number, ("jobs", "skipped")),
        sa.Column(
            "first_ids", ARRAY(sa.BigInteger), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("before", JSONB),
        sa.Column("after", JSONB),
        sa.Column("last_id", sa.BigInteger),
        sa.Column("cursor", sa.BigInteger),
        sa.Column("finished_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name=op.f("operator_actions_pkey")),
        sa.CheckConstraint(in_range("at", "finished_at"), name=op.f("operator_actions_times")),
        schema=SCHEMA,
    )
    op.create_index(
        op.f("operator_actions_unfinished"),
        "operator_actions",
        ["id"],
        schema=SCHEMA,
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "queue_minutes",
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("counted_at", MOMENT),
        *(sa.Column(name, sa.Integer) for name in ("waiting", "due", "blocked", "running")),
        sa.Column("oldest_due_s", sa.Integer),
        number("started"),
        sa.PrimaryKeyConstraint("at", "queue", name=op.f("queue_minutes_pkey")),
        sa.CheckConstraint(in_range("at", "counted_at"), name=op.f("queue_minutes_times")),
        schema=SCHEMA,
    )
    op.execute(f'ALTER TABLE "{SCHEMA}".queue_minutes SET ({ROOM_FOR_UPDATES})')
    op.add_column("error_groups", sa.Column("muted_until", MOMENT), schema=SCHEMA)
    op.create_check_constraint(
        op.f("error_groups_muted"), "error_groups", in_range("muted_until"), schema=SCHEMA
    )
    op.create_index(op.f("dead_letters_by_task"), "dead_letters", ["task", "job_id"], schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = {VERSION}')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = {BEFORE}')  # noqa: S608  # checked
    op.drop_index(op.f("dead_letters_by_task"), "dead_letters", schema=SCHEMA)
    op.drop_column("error_groups", "muted_until", schema=SCHEMA)  # and its constraint
    for table in ("queue_minutes", "operator_actions"):
        op.drop_table(table, schema=SCHEMA)
