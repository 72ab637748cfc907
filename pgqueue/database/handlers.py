"""The Session of a handler: it joins a transaction of the worker, which it cannot end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

from pgqueue import redaction
from pgqueue.errors import ArgumentsError, OptionError

logger = redaction.logger(__name__)

HOST = "_pgqueue_host"

CHANGE_NO_MEANING = {
    "compiled_cache",
    "insertmanyvalues_page_size",
    "logging_token",
    "max_row_buffer",
    "stream_results",
    "yield_per",
}
"""Engine options that do not change what a statement does."""

OF_TRANSACTIONS = {"isolation_level", "postgresql_readonly", "postgresql_deferrable"}
"""Options that a connection refuses while it has a transaction."""


def sessions_of_jobs(sessions: sessionmaker[Session], engine: Engine) -> sessionmaker[Session]:
    """The application's Sessions, changed so that their ``bind`` replaces ``engine``.

    A Session may choose its bind itself, by ``binds`` or by its own ``get_bind``.  What it would
    send to the engine of the jobs goes to its ``bind`` instead, because that engine would begin
    another transaction.  Statements for other databases still go there.
    """

    class OfJobs(sessions.class_):  # type: ignore[name-defined, misc]  # made at run time
        def get_bind(self, *args: Any, **kwargs: Any) -> Any:
            bind = super().get_bind(*args, **kwargs)
            if bind is self.bind or _is_engine_of_jobs(bind, engine):
                return self.bind
            if self.bind.dialect.is_async:
                raise ArgumentsError(
                    "an AsyncSession of the queue cannot use another engine, here "
                    f"{redaction.redacted(str(bind.engine.url))}: it would block the event loop; "
                    "use that engine in a plain function, or by an AsyncSession of your own"
                )
            return bind

    return sessionmaker(**{**sessions.kw, "class_": OfJobs, "bind": engine})


def joining_sessions(sessions: sessionmaker[Session], engine: Engine) -> sessionmaker[Session]:
    """The application's Sessions, changed so that they can join a transaction on ``engine``."""
    of_jobs = sessions_of_jobs(sessions, engine)

    class Joining(of_jobs.class_):  # type: ignore[name-defined, misc]  # made at run time
        def prepare(self) -> None:
            """Only flush: the transaction of the job commits in one phase."""
            self.flush()

    event.listen(Joining, "after_transaction_end", _undo_unkept)
    return sessionmaker(**{**of_jobs.kw, "class_": Joining})


def session_in_savepoint(
    sessions: sessionmaker[Session], connection: Connection, **options: Any
) -> Session:
    """A Session of the application in the transaction of a test's connection.

    Its commits and rollbacks end a savepoint, unless the sessionmaker says otherwise.
    """
    joining = {"join_transaction_mode": "create_savepoint", **sessions.kw, **options}
    of_jobs = sessions_of_jobs(sessions, connection.engine)
    # The transaction has begun already, in one phase.
    return of_jobs.class_(**{**joining, "bind": connection, "twophase": False})


def check_binds(sessions: sessionmaker[Session], engine: Engine) -> None:
    """At the start of a worker, refuse binds that no handler could use; warn of binds that look
    like the queue's but have transactions of their own."""
    binds = set((sessions.kw.get("binds") or {}).values())
    others = [bind for bind in binds if not _is_engine_of_jobs(bind, engine)]
    if sessions.kw.get("twophase") and others:
        logger.warning(
            "the sessionmaker has twophase=True and binds to other engines: what a transactional "
            "handler writes to those is committed right before its job, and not in two phases"
        )
    for bind in others:
        if bind.engine.pool is not engine.pool and _database_of(bind) == _database_of(engine):
            logger.warning(
                "among the binds of the sessionmaker is another engine on the same database, %s: "
                "what a transactional handler writes by it is in another transaction than its "
                "job; use one engine",
                redaction.redacted(str(bind.engine.url)),
            )


def _is_engine_of_jobs(bind: Any, engine: Engine) -> bool:
    """Whether statements for an engine belong in the transaction of a handler's job.

    A clone, made by ``execution_options``, has the same pool.  A Connection has only one set of
    options, so the clone's cannot apply; the clone is refused if they would be needed.
    """
    if bind is engine:
        return True
    if not isinstance(bind, Engine) or bind.pool is not engine.pool:
        return False
    theirs, ours = bind.get_execution_options(), engine.get_execution_options()
    changed = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)}
    if "isolation_level" in changed and theirs.get("isolation_level") == "AUTOCOMMIT":
        return False  # its statements must not be in a transaction
    if changed <= CHANGE_NO_MEANING:
        return True
    raise OptionError(
        f"a Session of the queue's sessionmaker chooses an engine that differs from the queue's in "
        f"{', '.join(sorted(changed))}; in a handler this would be another transaction than that "
        "of the job. Bind the sessionmaker to that engine as a whole, or have the Session choose "
        "the queue's and begin the handler with session.connection(execution_options={...})"
    )


