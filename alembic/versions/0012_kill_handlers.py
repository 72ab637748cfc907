"""Lets a cancel ask for the child process of a handler to be killed.

Code of version 11 works on: its workers only ask the handler to stop.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0012"
down_revision = "pgqueue_0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    kill_requested_at = sa.Column("kill_requested_at", sa.DateTime(timezone=True))
    op.add_column("jobs", kill_requested_at, schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 12')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 11')  # noqa: S608  # checked
    op.drop_column("jobs", "kill_requested_at", schema=SCHEMA)
