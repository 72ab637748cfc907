"""The Session of a handler, in a transaction that it does not own, and its listeners."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import redaction
from pgqueue.context import Around, JobContext
from pgqueue.sessions.async_sessions import joined_session as joined_async_session
from pgqueue.sessions.handlers import joined_session, listeners_to_commit, options_of
from pgqueue.tasks.delaying import handler_session

logger = redaction.logger(__name__)

Begin = Callable[[Connection], None]


@contextmanager
def session_for_handler(
    sessions: sessionmaker[Session], connection: Connection, *, is_async: bool, begin_again: Begin
) -> Iterator[Any]:
    """Join a Session, or an AsyncSession, to the transaction of a connection, with the options of
    the application's engine, and let ``delay()`` know of it.  The caller closes it."""
    join = joined_async_session if is_async else joined_session
    with options_of(sessions.kw["bind"], connection):
        session: Any = join(sessions, connection, begin_again=begin_again)
        handler_session.set(getattr(session, "sync_session", session))
        try:
            yield session
        finally:
            handler_session.set(None)


def call_after_commit(
    around: Around, context_of: Callable[[Session], JobContext], session: Session | None
) -> None:
    """Call the ``after_commit`` listeners of a handler's Session after the COMMIT.

    Called inside the same ``around`` as a handler.  Their errors change no outcome.
    """
    if session is None or not (listeners := listeners_to_commit(session)):
        return
    context = context_of(session)
    try:
        with around(context):
            for listener in listeners:
                _call(listener, context.job_id, session)
    except BaseException:  # ``around`` is the application's code
        logger.exception("job %d: around its after_commit listeners", context.job_id)
    session.close()


def call_listeners(job_id: int, session: Session) -> None:
    """Call the ``after_commit`` listeners of a Session while its handler still runs."""
    for listener in listeners_to_commit(session):
        _call(listener, job_id, session)


def _call(listener: Callable[[Session], None], job_id: int, session: Session) -> None:
    try:
        listener(session)
    except BaseException:  # a listener may raise anything, as a handler may
        logger.exception(
            "job %d: it is committed, and a listener to after_commit has failed", job_id
        )
