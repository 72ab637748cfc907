"""Begins and ends transactions.  The code that begins a transaction also ends it."""

from contextlib import suppress
from datetime import timedelta

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus
from sqlalchemy import Connection, NestedTransaction
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgqueue.database.opening import READ_COMMITTED, driver_connection
from pgqueue.database.settings import FIRST_WITH_TRANSACTION_TIMEOUT, LIMITS
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.repository.transactions import GUARD, begin, set_local


def begin_now(
    connection: Connection,
    settings: str = GUARD,
    *,
    isolation_level: IsolationLevel = READ_COMMITTED,
) -> None:
    """Begin a transaction on the server and run ``settings`` in it, in one round trip.

    Otherwise the driver would send BEGIN with the handler's first statement.  A connection that
    broke in the pool must be found before the handler starts, so that it costs the job no attempt.
    """
    connection.begin()
    if isinstance(driver_connection(connection), psycopg.Connection):
        settings = begin(isolation_level, settings)
    set_now(connection, settings)


def begin_for_handler(
    connection: Connection, limits: str, *, isolation_level: IsolationLevel
) -> None:
    """Begin a transaction for a handler, with its time limits and a guard against its end."""
    settings = f"{limits}; {GUARD}" if limits else GUARD
    begin_now(connection, settings, isolation_level=isolation_level)


def set_now(connection: Connection, statements: str) -> None:
    """Send statements that return nothing, in one message and without a cursor."""
    driver = driver_connection(connection)
    if not isinstance(driver, psycopg.Connection):
        connection.exec_driver_sql(statements)
        return
    with suppress(psycopg.Error):  # the connection is closed
        done = driver.pgconn.exec_(statements.encode())
        if done.status == ExecStatus.COMMAND_OK:
            return
        state = (done.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        if state in ENDED:
            raise TransactionEnded(done.error_message.decode(errors="replace").strip())
    # SQLAlchemy raises the error: the transaction or the connection had failed before.
    connection.exec_driver_sql(statements)


MARGIN = timedelta(minutes=1)


def time_limits(timeout: timedelta | None, connection: Connection) -> str:
    """Return the statements that set the server's timeouts for a handler's transaction.

    The server ends the transaction of a frozen worker, but never before the task's own timeout.
    Without a timeout the result is empty, and the server's own settings apply.
    """
    if timeout is None:
        return ""
    milliseconds = int((timeout + MARGIN).total_seconds() * 1000)
    limits = [(name, milliseconds) for name in limits_of(connection)]
    # A running transaction_timeout can only be lengthened by setting it to 0 first.
    none = [("transaction_timeout", 0)] * (len(limits) > 1)
    return set_local(none + limits)


def limits_of(connection: Connection) -> list[str]:
    """Return the names of the settings by which this server ends long transactions."""
    version = connection.dialect.server_version_info or (0,)
    return list(LIMITS) if version >= FIRST_WITH_TRANSACTION_TIMEOUT else list(LIMITS[:1])


ENDED = {"3B001", "25P01"}
"""SQLSTATEs of the errors for RELEASE or ROLLBACK TO of a missing savepoint."""


class TransactionEnded(Exception):
    """The transaction that a handler was given has ended."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the transaction the handler was given has ended ({cause}); inside a handler use "
            "session.commit() and session.rollback(), which leave it open"
        )


def server_error(error: Exception) -> Exception:
    """Return TransactionEnded if the error says that our savepoint is missing, else the error."""
    if sqlstate_of(error) not in ENDED:
        return error
    return TransactionEnded(str(getattr(error, "orig", None)))


def release_savepoints(connection: Connection, *, outer: NestedTransaction | None = None) -> None:
    """Release the savepoints that a handler has left open; their writes are kept.

    ``outer``: a savepoint that was open before and stays open.
    """
    while (savepoint := connection.get_nested_transaction()) is not None and savepoint is not outer:
        savepoint.commit()


def undo_savepoints(connection: Connection, *, outer: NestedTransaction | None) -> None:
    """Roll back all savepoints inside ``outer``."""
    while (savepoint := connection.get_nested_transaction()) is not None and savepoint is not outer:
        savepoint.rollback()


def write_pending(session: Session) -> None:
    """Flush a handler's Session as its commit would; the transaction of the job stays open.

    Objects are not expired, because the handler or its listeners may use them afterwards.
    """
    session.expire_on_commit = False
    if session.in_transaction():
        session.commit()


class CommitUnknown(Exception):
    """The connection broke during COMMIT; only the rows show whether it was carried out."""


def commit(connection: Connection) -> None:
    """Commit once.  An interrupted COMMIT is not sent again: the transaction no longer exists."""
    transaction = connection.get_transaction()
    assert transaction is not None, "begun by the caller"
    try:
        transaction.commit()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise CommitUnknown from error
        raise
