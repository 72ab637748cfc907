"""The PgQueue of a Flask application."""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Unpack
from weakref import WeakKeyDictionary

from flask import Flask, current_app, has_app_context
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import job_queue
from pgqueue.context import Around, JobContext
from pgqueue.database.opening import call_listeners_in
from pgqueue.errors import ArgumentsError, NotBound, PgQueueError
from pgqueue.flask.commands import commands
from pgqueue.flask.sessions import (
    Database,
    engines_of,
    entering_context,
    held_session,
    lent,
    lent_to_block,
    on_other_bind,
    session_maker,
)

EXTENSION = "pgqueue"
"""Its name in ``app.extensions``."""


class PgQueue(job_queue.PgQueue):
    """The tasks of a Flask application, on the database of its SQLAlchemy object.

    Create it in the module of the tasks, and call :meth:`init_app` for each app; or do both at once
    with ``PgQueue(app, db)``.  Calls that use the database need an application context, as ``db``
    does.

    Args:
        app: The app, to call :meth:`init_app` at once.
        db: Its SQLAlchemy object.
        **options: The other options of :class:`pgqueue.PgQueue`; ``secret`` is by default the app's
            ``SECRET_KEY``.

    Raises:
        ArgumentsError: Only one of ``app`` and ``db`` is given, or something else.
        OptionError: An option has a wrong value.

    Example:
        >>> db = SQLAlchemy()
        >>> queue = PgQueue()
        >>> app = Flask("shop")
        >>> app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://localhost/shop"
        >>> db.init_app(app)
        >>> queue.init_app(app, db)
    """

    command_name = "flask pgqueue"

    def __init__(
        self,
        app: Flask | None = None,
        db: Database | None = None,
        **options: Unpack[job_queue.QueueOptions],
    ) -> None:
        super().__init__(**options)
        self._hosts: WeakKeyDictionary[Flask, HostApplication] = WeakKeyDictionary()
        if app is not None:
            if db is None:
                raise ArgumentsError(
                    f"PgQueue of pgqueue.flask was given {type(app).__name__} alone; give "
                    "PgQueue(app, db), where db is the app's SQLAlchemy(), or for a URL or an "
                    "Engine use pgqueue.PgQueue"
                )
            self.init_app(app, db)

    def init_app(self, app: Flask, db: Database) -> None:
        """Serve this app, on the database of its ``db``; adds the commands ``flask pgqueue``.

        The ``init_app`` of ``db`` may run before or after this.

        Args:
            app: The app.
            db: The SQLAlchemy object of Flask-SQLAlchemy or Flask-SQLAlchemy-Lite, or any object
                with an ``engine`` and a ``session`` that is a ``scoped_session``.

        Raises:
            PgQueueError: The app already has a PgQueue.
            ArgumentsError: ``app`` is no app, or ``db`` has not what is needed.
        """
        _refuse_others(app, db)
        if EXTENSION in app.extensions:
            raise PgQueueError(
                f"the app {app.name!r} has a PgQueue already: call init_app once for each app, "
                "in its factory"
            )
        app.extensions[EXTENSION] = self
        app.cli.add_command(commands)
        self._hosts[app] = HostApplication(app, db, notify=self.notify)

    def bind(self, bind: Any) -> NoReturn:
        """Always raises PgQueueError: ``init_app`` sets the database of this queue."""
        raise PgQueueError(
            "the PgQueue of a Flask application uses the database of its app: give it with "
            "queue.init_app(app, db), or use pgqueue.PgQueue; in a test, use queue.bound_to(...)"
        )

    @contextmanager
    def bound_to(self, bind: "job_queue.Bind") -> Iterator[None]:
        """Put the queue's apps on a Connection or an Engine for a ``with`` block, as in a test.

        ``db.session`` uses it too.  If the queue has one app, the block needs no application
        context.

        Args:
            bind: The Connection or Engine.

        Raises:
            NotBound: The queue has no app.
        """
        if not self._hosts:
            raise NotBound("this PgQueue has no app yet: make the app before queue.bound_to(...)")
        with ExitStack() as bound:
            for host in list(self._hosts.values()):
                bound.enter_context(host.bound_to(bind))
            yield

    @property
    def sessions(self) -> sessionmaker[Session]:
        return self._host().queue.sessions

    @property
    def engine(self) -> Engine:
        """The engine of the current app's ``db``."""
        return self._host().queue.engine

    @property
    def secret(self) -> str | None:
        """What signs the tokens of jobs: the option, or the current app's ``SECRET_KEY``."""
        key = super().secret or self._host().app.secret_key
        return key.decode("latin-1") if isinstance(key, bytes) else key

    def around_jobs(self) -> Around:
        """Run each job in an application context of its own, with its session as ``db.session``."""
        return self._host().around_job

    def around_finish(self) -> Around:
        """Make the session of each block of ``ctx.finish()`` its ``db.session``."""
        return partial(lent_to_block, self._host().db)

    def around_calls(self) -> Callable[[], AbstractContextManager[object]]:
        """Fire schedules and open resources in an application context."""
        return self._host().app.app_context

    def session_of_caller(self) -> Session | None:
        """Return ``db.session`` if the calling code has used it."""
        host = self._host()
        return held_session(host.db) if has_app_context() else None

    def _host(self) -> "HostApplication":
        if not has_app_context():
            bound = [each for each in self._hosts.values() if each.is_bound]
            if len(bound) == 1:
                return bound[0]
            raise NotBound(
                "this PgQueue was used outside of an application context: use it in a request, in "
                "`with app.app_context():`, or in a command of `flask`, as `flask pgqueue worker`"
            )
        host = self._hosts.get(current_app._get_current_object())  # type: ignore[attr-defined]  # a proxy
        if host is None:
            raise NotBound(
                f"this PgQueue does not know the app {current_app.name!r}: call "
                "queue.init_app(app, db) in its factory"
            )
        return host


