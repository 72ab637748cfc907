"""${message}."""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
from pgqueue.models.base import SCHEMA

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

# Names pass through op.f: the naming convention of a host's metadata must not change them.
# Write schema=SCHEMA where autogenerate writes its name.
# The last step sets `version`, and `oldest_code` where workers of the version before must stop.


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
