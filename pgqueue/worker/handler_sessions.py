"""The Session of a handler in a transaction that it does not own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.sessions.handlers import options_of
from pgqueue.tasks.delaying import handler_session

AnySession = TypeVar("AnySession")
Begin = Callable[[Connection], None]


@contextmanager
def session_for_handler(
    joined_session: Callable[..., AnySession],
    sessions: sessionmaker[Session],
    connection: Any,
    *,
    begin_again: Begin,
) -> Iterator[AnySession]:
    """Join a Session to the transaction of a connection, with the options of the application's
    engine, and let ``delay()`` know of it.  The caller closes it.

    ``joined_session``: the function of that name for a Session, or for an AsyncSession.
    """
    sync_connection: Connection = getattr(connection, "sync_connection", connection)
    with options_of(sessions.kw["bind"], sync_connection):
        session = joined_session(sessions, connection, begin_again=begin_again)
        own: Any = session
        handler_session.set(getattr(own, "sync_session", own))
        try:
            yield session
        finally:
            handler_session.set(None)
