"""Runs the revisions of pgqueue in a history of their own, kept in the schema of the tables."""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import context

from pgqueue.errors import NotBound
from pgqueue.models import SCHEMA, Base
from pgqueue.repository.tables import SEARCH_PATH
from pgqueue.schema import citus


def run_offline() -> None:
    context.configure(dialect_name="postgresql", literal_binds=True, **settings())
    run_migrations()


def run_online() -> None:
    with given_or_new_connection() as connection:
        context.configure(connection=connection, **settings())
        run_migrations()


def settings() -> dict[str, Any]:
    return {
        "target_metadata": Base.metadata,
        "version_table": "alembic_version",
        "version_table_schema": SCHEMA,
        "include_schemas": True,
        "include_name": is_in_our_schema,
        "compare_type": True,
        "compare_server_default": True,
    }


def is_in_our_schema(name: str | None, type_: str, parents: MutableMapping[Any, Any]) -> bool:
    return name == SCHEMA if type_ == "schema" else True


def run_migrations() -> None:
    with context.begin_transaction():
        # What the tables and views are made of is looked up now, once and for all.
        context.execute(f"SET LOCAL search_path = {SEARCH_PATH}")
        for name in citus.SETTINGS:
            context.execute(f"SET LOCAL {name} = off")
        # Here, because the version table needs the schema before the first revision runs.
        # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where there is one.
        context.execute(
            f"""
            DO $$ BEGIN
                IF pg_catalog.to_regnamespace('"{SCHEMA}"') IS NULL THEN
                    CREATE SCHEMA "{SCHEMA}";
                END IF;
            END $$
            """
        )
        context.run_migrations()


@contextmanager
def given_or_new_connection() -> Iterator[sa.Connection]:
    given = context.config.attributes.get("connection")
    if given is not None:
        yield given
        return
    engine = sa.create_engine(database_url(), poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def database_url() -> str:
    url = os.environ.get("PGQUEUE_DATABASE_URL") or context.config.get_main_option("sqlalchemy.url")
    if not url:
        raise NotBound("No database to migrate: set PGQUEUE_DATABASE_URL.")
    return url


if context.is_offline_mode():
    run_offline()
else:
    run_online()
