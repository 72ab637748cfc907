"""Nodes: the number of a database among several, and the names of what Citus has on all.

The ids of a node begin at ``number << 44``.  The catalog has the number, as the START of the
sequence behind the ids: every role may read it, and no table is needed.
"""

from uuid import UUID

import sqlalchemy as sa

from pgqueue.errors import JobNotFound, RowsHidden
from pgqueue.models import SCHEMA
from pgqueue.repository.row_security import rows_hidden
from pgqueue.repository.tables import Executor, jobs, sees_all

BITS = 44
"""Of an id, those below the number of its node: room for 11 years of 50,000 ids a second."""
HIGHEST_NUMBER = 511
"""All ids are smaller than 2**53, and exact in JavaScript."""
CITUS_SCHEMA = f"{SCHEMA[:57]}_citus"
"""Beside our schema, of whose tables Citus must not know."""
TABLE = f'"{CITUS_SCHEMA}".two_phase'
"""By which transactions commit in two phases: ``pgqueue.database.two_phase``."""
TABLE_EXISTS = sa.text(f"SELECT pg_catalog.to_regclass('{TABLE}') IS NOT NULL")
WRITE_NO_ROW = sa.text(f"INSERT INTO {TABLE} SELECT 0 WHERE false")
"""Citus begins its COPY into the table, which always commits in two phases, and sends nothing to
another node because there is no row.  An UPDATE or DELETE would need a shard on this node."""
KEY_TYPES: dict[type, str] = {int: "bigint", str: "text", UUID: "uuid"}
"""The types of keys of nodes, and those of PostgreSQL by which Citus hashes them."""
_NUMBER = sa.text(
    f"""
    SELECT seqstart >> {BITS} FROM pg_catalog.pg_sequence
    WHERE seqrelid = pg_catalog.to_regclass('"{SCHEMA}".jobs_id_seq')::oid
    """  # noqa: S608  # the schema name is checked where it is read
)


def read_number(executor: Executor) -> int | None:
    """The number of this database: 0 if it has none, None if it has no tables."""
    number: int | None = executor.execute(_NUMBER).scalar()
    return number


def job_not_found(executor: Executor, job_id: int) -> JobNotFound | RowsHidden:
    """The error for an id that no job of this database has; it says of which node the id is.

    RowsHidden if the job may exist, and this role may not see it.
    """
    if executor.scalar(sa.select(~sees_all(jobs))):
        return rows_hidden(executor)
    here, of_job = read_number(executor) or 0, job_id >> BITS
    if of_job != here and 0 <= of_job <= HIGHEST_NUMBER:
        return JobNotFound(
            f"job {job_id} is not in this database, which is node {here}: its id is one of node "
            f"{of_job}; repeat the call with a session on that node, or with its --url"
        )
    return JobNotFound(
        f"job {job_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.jobs"
    )
