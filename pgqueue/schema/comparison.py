"""Compares the tables of a database with those that this code expects."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, MetaData
from sqlalchemy.schema import CreateIndex, CreateTable

from pgqueue.models.base import SCHEMA, Base, Domain
from pgqueue.schema.roles import FUNCTIONS, RIGHTS

ALEMBIC = "alembic_version"
"""A table that is there only with a history of its own."""


def is_another_type(_: object, __: object, ___: object, found: Any, expected: Any) -> bool | None:
    """Compare domains by name: a domain in the search path is read without its schema.

    None lets Alembic compare.
    """
    if isinstance(expected, Domain):
        return bool(getattr(found, "name", None) != expected.name)
    return None


OPTIONS = {"compare_type": is_another_type, "compare_server_default": True}


def differences(connection: Connection) -> list[str]:
    """What the tables lack or have otherwise, as Alembic compares them with models; and which
    constraints, views and functions are missing, which Alembic does not compare.

    An index that this code does not know may be the application's, and is no difference.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    # With it on, SQLAlchemy does not recognize the types of columns, which the server quotes.
    connection.exec_driver_sql("SET LOCAL quote_all_identifiers = off")
    # SQLAlchemy 2.0 lists no schema whose name begins with "pg", but every table of the path.
    connection.exec_driver_sql(f"SET LOCAL search_path = {SCHEMA}")
    context = MigrationContext.configure(connection, opts=OPTIONS)
    found: list[Any] = compare_metadata(context, _without_schema())
    return [*_in_words(found, connection), *_missing(connection)]


def _missing(connection: Connection) -> Iterator[str]:
    constraints = connection.execute(
        sa.text(
            "SELECT relname, conname FROM pg_catalog.pg_class LEFT JOIN pg_catalog.pg_constraint "
            "ON conrelid = pg_class.oid WHERE relnamespace = "
            "pg_catalog.to_regnamespace(pg_catalog.quote_ident(:schema))::oid"
        ),
        {"schema": SCHEMA},
    )
    found: dict[str, set[str | None]] = {}
    for relation, name in constraints:
        found.setdefault(relation, set()).add(name)
    for table in Base.metadata.sorted_tables:
        for constraint in sorted(table.constraints, key=lambda one: str(one.name)):
            name = str(constraint.name or f"{table.name}_pkey")
            if table.name in found and name not in found[table.name]:
                # AddConstraint would take the constraint out of a later ``create_all``.
                ddl = connection.dialect.ddl_compiler(connection.dialect, CreateTable(table))
                words = " ".join(ddl.process(constraint).split())
                yield (
                    f"constraint {name} of {SCHEMA}.{table.name} is missing; as the owner of the "
                    f"tables run ALTER TABLE {table.fullname} ADD {words}"
                )
    tables = {table.name for table in Base.metadata.sorted_tables}
    for view in sorted(RIGHTS.keys() - tables - found.keys() - {ALEMBIC}):
        yield f"view {SCHEMA}.{view} is missing"
    of_schema = (
        "SELECT proname FROM pg_catalog.pg_proc WHERE pronamespace = to_regnamespace(:schema)"
    )
    functions = connection.scalars(sa.text(of_schema), {"schema": SCHEMA})
    for function in sorted(set(FUNCTIONS).difference(functions)):
        yield f"function {SCHEMA}.{function} is missing"


def _without_schema() -> MetaData:
    tables = MetaData(naming_convention=Base.metadata.naming_convention)
    for table in Base.metadata.sorted_tables:
        table.to_metadata(tables, schema=None)  # type: ignore[arg-type] # documented as none
    return tables


def _in_words(found: list[Any], connection: Connection) -> Iterator[str]:
    for each in found:
        match each:
            case ("remove_index", *_):
                pass
            case ("add_index", index):
                command = str(
                    CreateIndex(index).compile(
                        dialect=connection.dialect,
                        schema_translate_map={None: SCHEMA},
                        render_schema_translate=True,
                    )
                )
                yield (
                    f"index {index.name} of {SCHEMA}.{index.table.name} is missing; as the owner "
                    f"of the tables run {' '.join(command.split())}"
                )
            case ("add_table", table):
                yield f"table {SCHEMA}.{table.name} is missing"
            case ("add_column", _, table, column):
                yield f"column {column.name} of {SCHEMA}.{table} is missing"
            case ("remove_column", _, table, column):
                yield f"column {column.name} of {SCHEMA}.{table} is unknown"
            case [(kind, _, table, column, *_), *_]:
                yield f"column {column} of {SCHEMA}.{table} is another ({kind})"
            case (kind, thing, *_):
                yield f"{getattr(thing, 'name', thing)} is another ({kind})"