class HostApplication:
    """One app with its database."""

    def __init__(self, app: Flask, db: Database, *, notify: bool) -> None:
        self.app = app
        self.db = db
        self._notify = notify
        self._queue: job_queue.PgQueue | None = None
        self._engine: Engine | None = None
        self.is_bound = False
        """Whether a test has given the queue another bind."""

    @property
    def queue(self) -> job_queue.PgQueue:
        """A queue without tasks, bound to the app's engine; needs an application context."""
        if self.is_bound and self._queue is not None:
            return self._queue
        # Not in init_app: the app may get its engine only later, and a test replaces it.
        engine = self.db.engine
        if self._queue is None or self._engine is not engine:
            self._queue = job_queue.PgQueue(session_maker(self.db), notify=self._notify)
            self._engine = engine
            call_listeners_in(engine, partial(_in_context, weakref.ref(self.app)))
        return self._queue

    @contextmanager
    def bound_to(self, bind: "job_queue.Bind") -> Iterator[None]:
        with self.app.app_context():
            queue, has_engines = self.queue, bool(engines_of(self.db))
        with queue.bound_to(bind), on_other_bind(self.app, self.db, queue.sessions.kw["bind"]):
            if has_engines:
                queue.sessions.class_ = entering_context(self.app, queue.sessions.class_)
            before, self.is_bound = self.is_bound, True
            try:
                yield
            finally:
                self.is_bound = before

    @contextmanager
    def around_job(self, context: JobContext) -> Iterator[None]:
        with self.app.app_context(), lent(self.db, context):
            yield


def _in_context(app: "weakref.ref[Flask]") -> AbstractContextManager[object]:
    """The context of an app for the listeners of its engine, unless there is one."""
    if has_app_context() or (found := app()) is None:
        return nullcontext()
    return found.app_context()


def _refuse_others(app: Any, db: Any) -> None:
    if not isinstance(app, Flask):
        raise ArgumentsError(f"init_app needs a Flask app and its db, not {type(app).__name__}")
    for name in ("engine", "session"):
        # Statically: a property of `db` may need an application context, and there is none yet.
        if inspect.getattr_static(db, name, None) is None:
            raise ArgumentsError(
                f"init_app needs the app's SQLAlchemy object as db; {type(db).__name__} has no "
                f"{name!r}"
            )
