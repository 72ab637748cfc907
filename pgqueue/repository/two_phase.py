"""Two-phase commits of Citus, for transactions that write our tables."""

import sqlalchemy as sa

from pgqueue.models import SCHEMA

CITUS_SCHEMA = f"{SCHEMA[:57]}_citus"
"""Beside our schema: Citus must not know the tables there."""
TABLE = f'"{CITUS_SCHEMA}".two_phase'

TABLE_EXISTS = sa.text(f"SELECT pg_catalog.to_regclass('{TABLE}') IS NOT NULL")
WRITE_NO_ROW = sa.text(f"INSERT INTO {TABLE} SELECT 0 WHERE false")
"""Citus begins its COPY into the table, which always commits in two phases, and sends nothing to
another node because there is no row.  An UPDATE or DELETE would need a shard on this node."""
