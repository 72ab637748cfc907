"""AsyncSession: runs the synchronous core in the greenlet that SQLAlchemy itself uses.

``AsyncSession.execute`` uses such a greenlet too, so this costs no more.  SQLAlchemy 2.1 installs
greenlet only with its extra ``asyncio``; hence the lazy imports.
"""

import asyncio
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, NullPool
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.database.handlers import join_transaction, sessions_of_jobs
from pgqueue.database.handlers import session_in_savepoint as sync_session_in_savepoint
from pgqueue.errors import ArgumentsError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

Parameters = Callable[[], dict[str, Any]]
"""Returns the parameters with which libpq connects."""


def actual(session: Any, where: str) -> "AsyncSession":
    """Return the AsyncSession itself; resolves an async_scoped_session."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        raise ArgumentsError(
            f"{where}: the first argument is the AsyncSession whose transaction this joins, not "
            f"{type(session).__name__}; with a Session, call the method without _async"
        )
    return session


def actual_caller(session: Any, where: str) -> "AsyncSession | AsyncConnection":
    """Return the AsyncSession itself, or the AsyncConnection that an enqueue joins."""
    from sqlalchemy.ext.asyncio import AsyncConnection

    return session if isinstance(session, AsyncConnection) else actual(session, where)


def sync_connection_of(bind: Any) -> Any:
    """Return the Connection of an AsyncConnection, and anything else as it is."""
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    if module is None or not isinstance(bind, module.AsyncConnection):
        return bind
    if bind.sync_connection is None:
        raise ArgumentsError("the AsyncConnection is not open yet: `await connection` first")
    return bind.sync_connection


def is_async_session(annotation: Any) -> bool:
    """Whether an annotation is AsyncSession; does not import sqlalchemy.ext.asyncio itself."""
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return (
        module is not None
        and isinstance(annotation, type)
        and issubclass(annotation, module.AsyncSession)
    )


def new_session(
    sessions: sessionmaker[Session], engine: Engine, parameters: Parameters
) -> "AsyncSession":
    """An AsyncSession around one of the application's Sessions, on a psycopg engine that keeps no
    connection, so that any event loop may use it."""
    own = create_engine(engine.url, parameters, poolclass=NullPool)
    own = own.execution_options(**engine.get_execution_options())
    # Two-phase commits are for two databases; this session reaches only one.
    return _around(sessions_of_jobs(sessions, engine), bind=own.sync_engine, twophase=False)


def joined_session(
    sessions: sessionmaker[Session],
    connection: Connection,
    *,
    begin_again: Callable[[Connection], None],
) -> "AsyncSession":
    """An AsyncSession inside a transaction that it does not own.

    On a plain Connection it blocks the thread, so it may run there only in an event loop that
    runs nothing else.
    """
    session = _around(sessions, bind=connection)
    join_transaction(session.sync_session, connection, begin_again=begin_again)
    _let_cursors_be_awaited(connection)
    return session


def session_in_savepoint(sessions: sessionmaker[Session], connection: Connection) -> "AsyncSession":
    """An AsyncSession in a savepoint of a test's connection, which may be a plain one."""
    _let_cursors_be_awaited(connection)
    make = partial(sync_session_in_savepoint, sessions, connection)
    return _around(sessions, make=make)


def _let_cursors_be_awaited(connection: Connection) -> None:
    """Make a plain connection of psycopg fit for an AsyncSession."""
    if connection.dialect.is_async:
        return
    if connection.dialect.driver != "psycopg":
        raise ArgumentsError(
            f"an AsyncSession cannot use a Connection of {connection.dialect.driver}: make the "
            "test's engine with postgresql+psycopg, or give an AsyncConnection"
        )
    from psycopg import Cursor

    class AwaitableCursor(Cursor[Any]):
        """Has the one cursor method that AsyncSession awaits."""

        async def _async_soft_close(self) -> None: ...

    driver_connection: Any = connection.connection.dbapi_connection
    driver_connection.cursor_factory = AwaitableCursor


def _around(
    sessions: sessionmaker[Session], *, make: Callable[..., Session] | None = None, **options: Any
) -> "AsyncSession":
    """An AsyncSession around one of the application's Sessions, with the filters and listeners of
    that Session."""
    from sqlalchemy.ext.asyncio import AsyncSession

    def make_session(**_: Any) -> Session:
        # An expired attribute could not be loaded again without an await.
        return (make or sessions)(**options, expire_on_commit=False)

    # AsyncSession only calls the class.  The Session's binds are not passed through AsyncSession,
    # which accepts only async engines.
    factory: Any = make_session
    session = AsyncSession(sync_session_class=factory)
    session.sync_session_class = sessions.class_
    return session


@cache
def create_engine(url: URL, parameters: Parameters, **options: Any) -> "AsyncEngine":
    """An async engine on psycopg, for use by one event loop only.

    Each connection gets its parameters anew: a password may be a token that expires.
    """
    from psycopg import AsyncConnection
    from sqlalchemy.ext.asyncio import create_async_engine

    async def connect() -> AsyncConnection[Any]:
        return await AsyncConnection.connect(**await asyncio.to_thread(parameters))

    on_psycopg = url.set(drivername="postgresql+psycopg")
    return create_async_engine(on_psycopg, async_creator=connect, **options)
