"""Makes the session of the running job ``db.session``, until the job ends.

Flask-SQLAlchemy keeps a session for each application context, in the registry of a
``scoped_session``.  A job has its own context, and while the job runs, its session is in this
registry.  A handler without a session gets an ordinary ``db.session``, as a request does; inside
of its ``ctx.finish()``, ``db.session`` is the session of the block.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from flask import Flask, g, has_app_context
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import ThreadLocalRegistry

from pgqueue.context import JobContext
from pgqueue.errors import ArgumentsError, PgQueueError

SESSIONS_OF_LITE = "_sqlalchemy_sessions"
"""The name in ``g`` under which Flask-SQLAlchemy-Lite keeps a context's sessions."""


class Database(Protocol):
    """What pgqueue uses of an application's ``db``, within an application context."""

    @property
    def engine(self) -> Engine: ...

    @property
    def session(self) -> Any: ...


def session_maker(db: Any) -> sessionmaker[Session]:
    """Return a sessionmaker like that of ``db.session``, on the engine of the current app."""
    made_by = maker_of(db)
    return sessionmaker(**{**made_by.kw, "class_": made_by.class_, "bind": db.engine})


def maker_of(db: Any) -> sessionmaker[Session]:
    """Return the sessionmaker of ``db.session``."""
    session = db.session
    is_scoped = isinstance(session, scoped_session)
    made_by = session.session_factory if is_scoped else getattr(db, "sessionmaker", None)
    if not isinstance(made_by, sessionmaker):
        raise ArgumentsError(
            f"db.session is {type(session).__name__}; PgQueue needs a scoped_session of a "
            "sessionmaker, as Flask-SQLAlchemy has it"
        )
    return made_by


def engines_of(db: Any) -> dict[Any, Any]:
    """Return the engines of the current app by their names, as far as its ``db`` names them."""
    found: dict[Any, Any] = getattr(db, "engines", {})
    return found


@contextmanager
def on_other_bind(app: Flask, db: Any, bind: Engine | Connection) -> Iterator[None]:
    """Put ``db.session`` and ``db.engine`` of an app on another bind, as for a test.

    On a Connection, the commits and rollbacks of ``db.session`` end savepoints.
    """
    with app.app_context():
        maker, engine = maker_of(db), db.engine
        engines = engines_of(db)
    options, engines_before = dict(maker.kw), dict(engines)
    engines.update({name: bind for name, each in engines.items() if each is engine})
    maker.configure(bind=bind, join_transaction_mode="create_savepoint")
    try:
        yield
    finally:
        engines.update(engines_before)
        maker.kw = options


def entering_context(app: Flask, session: type[Session]) -> type[Session]:
    """Return a class of Sessions that find their engines outside of an application context too.

    Flask-SQLAlchemy's ask the current app for them.
    """

    class InContext(session):  # type: ignore[misc, valid-type]  # a class of the application
        def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
            with nullcontext() if has_app_context() else app.app_context():
                return super().get_bind(*args, **kwargs)  # type: ignore[no-any-return]  # see above

    return InContext


def held_session(db: Any) -> Session | None:
    """Return ``db.session`` itself, if it was used in this context."""
    holder = _holder_of(db)
    return None if holder is None else holder.current()


@contextmanager
def lent(db: Any, context: JobContext) -> Iterator[None]:
    """Set ``db.session`` for one job, in the application context made for the job."""
    holder = _holder_of(db)
    if holder is None:
        yield
        return
    session = getattr(context.session, "sync_session", context.session)
    if session is None:
        try:
            yield
        finally:
            holder.remove()
        return
    holder.put(session)
    try:
        yield
        if holder.current() is not session:  # its writes are rolled back: the job must fail
            raise PgQueueError(
                f"job {context.job_id} {context.task}: its handler has removed db.session, which "
                "is the job's own session, and with it what was written; leave its end to the "
                "worker"
            )
    finally:
        # The worker ends the transaction that it began.  Closing an AsyncSession here would use its
        # connection in the wrong thread.
        if holder.current() is session:
            holder.clear()
        holder.remove()


@contextmanager
def lent_to_block(db: Any, context: JobContext) -> Iterator[None]:
    """Set ``db.session`` for a block of ``ctx.finish()``; then it is again what it was."""
    holder = _holder_of(db)
    before = None if holder is None else holder.current()
    try:
        with lent(db, context):
            yield
    finally:
        if holder is not None and before is not None:
            holder.put(before)


class ScopedHolder:
    """The registry of a scoped_session."""

    def __init__(self, scoped: "scoped_session[Any]") -> None:
        self._scoped = scoped

    def put(self, session: Session) -> None:
        self._scoped.registry.set(session)

    def current(self) -> Session | None:
        registry = self._scoped.registry
        return registry() if registry.has() else None

    def clear(self) -> None:
        self._scoped.registry.clear()

    def remove(self) -> None:
        self._scoped.remove()


class LiteHolder:
    """The sessions that Flask-SQLAlchemy-Lite keeps in ``g``; it closes those left there."""

    def put(self, session: Session) -> None:
        g.setdefault(SESSIONS_OF_LITE, {})["default"] = session

    def current(self) -> Session | None:
        session: Session | None = g.get(SESSIONS_OF_LITE, {}).get("default")
        return session

    def clear(self) -> None:
        g.get(SESSIONS_OF_LITE, {}).pop("default", None)

    def remove(self) -> None:
        """Does nothing: Flask-SQLAlchemy-Lite's teardown removes them at the end of the context."""


def _holder_of(db: Any) -> ScopedHolder | LiteHolder | None:
    session = db.session
    if not isinstance(session, scoped_session):
        return LiteHolder()
    if isinstance(session.registry, ThreadLocalRegistry) and _is_on_event_loop():
        return None  # all async handlers share a thread, and would share its session
    return ScopedHolder(session)


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
