"""References: foreign keys of the application that refuse the deletion of our rows."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import sqlalchemy as sa

from pgqueue.models import SCHEMA
from pgqueue.repository.tables import Executor


class Reference(NamedTuple):
    """A column of the application whose rows keep the rows to which they refer."""

    schema: str
    table: str
    column: str
    referred: str = "jobs"
    """The table to which they refer."""


@cache
def find_references() -> sa.Executable:
    """The foreign keys to jobs and batches that refuse a delete, as far as this role may read them
    and sees all of their rows.

    Pruning skips the rows to which such rows refer: each refusal would be an error in the log of
    the server.
    """
    return sa.text(
        f"""
        SELECT nspname, pg_class.relname, attname, referred.relname
        FROM pg_catalog.pg_constraint
        JOIN pg_catalog.pg_class ON pg_class.oid = conrelid
        JOIN pg_catalog.pg_class AS referred ON referred.oid = confrelid
        JOIN pg_catalog.pg_namespace ON pg_namespace.oid = pg_class.relnamespace
        JOIN pg_catalog.pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
        WHERE contype = 'f' AND confdeltype IN ('a', 'r') AND conparentid = 0::oid
          AND confrelid IN (
            pg_catalog.to_regclass('"{SCHEMA}".jobs')::oid,
            pg_catalog.to_regclass('"{SCHEMA}".batches')::oid
          )
          AND NOT pg_catalog.row_security_active(conrelid)
          AND pg_catalog.has_schema_privilege(pg_class.relnamespace, 'USAGE')
          AND pg_catalog.has_column_privilege(conrelid, attnum, 'SELECT')
        ORDER BY 1, 2, 3
        """  # noqa: S608  # the schema name is checked where it is read
    )


def read_references(executor: Executor) -> tuple[Reference, ...]:
    return tuple(Reference(*row) for row in executor.execute(find_references()))


def is_free(references: Iterable[Reference], table: sa.Table) -> list[sa.ColumnElement[bool]]:
    """That no row of the application refers to a row of jobs or batches."""
    conditions = []
    for reference in references:
        if reference.referred == table.name:
            rows = sa.table(reference.table, sa.column(reference.column), schema=reference.schema)
            conditions.append(~sa.exists().where(rows.c[reference.column] == table.c.id))
    return conditions
