"""add pgqueue

Revision ID: 0001
Revises:
Create Date: 2026-11-29 19:39:28.603191

"""

import pgqueue.schema

# revision identifiers, used by Alembic.
revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    pgqueue.schema.upgrade(to=1, base=0)


def downgrade():
    pgqueue.schema.downgrade(to=0, base=1)
