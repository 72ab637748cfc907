"""What has become of a transaction, read by its name."""

import pytest
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import DBAPIError

from pgqueue.database.opening import backend_pid
from pgqueue.repository.fate import Fate, Fates, transaction_name


def named(connection: Connection) -> str:
    """The name of a transaction that has written."""
    connection.execute(text("INSERT INTO pgqueue.paused_tasks VALUES ('a')"))
    name: str = connection.execute(select(transaction_name())).scalar_one()
    return name


def fate_of(engine: Engine, name: str) -> Fate:
    with engine.connect() as connection:
        return Fates(connection).of(name)


def test_it_is_in_progress_until_it_is_committed_or_aborted(engine: Engine) -> None:
    with engine.connect() as connection:
        aborted = named(connection)
        assert fate_of(engine, aborted) is Fate.IN_PROGRESS
        connection.rollback()
        committed = named(connection)
        connection.commit()

    assert fate_of(engine, aborted) is Fate.ABORTED
    assert fate_of(engine, committed) is Fate.COMMITTED


def test_it_is_aborted_with_its_server_process(engine: Engine) -> None:
    with engine.connect() as connection, engine.connect() as other:
        name = named(connection)
        other.execute(
            text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": backend_pid(connection)}
        )
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1"))

    assert fate_of(engine, name) is Fate.ABORTED


def test_a_server_on_another_timeline_does_not_know_it(engine: Engine) -> None:
    """It may have given the id to a transaction of its own since it was promoted."""
    with engine.begin() as connection:
        id, _, timeline = named(connection).partition(" ")

    assert timeline == "00000001"
    assert fate_of(engine, f"{id} 00000002") is Fate.UNKNOWN
