"""The object an application holds: its tasks, its database, and what an operator may do."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgqueue import schema
from pgqueue.arguments import LARGEST_TEXT, MAX_PAYLOAD_BYTES
from pgqueue.connections.autocommit import autocommitting
from pgqueue.connections.opening import DRIVER, connection_parameters, worker_engine_for_now
from pgqueue.context import Around, JobContext, nothing_around
from pgqueue.errors import ArgumentsError, NotBound, TaskDefinitionError, UnknownTask
from pgqueue.options import Options, TaskOptions, check_queue_name, check_whole
from pgqueue.redaction import redacted
from pgqueue.repository import Change, Jobs, StatusCount, Violation
from pgqueue.sessions import async_sessions
from pgqueue.sessions.callers import executor, in_transaction, may_notify, telling_failures
from pgqueue.tasks import Task
from pgqueue.tasks.address import address_of, default_name
from pgqueue.tasks.decorator import TaskDecorator

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

P = ParamSpec("P")
R = TypeVar("R")

Bind = str | Engine | sessionmaker[Any]


class PgQueue:
    """The tasks of an application, and the database their jobs live in.

    ``bind`` is a URL, an Engine or a sessionmaker; leave it away and call :meth:`bind` later.
    ``notify=False`` turns wake-ups off, for poolers that cannot carry them: workers then find
    new jobs when they poll.  ``max_payload_bytes`` is how large the arguments of one job may be
    as JSON; whoever enqueues is held to it, and a worker runs what is there.
    """

    def __init__(
        self,
        bind: "Bind | None" = None,
        *,
        notify: bool = True,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        check_whole("PgQueue: ", "max_payload_bytes", max_payload_bytes, 1024, LARGEST_TEXT)
        self.notify = notify
        self.max_payload_bytes = max_payload_bytes
        self.tasks: dict[str, Task[..., Any]] = {}
        self._sessions: sessionmaker[Session] | None = None
        self._pid = os.getpid()
        if bind is not None:
            self.bind(bind)

    def bind(self, bind: "Bind") -> None:
        """Say which database the jobs live in."""
        _refuse_async(bind)
        if isinstance(bind, sessionmaker):
            self._sessions = bind
        elif isinstance(bind, Engine):
            self._sessions = sessionmaker(bind)
        elif isinstance(bind, str):
            # Every slot of a worker may need a connection; the default pool has 15.
            engine = create_engine(_on_psycopg(bind), max_overflow=100)
            self._sessions = sessionmaker(engine)
        else:
            raise ArgumentsError(
                f"PgQueue is bound to a URL, an Engine or a sessionmaker, not {type(bind).__name__}"
            )
        bound = self._sessions.kw.get("bind")
        if isinstance(bound, Engine):
            _refuse_others(bound.dialect.name)

    @property
    def engine(self) -> Engine:
        """The engine behind :meth:`session`."""
        engine = self.sessions.kw.get("bind")
        if not isinstance(engine, Engine):
            raise NotBound("the sessionmaker of this PgQueue has no engine: give it bind=engine")
        if os.getpid() != self._pid:
            # Sockets inherited from the parent belong to the parent: forget them, do not close.
            engine.dispose(close=False)
            self._pid = os.getpid()
        return engine

    def autocommitting(self) -> AbstractContextManager[Connection]:
        """A connection of :attr:`engine`, on which each statement is its own transaction."""
        return autocommitting(self.engine)

    @property
    def sessions(self) -> sessionmaker[Session]:
        if self._sessions is None:
            raise NotBound("this PgQueue has no database yet: call queue.bind(engine) first")
        return self._sessions

    def session(self) -> Session:
        """A new Session; close it, or use it in a ``with`` block."""
        self.engine  # noqa: B018  # forgets connections inherited by a fork
        return self.sessions()

    def async_session(self) -> "AsyncSession":
        """A new AsyncSession around a Session of the sessionmaker, on psycopg.

        It connects as :attr:`engine` does, and reaches no other engine.
        """
        engine = self.engine
        return async_sessions.new_session(
            self.sessions, engine, lambda: connection_parameters(engine)
        )

    def upgrade(self) -> None:
        """Create the tables, or bring them up to date; safe from many processes at once.

        For tables in a history of their own.  An application with Alembic better calls
        :func:`pgqueue.schema.upgrade` from a revision of its own.
        """
        with worker_engine_for_now(self.engine) as engine:
            schema.upgrade_database(engine)

    def around_jobs(self) -> Around:
        """What a worker puts around each handler; for a framework to override.

        Asked for once by each run of a worker, in the thread that runs it.
        """
        return nothing_around

    def told_to_children(self) -> dict[str, str]:
        """What :meth:`in_child` needs to know of this process; for a framework to override."""
        return {"url": self.engine.url.render_as_string(hide_password=False)}

    def in_child(self, told: Mapping[str, str]) -> AbstractContextManager[object]:
        """What a worker's child process enters before its first job, for a framework to override.

        Binds this queue to the worker's database, unless the import of its module has done so.
        """
        if self._sessions is None or self.told_to_children() != told:
            self.bind(told["url"])
        return nullcontext()

    @overload
    def task(self, function: Callable[Concatenate[Session, JobContext, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[JobContext, Session, P], R], /) -> Task[P, R]: ...
    @overload
    def task(
        self, function: "Callable[Concatenate[AsyncSession, JobContext, P], R]", /
    ) -> Task[P, R]: ...
    @overload
    def task(
        self, function: "Callable[Concatenate[JobContext, AsyncSession, P], R]", /
    ) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Session, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: "Callable[Concatenate[AsyncSession, P], R]", /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[JobContext, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Make a function a task: bare, or with options.

        ``name`` (module and function name), ``queue`` ("default"), ``priority`` (0 first, 9
        last, default 5), ``max_attempts`` (10), ``timeout`` (None), ``retry``
        (``Retry.exponential()``), ``unique_key`` (a callable that is given by name the arguments
        it names), ``transactional`` (True for a handler that asks for a Session), ``executor``
        ("thread"; "process" runs each handler in a process of its own, which a timeout kills),
        ``memory_limit`` (None; bytes of address space of such a process), ``secret_args`` (names of
        arguments that no error, log line or command shows, as :data:`Secret` says of one).

        A Session or AsyncSession, and a JobContext, as the first parameters are filled in when
        the job runs and are not arguments of the job.
        """
        if function is not None:
            return self._register(function, options)
        return lambda function: self._register(function, options)

    def find(self, name: str) -> Task[..., Any]:
        """The task of that name."""
        if name not in self.tasks:
            raise UnknownTask(
                f"no task {name!r} is registered; known are {', '.join(sorted(self.tasks)) or '-'}"
            )
        return self.tasks[name]

    @telling_failures()
    def cancel(self, session: "Session | Connection | scoped_session[Any]", job_id: int) -> Change:
        """Cancel a job in the caller's transaction; returns what that has done.

        A waiting job ends as cancelled.  A running one is asked to stop
        (:meth:`JobContext.is_cancelled`), and ends as cancelled however its handler ends; the
        writes of a transactional handler then roll back.  An ended job stays as it is.  Raises
        JobNotFound.
        """
        job_id = _checked_id(job_id)
        return Jobs(in_transaction(session, f"cancel of job {job_id}")).cancel(job_id)

    @telling_failures()
    def requeue(self, session: "Session | Connection | scoped_session[Any]", job_id: int) -> Change:
        """Put a failed or cancelled job back, with all its attempts before it again.

        Any other job stays as it is; so does, for that moment, one that was cancelled while a
        worker was about to start it.  Raises JobNotFound, and DuplicateJob when another
        unfinished job has taken its unique key.
        """
        job_id = _checked_id(job_id)
        connection = in_transaction(session, f"requeue of job {job_id}")
        notify = self.notify and may_notify(connection)
        return Jobs(connection).requeue(job_id, notify=notify)

    @telling_failures()
    def pause(self, session: "Session | Connection | scoped_session[Any]", queue: str) -> None:
        """Have all workers pass a queue by, within two seconds; enqueuing goes on."""
        check_queue_name(queue)
        Jobs(executor(session)).pause(queue)

    @telling_failures()
    def resume(self, session: "Session | Connection | scoped_session[Any]", queue: str) -> None:
        """Undo :meth:`pause`."""
        check_queue_name(queue)
        Jobs(executor(session)).resume(queue)

    @telling_failures()
    def check(self, session: "Session | Connection | scoped_session[Any]") -> list[Violation]:
        """Every row that breaks an invariant; empty when all is sound.  Reads all jobs."""
        return Jobs(executor(session)).violations()

    @telling_failures()
    def counts(self, session: "Session | Connection | scoped_session[Any]") -> list[StatusCount]:
        """How many jobs stand where, by queue.  Reads all jobs."""
        return Jobs(executor(session)).counts()

    def __repr__(self) -> str:
        """Names the database without its password."""
        if self._sessions is None:
            return "<PgQueue not bound>"
        bound = self._sessions.kw.get("bind")
        # A Connection has its engine behind it; binds={Job: engine} leaves nothing here.
        engine = None if bound is None else bound.engine
        return f"<PgQueue {redacted(str(engine.url)) if engine else 'without an engine'}>"

    def _register(self, function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
        if not callable(function) or isinstance(function, (type, Task)):
            raise TaskDefinitionError(
                f"{function!r} cannot be made a task: decorate a function or a coroutine function"
            )
        name = options["name"] if "name" in options else default_name(function)
        task: Task[..., Any] = Task(function, Options.of_task(name, options), self)
        known = self.tasks.get(name)
        if known is not None and address_of(known.function) != address_of(function):
            raise TaskDefinitionError(
                f"task {name} is registered already, for {known.function!r}; give name=..."
            )
        self.tasks[name] = task
        return task


def _on_psycopg(url: str) -> Any:
    """``postgres://`` and ``postgresql://`` mean psycopg 3, with every SQLAlchemy version.

    So do the URLs of async drivers: what a queue itself does is synchronous.
    """
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgres", "postgresql"):
        url = f"{DRIVER}{separator}{rest}"
    parsed = make_url(url)
    _refuse_others(parsed.get_backend_name())
    return parsed.set(drivername=DRIVER) if parsed.get_dialect().is_async else parsed


def _refuse_async(bind: Any) -> None:
    """Refuse now what would fail with MissingGreenlet at the first use."""
    bound = bind.kw.get("bind") if isinstance(bind, sessionmaker) else bind
    makes_async = async_sessions.is_async_session(getattr(bind, "class_", None))
    if makes_async or getattr(getattr(bound, "dialect", None), "is_async", False):
        raise ArgumentsError(
            "PgQueue works synchronously, and is bound here to an async engine: give it the URL, "
            "or an Engine of create_engine(url.set(drivername='postgresql+psycopg')); "
            "enqueue_async takes an AsyncSession on any engine of that database"
        )


def _refuse_others(database: str) -> None:
    if database != "postgresql":
        raise ArgumentsError(
            f"PgQueue needs a PostgreSQL database, not {database}; "
            "give a URL that begins with postgresql://"
        )


def _checked_id(job_id: Any) -> int:
    if type(job_id) is not int:
        raise ArgumentsError(
            f"a job's id is needed here, not {type(job_id).__name__}: give job.id, a whole number"
        )
    return job_id
