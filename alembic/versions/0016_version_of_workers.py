"""Adds the version of the application that a worker runs.

Code of version 15 works on: its workers have none.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0016"
down_revision = "pgqueue_0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("version", sa.Text), schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 16')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 15')  # noqa: S608  # checked
    op.drop_column("workers", "version", schema=SCHEMA)
