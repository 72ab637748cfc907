"""Where a transaction begins, and how it ends.  Whoever opened it ends it."""

from collections.abc import Iterable
from contextlib import suppress

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus
from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.connections.opening import READ_COMMITTED, driver_connection
from pgqueue.connections.settings import FIRST_WITH_TRANSACTION_TIMEOUT, LIMITS, LOCAL, PLAN_BY_KEY

logger = redaction.logger(__name__)


BEFORE_SETTLE = f"SET CONSTRAINTS ALL IMMEDIATE; {PLAN_BY_KEY}"
"""At the end of a handler in transaction mode: what would fail its COMMIT fails now."""
BEFORE_SETTLE_IN_BATCH = f"""
    DO $$ BEGIN
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE EXCEPTION USING ERRCODE = 'PGQ00';
    EXCEPTION WHEN SQLSTATE 'PGQ00' THEN
    END $$;
    {PLAN_BY_KEY}
"""
"""The same where other handlers follow in the transaction: their constraints stay deferred, as
they were before the block.  Not by ROLLBACK TO SAVEPOINT: whenever the driver reads ROLLBACK it
throws away what it has prepared, and each statement would be planned anew for each job."""


GUARD = "SAVEPOINT pgqueue_handler"
RELEASE_GUARD = "RELEASE SAVEPOINT pgqueue_handler"
UNDO_HANDLER = "ROLLBACK TO SAVEPOINT pgqueue_handler"
ONLY_SETTLE_FOLLOWS = "SET LOCAL idle_in_transaction_session_timeout = 20000"
"""A worker that is frozen between its settle and its COMMIT has a lock on the lease.  It is gone
before the grace of such workers is over, and others may rescue."""
AFTER_HANDLER = f"{RELEASE_GUARD}; {PLAN_BY_KEY}; {ONLY_SETTLE_FOLLOWS}"
"""Around a handler.  Whoever has ended the transaction has ended the savepoint as well, and its
job fails: the server knows it whatever the handler did, and whatever SQLAlchemy believes."""


def begin_now(
    connection: Connection,
    settings: str = GUARD,
    *,
    isolation_level: IsolationLevel = READ_COMMITTED,
) -> None:
    """Begin a transaction on the server, with these statements, in one round trip.

    The driver would send BEGIN before the first statement of a handler; a connection that has
    died in the pool is to be found before that, so that it costs the job no attempt.
    """
    connection.begin()
    if isinstance(driver_connection(connection), psycopg.Connection):
        settings = f"BEGIN ISOLATION LEVEL {isolation_level}; {settings}"
    set_now(connection, settings)


def set_now(connection: Connection, statements: str) -> None:
    """Send statements that return nothing, in one message and without the work of a cursor."""
    driver = driver_connection(connection)
    if not isinstance(driver, psycopg.Connection):
        connection.exec_driver_sql(statements)
        return
    with suppress(psycopg.Error):  # it is closed
        done = driver.pgconn.exec_(statements.encode())
        if done.status == ExecStatus.COMMAND_OK:
            return
        state = (done.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        if state in ENDED:
            raise TransactionEnded(done.error_message.decode(errors="replace").strip())
    # SQLAlchemy tells: the transaction, or the connection, has failed before.
    connection.exec_driver_sql(statements)


def plan_freely(connection: Connection) -> str:
    """What undoes PLAN_BY_KEY for a handler: the settings this connection has without it."""
    return settings_of(connection, LOCAL)


def settings_of(connection: Connection, names: Iterable[str]) -> str:
    """What gives a transaction the settings that this connection has now."""
    values = ", ".join(
        f"pg_catalog.quote_literal(pg_catalog.current_setting('{name}'))" for name in names
    )
    found = connection.exec_driver_sql(f"SELECT {values}").one()
    return "; ".join(
        f"SET LOCAL {name} = {value}" for name, value in zip(names, found, strict=True)
    )


def limits_of(connection: Connection) -> list[str]:
    """The settings by which this server ends a transaction that takes long."""
    version = connection.dialect.server_version_info or (0,)
    return list(LIMITS) if version >= FIRST_WITH_TRANSACTION_TIMEOUT else list(LIMITS[:1])


ENDED = {"3B001", "25P01"}
"""The states in which the server refuses to release, or go back to, a savepoint that is gone."""


class TransactionEnded(Exception):
    """The transaction a handler was given is not there any more."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"the transaction the handler was given has ended ({said}); inside a handler use "
            "session.commit() and session.rollback(), which leave it open"
        )


def told_by_server(error: Exception) -> Exception:
    """The same error, or what it means if it says that our savepoint is gone."""
    said = getattr(error, "orig", None)
    return TransactionEnded(str(said)) if getattr(said, "sqlstate", None) in ENDED else error


class CommitUnknown(Exception):
    """The connection broke during COMMIT: only the rows can tell whether it was carried out."""


def commit(connection: Connection) -> None:
    """Commit once.  A COMMIT that was cut off is never sent again: it would commit nothing."""
    transaction = connection.get_transaction()
    assert transaction is not None, "begun by the caller"
    try:
        transaction.commit()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise CommitUnknown from error
        raise
