"""One revision of a host: which of our steps it takes, and which it refuses."""

import io
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from catalog import facts, read_facts
from hosts import host_revision, offline_revision
from sqlalchemy import Connection, Engine, MetaData, text

from pgqueue.errors import SchemaError, SchemaTooNew
from pgqueue.schema import SCHEMA_VERSION, downgrade, include_name, upgrade, verify


def test_a_host_revision_gives_the_tables_of_the_stand_alone_history(
    empty_connection: Connection, database_url: str
) -> None:
    with host_revision(empty_connection):
        upgrade(to=SCHEMA_VERSION)

    verify(empty_connection)
    assert read_facts(empty_connection) == facts(database_url)


def test_a_step_the_database_already_has_is_skipped(empty_connection: Connection) -> None:
    with host_revision(empty_connection):
        upgrade(to=SCHEMA_VERSION)

        upgrade(to=SCHEMA_VERSION)

    verify(empty_connection)


def test_a_host_revision_takes_over_from_the_stand_alone_history(engine: Engine) -> None:
    with engine.begin() as connection, host_revision(connection):
        upgrade(to=SCHEMA_VERSION)

    with engine.connect() as connection:
        verify(connection)
        assert connection.execute(text("SELECT FROM pgqueue.alembic_version")).all() == []


def test_a_version_table_of_the_host_in_our_schema_is_left_alone(
    empty_connection: Connection,
) -> None:
    empty_connection.execute(text("CREATE SCHEMA pgqueue"))
    empty_connection.execute(text("CREATE TABLE pgqueue.alembic_version (version_num text)"))
    empty_connection.execute(text("INSERT INTO pgqueue.alembic_version VALUES ('4f5e')"))

    with host_revision(empty_connection):
        upgrade(to=SCHEMA_VERSION)

    assert empty_connection.scalar(text("SELECT * FROM pgqueue.alembic_version")) == "4f5e"


def test_down_and_up_again_in_one_host_gives_the_same(empty_connection: Connection) -> None:
    with host_revision(empty_connection):
        upgrade(to=SCHEMA_VERSION)
        before = read_facts(empty_connection)

        downgrade(to=0)
        between = read_facts(empty_connection)
        upgrade(to=SCHEMA_VERSION)

    assert between == set()
    assert read_facts(empty_connection) == before


def test_offline_steps_run_on_an_empty_database_and_give_the_same(
    empty_connection: Connection, database_url: str
) -> None:
    script = io.StringIO()
    with offline_revision(script):
        upgrade(to=SCHEMA_VERSION, base=0)

    empty_connection.exec_driver_sql(script.getvalue())

    verify(empty_connection)
    assert read_facts(empty_connection) == facts(database_url)


def test_offline_steps_go_down_from_the_newest_version(engine: Engine) -> None:
    script = io.StringIO()
    with offline_revision(script):
        downgrade(to=SCHEMA_VERSION - 1)
        downgrade(to=0, base=SCHEMA_VERSION - 1)

    with engine.begin() as connection:
        connection.exec_driver_sql(script.getvalue())
        assert read_facts(connection) == set()


def test_a_version_this_code_does_not_know_names_the_installed_one(
    empty_connection: Connection,
) -> None:
    installed = f"the installed sqlalchemy-pgqueue {metadata.version('sqlalchemy-pgqueue')}"

    with host_revision(empty_connection), pytest.raises(SchemaError, match=re.escape(installed)):
        upgrade(to=SCHEMA_VERSION + 1)


@pytest.mark.parametrize("call", [lambda: upgrade(to=0), lambda: downgrade(to=-1)])
def test_a_version_below_the_lowest_is_refused(
    empty_connection: Connection, call: Callable[[], None]
) -> None:
    with host_revision(empty_connection), pytest.raises(SchemaError, match="is the lowest"):
        call()


def test_the_way_back_from_newer_tables_needs_newer_code(engine: Engine) -> None:
    with engine.begin() as connection, host_revision(connection):
        connection.execute(text("UPDATE pgqueue.schema_version SET version = version + 1"))

        with pytest.raises(SchemaTooNew, match=f"the way back from version {SCHEMA_VERSION}"):
            downgrade(to=0)


def test_a_lost_version_row_is_not_taken_for_an_empty_database(engine: Engine) -> None:
    with engine.begin() as connection, host_revision(connection):
        connection.execute(text("TRUNCATE pgqueue.schema_version"))

        with pytest.raises(SchemaError, match="has lost its row"):
            upgrade(to=SCHEMA_VERSION)


def test_include_name_keeps_our_schema_out_of_the_comparison(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA billing"))
        connection.execute(text("CREATE TABLE billing.jobs (id integer)"))

        found = differences(connection, {"include_schemas": True, "include_name": include_name})

    assert [(name, table.fullname) for name, table in found] == [("remove_table", "billing.jobs")]


def differences(connection: Connection, options: dict[str, Any]) -> list[Any]:
    """What autogenerate would do for a host that has no tables."""
    context = MigrationContext.configure(connection, opts=options)
    found: list[Any] = compare_metadata(context, MetaData())
    return found
