"""Guests: Sessions that live inside a transaction of the worker's, which they cannot end."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, NestedTransaction, event
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

from pgqueue import redaction

logger = redaction.logger(__name__)

HOST = "_pgqueue_host"

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


def joining_sessions(sessions: sessionmaker[Session], engine: Engine) -> sessionmaker[Session]:
    """The application's Sessions, made so that they can join a transaction on ``engine``.

    A Session may choose its bind itself, by ``binds`` or by a ``get_bind`` of the application's.
    What it sends to the engine of the jobs goes by the connection it has joined, or it would be
    another transaction; what it sends to other databases still goes there.
    """

    class Joining(sessions.class_):  # type: ignore[name-defined, misc]  # a class of run time
        def get_bind(self, *args: Any, **kwargs: Any) -> Any:
            bind = super().get_bind(*args, **kwargs)
            return self.bind if bind is engine else bind

        def prepare(self) -> None:
            """Only flush: the transaction of the job is committed in one phase."""
            self.flush()

    make_guests(Joining)
    return sessionmaker(**{**sessions.kw, "class_": Joining, "bind": engine})


def warn_of_two_phases(sessions: sessionmaker[Session], engine: Engine) -> None:
    """Say at the start of a worker what a sessionmaker asks for that a job cannot have."""
    others = [bind for bind in (sessions.kw.get("binds") or {}).values() if bind is not engine]
    if sessions.kw.get("twophase") and others:
        logger.warning(
            "the sessionmaker has twophase=True and binds to other engines: what a transactional "
            "handler writes to those is committed right before its job, and not in two phases"
        )


def make_guests(sessions: type[Session]) -> None:
    event.listen(sessions, "after_commit", _keep)
    event.listen(sessions, "after_transaction_end", _undo_unkept)


def be_guest(
    session: Session, connection: Connection, *, begin_again: Callable[[Connection], None]
) -> None:
    """Have a Session of a class of guests live in the transaction, or savepoint, that its
    connection is in.

    What it commits is not committed, and what it rolls back is undone to its last commit, or to
    the beginning: as with a savepoint of its own.  But that is two round trips, so it is made
    when the Session first commits or rolls back, which in most handlers only their end does.
    ``begin_again`` begins the transaction anew when the Session has rolled it back.
    """
    session.join_transaction_mode = "rollback_only"
    session.twophase = False  # the transaction has begun already, and not as one of two phases
    session.autobegin = True  # a handler finds a transaction, and may begin the next one itself
    host = connection.get_nested_transaction() or connection.get_transaction()
    vars(session)[HOST] = connection, host, begin_again  # not in its info, which is the user's


def _keep(session: Session) -> None:
    session.join_transaction_mode = "create_savepoint"


def _undo_unkept(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is not None or session.join_transaction_mode != "rollback_only":
        return
    session.join_transaction_mode = "create_savepoint"
    connection, host, begin_again = vars(session)[HOST]
    if host.is_active:
        host.rollback()  # it was closed, and not rolled back
    if connection.invalidated:
        connection.close()  # or it would open another, whose transaction is nobody's
    elif isinstance(host, NestedTransaction):
        connection.begin_nested()
    else:
        begin_again(connection)
