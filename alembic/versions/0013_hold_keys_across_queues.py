"""Lets one job of all queues hold a unique key, by an index of the keys that begin as such.

The index is empty at first.  To build it reads all jobs once, and enqueues wait meanwhile.  Code of
version 12 works on: it makes no such keys.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0013"
down_revision = "pgqueue_0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        op.f("jobs_held_unique_key_across"),
        "jobs",
        ["held_unique_key"],
        unique=True,
        schema=SCHEMA,
        postgresql_where=sa.text("pg_catalog.starts_with(held_unique_key, 'pgqueue.across:')"),
    )
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 13')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 12')  # noqa: S608  # checked
    op.drop_index(op.f("jobs_held_unique_key_across"), table_name="jobs", schema=SCHEMA)
