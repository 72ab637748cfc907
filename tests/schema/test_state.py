"""Before work begins, the tables are looked at, and a refusal says what to run."""

import re

import pytest
from sqlalchemy import Connection, text

from pgqueue.errors import SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld
from pgqueue.schema import SCHEMA_VERSION, verify


def test_tables_of_this_version_are_accepted(connection: Connection) -> None:
    verify(connection)


def test_newer_tables_that_serve_this_code_are_accepted(connection: Connection) -> None:
    connection.execute(text("UPDATE pgqueue.schema_version SET version = version + 1"))

    verify(connection)


def test_missing_tables_name_both_ways_to_create_them(empty_connection: Connection) -> None:
    with pytest.raises(SchemaMissing) as refusal:
        verify(empty_connection)

    database = empty_connection.scalar(text("SELECT current_database()"))
    assert f"in schema pgqueue of the database {database}. Run" in str(refusal.value)
    assert "`pgqueue --app module:queue upgrade`" in str(refusal.value)
    assert "`flask pgqueue upgrade`" in str(refusal.value)
    assert "`pgqueue revision`" in str(refusal.value)
    assert f"`pgqueue.schema.upgrade(to={SCHEMA_VERSION})`" in str(refusal.value)


def test_missing_tables_leave_the_transaction_usable(empty_connection: Connection) -> None:
    with pytest.raises(SchemaMissing):
        verify(empty_connection)

    assert empty_connection.scalar(text("SELECT 1")) == 1


def test_old_tables_of_our_history_ask_for_our_command(connection: Connection) -> None:
    connection.execute(text("UPDATE pgqueue.schema_version SET version = 0"))

    with pytest.raises(SchemaTooOld, match="`pgqueue --app module:queue upgrade`"):
        verify(connection)


def test_old_tables_of_a_host_history_ask_for_its_next_revision(connection: Connection) -> None:
    connection.execute(text("DROP TABLE pgqueue.alembic_version"))
    connection.execute(text("UPDATE pgqueue.schema_version SET version = 0"))

    with pytest.raises(SchemaTooOld, match=re.escape(f"(to={SCHEMA_VERSION}, base=0)`")):
        verify(connection)


def test_tables_that_no_longer_serve_this_code_ask_for_newer_code(connection: Connection) -> None:
    connection.execute(
        text("UPDATE pgqueue.schema_version SET version = :newer, oldest_code = :newer"),
        {"newer": SCHEMA_VERSION + 1},
    )

    with pytest.raises(SchemaTooNew, match="`pip install -U sqlalchemy-pgqueue`"):
        verify(connection)


@pytest.mark.parametrize(
    "change",
    [
        """
        ALTER TABLE pgqueue.message_queue RENAME TO plain;
        CREATE TABLE pgqueue.message_queue (LIKE pgqueue.plain) PARTITION BY LIST (queue)
        """,
        "CREATE TABLE pgqueue.child () INHERITS (pgqueue.message_queue)",
        "CREATE TABLE pgqueue.child () INHERITS (pgqueue.leases)",
    ],
    ids=["partitioned", "with a child table", "leases with a child table"],
)
def test_a_hot_table_that_is_not_one_plain_table_is_refused(
    connection: Connection, change: str
) -> None:
    connection.execute(text(change))

    with pytest.raises(SchemaError, match="make it a plain table"):
        verify(connection)


def test_a_truncated_version_row_is_said_to_be_lost(connection: Connection) -> None:
    connection.execute(text("TRUNCATE pgqueue.schema_version"))

    with pytest.raises(SchemaError, match="has lost its row"):
        verify(connection)


def test_a_history_without_its_tables_is_said_to_be_damaged(connection: Connection) -> None:
    connection.execute(text("DROP TABLE pgqueue.schema_version"))

    with pytest.raises(SchemaError, match=f"alembic_version says pgqueue_{SCHEMA_VERSION:04}"):
        verify(connection)
