"""Row security: which of our tables hide rows from a role, and the error for it.

A row that is hidden looks as if it did not exist.  pgqueue's own connections have ``row_security =
off``, so that the server refuses such a statement.  :func:`tables.sees_all` protects the statements
that delete or end something because a row is missing, wherever they run.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import sqlalchemy as sa

from pgqueue.errors import RowsHidden
from pgqueue.models.base import SCHEMA, Base
from pgqueue.repository.tables import Executor

OURS = ", ".join(f"'{table.name}'" for table in Base.metadata.sorted_tables)
"""The names of our tables.  An application may have others in our schema."""


@cache
def hidden_tables() -> sa.Executable:
    """Our tables that hide rows from the role of this transaction, and its name."""
    return sa.text(
        f"""
        SELECT relname, CURRENT_USER
        FROM pg_catalog.pg_class
        WHERE relnamespace = pg_catalog.to_regnamespace('"{SCHEMA}"')::oid
          AND relname IN ({OURS}) AND pg_catalog.row_security_active(pg_class.oid)
        ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    )


@cache
def filtered_roles() -> sa.Executable:
    """Our tables with row security, each with the roles that may read it and are subject to it."""
    return sa.text(
        f"""
        SELECT relname, ARRAY(
            SELECT rolname FROM pg_catalog.pg_roles
            WHERE NOT rolsuper AND NOT rolbypassrls AND NOT pg_catalog.starts_with(rolname, 'pg_')
              AND (relforcerowsecurity
                   OR NOT pg_catalog.pg_has_role(pg_roles.oid, relowner, 'USAGE'))
              AND pg_catalog.has_table_privilege(pg_roles.oid, pg_class.oid, 'SELECT')
            ORDER BY rolname
        )
        FROM pg_catalog.pg_class
        WHERE relnamespace = pg_catalog.to_regnamespace('"{SCHEMA}"')::oid
          AND relname IN ({OURS}) AND relrowsecurity
        ORDER BY relname
        """  # noqa: S608  # the schema name is checked where it is read
    )


class Filtered(NamedTuple):
    """A table of ours that has row security."""

    table: str
    roles: list[str]
    """The roles that may read it, and do not see all of its rows."""


def filtered_tables(executor: Executor) -> list[Filtered]:
    return [Filtered(*row) for row in executor.execute(filtered_roles())]


def refuse_hidden(executor: Executor) -> None:
    """Raise RowsHidden if a row that was not found may be hidden."""
    if executor.execute(hidden_tables()).first() is not None:
        raise rows_hidden(executor)


def rows_hidden(executor: Executor) -> RowsHidden:
    """The error for a transaction whose role does not see all of our rows."""
    found = executor.execute(hidden_tables()).all()
    role = found[0][1] if found else "of this transaction"
    return RowsHidden(
        f"Row security hides rows of {_named(row[0] for row in found)} from the role {role}. "
        "pgqueue has changed nothing, because a hidden job would look as if it were gone: "
        f"{remedy(role)}"
    )


def remedy(role: str) -> str:
    """What to do about row security, for an error or a finding."""
    return (
        f"as the owner of the tables run `ALTER TABLE {SCHEMA}.jobs DISABLE ROW LEVEL SECURITY`, "
        f"and the same for each other table that has it, or `ALTER ROLE {role} BYPASSRLS`; "
        "a policy is not enough"
    )


def _named(tables: Iterable[str]) -> str:
    return ", ".join(f"{SCHEMA}.{table}" for table in tables) or f"tables in {SCHEMA}"
