"""Connections in autocommit: our own, and a check that refuses the application's."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from pgqueue.database.opening import connect_idle
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.errors import NoTransaction
from pgqueue.repository.fast_path import driver_unseen


@contextmanager
def autocommitting(engine: Engine) -> Iterator[Connection]:
    """A connection of the engine's pool, on which each statement is its own transaction.

    SQLAlchemy would set and reset autocommit as an isolation level, which takes longer than to
    take the connection from the pool.
    """
    with connect_idle(engine) as connection:
        driver = driver_unseen(connection)
        if driver is None or driver.autocommit:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")
            return
        driver.autocommit = True
        try:
            yield connection
        finally:
            if not driver.closed:
                driver.autocommit = False


@contextmanager
def in_savepoint(connection: Connection) -> Iterator[Connection]:
    """A savepoint in the transaction of a bound Connection: an error rolls back no more."""
    with connection.begin_nested():
        commit_in_two_phases(connection)
        yield connection


def in_autocommit(connection: Connection) -> bool:
    """Whether each statement commits alone."""
    # All drivers have this attribute; asking SQLAlchemy could cost a round trip.
    return getattr(connection.connection.dbapi_connection, "autocommit", False)


ONE_STATEMENT = "enqueue(...) or delay(...), which are one statement each"


def refuse_autocommit(connection: Connection, where: str, *, instead: str = ONE_STATEMENT) -> None:
    """Refuse autocommit for statements that need a common transaction."""
    if in_autocommit(connection):
        raise NoTransaction(
            f"{where}: the connection is in AUTOCOMMIT, where each statement commits alone, and "
            "this takes several; use a session whose engine has another isolation level, or "
            f"{instead}"
        )
