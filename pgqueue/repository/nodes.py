"""Nodes: the number of a database among several, which is in the ids of its jobs.

The ids of a node begin at ``number << 44``.  The catalog has the number, as the START of the
sequence behind the ids: every role may read it, and no table is needed.
"""

from functools import cache

import sqlalchemy as sa
from sqlalchemy.orm import Session

from pgqueue.errors import JobNotFound
from pgqueue.models import SCHEMA

BITS = 44
"""Of an id, those below the number of its node: room for 11 years of 50,000 ids a second."""
HIGHEST_NUMBER = 511
"""All ids are smaller than 2**53, and exact in JavaScript."""


@cache
def number_of_node() -> sa.Executable:
    """0 for a database that has no number; no row if it has no tables."""
    return sa.text(
        f"""
        SELECT seqstart >> {BITS} FROM pg_catalog.pg_sequence
        WHERE seqrelid = pg_catalog.to_regclass('"{SCHEMA}".jobs_id_seq')::oid
        """  # noqa: S608  # the schema name is checked where it is read
    )


def read_number(executor: Session | sa.Connection) -> int | None:
    """The number of the database behind a Session or Connection; None if it has no tables."""
    number: int | None = executor.execute(number_of_node()).scalar()
    return number


def job_not_found(executor: Session | sa.Connection, job_id: int) -> JobNotFound:
    """The error for an id that no job of this database has; it says of which node the id is."""
    here, of_job = read_number(executor) or 0, job_id >> BITS
    if of_job != here and 0 <= of_job <= HIGHEST_NUMBER:
        return JobNotFound(
            f"job {job_id} is not in this database, which is node {here}: its id is one of node "
            f"{of_job}; repeat the call with a session on that node"
        )
    return JobNotFound(
        f"job {job_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.jobs"
    )
