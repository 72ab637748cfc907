"""Connections on which each statement is its own transaction: ours, and those we refuse."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from pgqueue.connections.fast_path import driver_unseen
from pgqueue.errors import NoTransaction


@contextmanager
def autocommitting(engine: Engine) -> Iterator[Connection]:
    """A connection of the engine's pool, on which each statement is its own transaction.

    SQLAlchemy would set that as an isolation level and reset it, which takes longer than to take
    the connection out of the pool.
    """
    with engine.connect() as connection:
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


def refuse_autocommit(connection: Connection, where: str) -> None:
    """Statements that belong together need a transaction around them."""
    # Every driver's connection says it so; asking SQLAlchemy could cost a round trip.
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise NoTransaction(
            f"{where}: the connection is in AUTOCOMMIT, where each statement commits alone, and "
            "this takes several; use a session whose engine has another isolation level, or "
            "enqueue(...) or delay(...), which are one statement each"
        )
