"""The caller's transaction, which pgqueue joins and never ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.errors import ArgumentsError, NotBound, PayloadError, SchemaMissing, SchemaTooOld
from pgqueue.models.base import SCHEMA
from pgqueue.repository.nodes import CITUS_SCHEMA
from pgqueue.repository.tables import A_WRITE

Caller = Session | Connection
"""Whose transaction an enqueue joins."""
AnySession = Session | Connection | scoped_session[Any]
"""What a caller's transaction is given by."""

UNDEFINED_TABLE = "42P01"
UNTRANSLATABLE_CHARACTER = "22P05"
UNDEFINED_COLUMN = "42703"
UNDEFINED_FUNCTION_OR_SCHEMA = ("42883", "3F000")


def sync_session(session: Any, where: str) -> Session:
    """Return the Session itself; resolves a scoped_session."""
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        return session
    raise ArgumentsError(
        f"{where}: the first argument is the Session whose transaction this joins, not "
        f"{_named(session)}; with an AsyncSession use the method that ends in _async, or "
        "await session.run_sync(...), and to enqueue without a session use delay(...)"
    )


def caller(session: Any, where: str) -> Caller:
    """Return the Session itself, or the Connection that an enqueue joins."""
    if isinstance(session, Connection):
        _check_dialect(session, where, "this Connection")
        return session
    return sync_session(session, where)


def joined(session: Caller, where: str) -> Connection:
    """Return the connection on which the caller's transaction writes jobs."""
    connection = session if isinstance(session, Connection) else _connection_of(session, where)
    commit_in_two_phases(connection)
    return connection


def executor(session: Any, where: str = "this call") -> Connection:
    """Return the connection of an operator's session, or the connection that was passed."""
    if isinstance(session, Connection):
        return session
    return _connection_of(sync_session(session, where), where)


def in_transaction(session: Any, where: str) -> Connection:
    """The same for calls that send several statements: refuses autocommit."""
    connection = executor(session, where)
    refuse_autocommit(connection, where)
    commit_in_two_phases(connection)
    return connection


def _connection_of(session: Session, where: str) -> Connection:
    try:
        connection = session.connection(bind_arguments=A_WRITE)
    except UnboundExecutionError as error:
        raise NotBound(
            f"{where}: this Session has no engine for jobs; make it with bind=engine, or with "
            "{Job: engine} among its binds"
        ) from error
    _check_dialect(connection, where, "this Session")
    return connection


def _check_dialect(connection: Connection, where: str, name: str) -> None:
    if connection.dialect.name != "postgresql":
        raise ArgumentsError(
            f"{where}: {name} writes to {connection.dialect.name}, and jobs live in "
            "PostgreSQL; give a Session on that database, or {Job: engine} among its binds"
        )


def may_notify(connection: Connection) -> bool:
    """Whether NOTIFY is allowed: PostgreSQL cannot prepare a transaction that has sent one."""
    return not isinstance(connection.get_transaction(), TwoPhaseTransaction)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Say what to run if tables or columns are missing, and which character the encoding of the
    database lacks; hide the parameters of every error."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise PayloadError(
            f"{error.object[error.start : error.end]!r} is not in {error.encoding}, the encoding "
            f"of the connection, so nothing was written. {_USE_UTF8}"
        ) from None
    except DBAPIError as error:
        error.hide_parameters = True
        state = sqlstate_of(error)
        if state == UNTRANSLATABLE_CHARACTER:
            raise PayloadError(
                f"The database cannot store a character: {str(error.orig).splitlines()[0]}; "
                f"nothing was written. {_USE_UTF8}"
            ) from None
        if state == UNDEFINED_TABLE:
            raise SchemaMissing(f"There are no pgqueue tables {_UPGRADE}") from error
        if state in UNDEFINED_FUNCTION_OR_SCHEMA and CITUS_SCHEMA in str(error.orig):
            raise SchemaMissing(
                "There is no function that enqueues on the node of a key. On Citus run `pgqueue "
                "--app module:queue upgrade --nodes all` when the cluster has nodes; elsewhere "
                "omit node, and open a session on the node"
            ) from error
        if state == UNDEFINED_COLUMN:
            raise SchemaTooOld(f"There are only older pgqueue tables {_UPGRADE}") from error
        raise


_USE_UTF8 = "Use a database with the encoding UTF8, or arguments without this character."

_UPGRADE = (
    f"in schema {SCHEMA} of this session's database, or with node=... of its node. Run `pgqueue "
    "--app module:queue upgrade`, in a Flask application `flask pgqueue upgrade`. If the "
    "application's own Alembic history creates the tables, run its migrations instead."
)


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