def _database_of(bind: Any) -> tuple[str | None, int, str | None]:
    url = bind.engine.url
    return url.host, url.port or 5432, url.database


@contextmanager
def options_of(engine: Engine, connection: Connection) -> Iterator[None]:
    """Give a connection the options of the application's engine while a handler uses it.

    A connection of a worker's own engine has none of them.  Options that the handler adds by
    ``session.connection(execution_options=...)`` are removed: the next handler may get the same
    connection.
    """
    before = connection.get_execution_options()
    options = engine.get_execution_options()
    if options:
        own = {name: options[name] for name in options if name not in OF_TRANSACTIONS}
        _set_options(connection, own)
    try:
        yield
    finally:
        after = connection.get_execution_options()
        if after is not before:
            changed = {name for name in after if after[name] != before.get(name)}
            _set_options(connection, {name: before.get(name) for name in changed})


def _set_options(connection: Connection, options: dict[str, Any]) -> None:
    try:
        connection.execution_options(**options)
    except AttributeError:
        # SQLAlchemy sets a `logging_token` and then records in the pool that it must be reset; a
        # worker's own connection is in no pool.
        if not connection.connection.is_detached:
            raise


def join_transaction(
    session: Session, connection: Connection, *, begin_again: Callable[[Connection], None]
) -> None:
    """Join a Session of :func:`joining_sessions` to the transaction, or savepoint, that its
    connection is in.

    The Session's commits do not commit the transaction, and its rollbacks go back to its last
    commit, or to the beginning, as with a savepoint of its own.  A savepoint costs two round trips,
    so it is made when the Session first commits or rolls back; most handlers do so only at their
    end.  ``begin_again`` begins what the connection was in anew, when the Session has rolled it
    back.
    """
    session.join_transaction_mode = "rollback_only"
    session.twophase = False  # the transaction has begun already, in one phase
    session.autobegin = True  # after the first transaction a handler may begin another
    dispatch: Any = session.dispatch
    dispatch.after_commit = AfterCommit(dispatch.after_commit)
    host = connection.get_nested_transaction() or connection.get_transaction()
    vars(session)[HOST] = connection, host, begin_again  # not in info, which belongs to the user


class AfterCommit:
    """Replaces a Session's ``after_commit`` listeners and calls them after the COMMIT.

    SQLAlchemy dispatches the event whenever the Session commits, which here ends a savepoint.
    """

    def __init__(self, listeners: Any) -> None:
        self._listeners = listeners
        self._is_due = False

    def __call__(self, session: Session) -> None:
        """Called by SQLAlchemy when the Session commits."""
        self._is_due = True
        session.join_transaction_mode = "create_savepoint"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listeners, name)

    def for_modify(self, dispatch: Any) -> Any:
        """Called by SQLAlchemy when a listener is added to this one Session."""
        dispatch.after_commit = self._listeners
        self._listeners = self._listeners.for_modify(dispatch)
        dispatch.after_commit = self
        return self._listeners

    def due(self) -> list[Callable[[Session], None]]:
        """Return the listeners to call; empty on the second call."""
        was_due, self._is_due = self._is_due, False
        return list(self._listeners) if was_due else []


def listeners_to_commit(session: Session) -> list[Callable[[Session], None]]:
    """Return the listeners to call after the COMMIT; empty on the second call."""
    dispatch: Any = session.dispatch
    due: list[Callable[[Session], None]] = dispatch.after_commit.due()
    return due


def _undo_unkept(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is not None or session.join_transaction_mode != "rollback_only":
        return
    session.join_transaction_mode = "create_savepoint"
    connection, host, begin_again = vars(session)[HOST]
    if host.is_active:
        host.rollback()  # the Session was closed without a rollback
    if connection.invalidated:
        connection.close()  # otherwise it would reconnect, outside the job's transaction
    else:
        begin_again(connection)


def joined_session(
    sessions: sessionmaker[Session],
    connection: Connection,
    *,
    begin_again: Callable[[Connection], None],
) -> Session:
    """A Session inside a transaction that it does not own.

    A handler that calls its commit() and rollback() can neither drop the lock on its message
    nor commit half of its work.
    """
    session = sessions(bind=connection)
    join_transaction(session, connection, begin_again=begin_again)
    return session
