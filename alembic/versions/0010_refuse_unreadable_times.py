"""Refuses times that Python cannot read, and limits with which no worker can calculate.

Rows with such times get the nearest time that can be read.  Limits with such a period or burst are
deleted; the next worker that starts writes them again.  The tables that every job writes have no
such constraint, which would cost each job: their times are read in a form that takes every value.
Code of version 9 works on: it writes no such values.
"""

from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0010"
down_revision = "pgqueue_0009"
branch_labels = None
depends_on = None

FIRST, LAST = "'2000-01-01 00:00:00+00'", "'9999-12-31 00:00:00+00'"
TIMES = {
    "workers": ("started_at", "heartbeat_at", "dead_at"),
    "unreadable_jobs": ("since",),
    "queues": ("paused_at",),
    "paused_tasks": ("paused_at",),
    "schedules": ("paused_at", "created_at"),
    "batches": ("created_at", "ended_at"),
    "limits": ("declared_at",),
    "limit_buckets": ("full_at",),
}
OF_LIMITS = {
    "limits_period": "period BETWEEN '1 millisecond' AND '366 days'",
    "limits_burst": "burst BETWEEN 1 AND 1000000",
    "limits_refill": "burst * period <= '36525 days'",
}


def in_range(column: str) -> str:
    return f"{column} BETWEEN {FIRST} AND {LAST}"


def upgrade() -> None:
    op.execute(
        f'DELETE FROM "{SCHEMA}".limits '  # noqa: S608  # checked
        f"WHERE NOT ({OF_LIMITS['limits_period']}) OR NOT ({OF_LIMITS['limits_burst']}) "
        f"OR extract(epoch FROM period) * burst > extract(epoch FROM interval '36525 days')"
    )
    op.execute(f'DELETE FROM "{SCHEMA}".limit_buckets WHERE NOT ({in_range("full_at")})')  # noqa: S608
    for table, columns in TIMES.items():
        nearest = ", ".join(
            f"{column} = CASE WHEN {in_range(column)} OR {column} IS NULL THEN {column} "
            f"ELSE GREATEST(LEAST({column}, {LAST}), {FIRST}) END"
            for column in columns
        )
        is_unreadable = " OR ".join(f"NOT ({in_range(column)})" for column in columns)
        op.execute(f'UPDATE "{SCHEMA}".{table} SET {nearest} WHERE {is_unreadable}')  # noqa: S608
    for table, columns in TIMES.items():
        op.create_check_constraint(
            op.f(f"{table}_times"),
            table,
            " AND ".join(map(in_range, columns)),
            schema=SCHEMA,
        )
    for name, condition in OF_LIMITS.items():
        op.create_check_constraint(op.f(name), "limits", condition, schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 10')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 9')  # noqa: S608  # checked
    for name in OF_LIMITS:
        op.drop_constraint(op.f(name), "limits", schema=SCHEMA)
    for table in TIMES:
        op.drop_constraint(op.f(f"{table}_times"), table, schema=SCHEMA)
