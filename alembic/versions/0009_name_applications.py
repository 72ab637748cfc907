"""Adds the application to which a schedule or a batch belongs.

`schedules` and `batches` get `application`, by default the empty name.  Code of version 8 works on:
it writes rows of the application without a name, and pauses schedules and prunes batches of all.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0009"
down_revision = "pgqueue_0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("schedules", "batches"):
        application = sa.Column(
            "application", sa.Text, server_default=sa.text("''"), nullable=False
        )
        op.add_column(table, application, schema=SCHEMA)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 9')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 8')  # noqa: S608  # checked
    for table in ("schedules", "batches"):
        op.drop_column(table, "application", schema=SCHEMA)
