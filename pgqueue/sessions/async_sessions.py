"""The door for AsyncSession: the one sync core, run in the greenlet SQLAlchemy itself uses.

``AsyncSession.execute`` is such a door too, so nothing is lost by walking through this one.
SQLAlchemy 2.1 installs greenlet only with its extra ``asyncio``; hence the lazy imports.
"""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, NullPool
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.errors import ArgumentsError
from pgqueue.sessions.handlers import join_transaction, sessions_of_jobs

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
    )

Parameters = Callable[[], dict[str, Any]]
"""Gives what libpq needs to connect."""


def actual(session: Any, where: str) -> "AsyncSession":
    """The AsyncSession itself, also when it is scoped."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        raise ArgumentsError(
            f"{where}: the first argument is the AsyncSession whose transaction this joins, not "
            f"{type(session).__name__}; with a Session, call the method without _async"
        )
    return session


def is_async_session(annotation: Any) -> bool:
    """Whether an annotation is AsyncSession; imports nothing if nobody else has."""
    import sys

    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return (
        module is not None
        and isinstance(annotation, type)
        and issubclass(annotation, module.AsyncSession)
    )


def new_session(
    sessions: sessionmaker[Session], engine: Engine, parameters: Parameters
) -> "AsyncSession":
    """An AsyncSession around a Session of the application's, on a psycopg engine that keeps no
    connection: any event loop may use it."""
    own = create_engine(engine.url, parameters, poolclass=NullPool)
    own = own.execution_options(**engine.get_execution_options())
    # Two phases are for two databases, and it reaches one.
    return _around(sessions_of_jobs(sessions, engine), bind=own.sync_engine, twophase=False)


def joined_session(
    sessions: sessionmaker[Session],
    connection: "AsyncConnection | Connection",
    *,
    begin_again: Callable[[Connection], None],
) -> "AsyncSession":
    """An AsyncSession inside a transaction that is not its own.

    On a plain Connection it blocks the thread, so that is for an event loop which runs nothing
    else.
    """
    sync_connection: Any = getattr(connection, "sync_connection", connection)
    session = _around(sessions, bind=sync_connection)
    join_transaction(session.sync_session, sync_connection, begin_again=begin_again)
    if sync_connection is connection:
        driver_connection: Any = sync_connection.connection.dbapi_connection
        driver_connection.cursor_factory = _cursor_class()
    return session


def _around(sessions: sessionmaker[Session], **options: Any) -> "AsyncSession":
    """An AsyncSession around a Session of the application's: what that filters or listens to
    holds here too."""
    from sqlalchemy.ext.asyncio import AsyncSession

    def make_session(**_: Any) -> Session:
        # Expired, an attribute could not be read again without an await.
        return sessions(**options, expire_on_commit=False)

    # All that AsyncSession does with the class is to call it; the Session's binds are no concern
    # of its own, which takes none but async engines.
    make: Any = make_session
    session = AsyncSession(sync_session_class=make)
    session.sync_session_class = sessions.class_
    return session


@cache
def _cursor_class() -> type:
    """psycopg's cursor with the one method that an AsyncSession awaits on a cursor."""
    from psycopg import Cursor

    class AwaitableCursor(Cursor[Any]):
        async def _async_soft_close(self) -> None: ...

    return AwaitableCursor


def create_engine(url: URL, parameters: Parameters, **options: Any) -> "AsyncEngine":
    """An async engine on psycopg, to be used by one event loop only.

    Each connection asks for its parameters anew: a password may be a token that expires.
    """
    from psycopg import AsyncConnection
    from sqlalchemy.ext.asyncio import create_async_engine

    async def connect() -> AsyncConnection[Any]:
        return await AsyncConnection.connect(**await asyncio.to_thread(parameters))

    on_psycopg = url.set(drivername="postgresql+psycopg")
    return create_async_engine(on_psycopg, async_creator=connect, **options)
