"""``PgQueue``, the object that an application holds: its tasks, its database and its operations."""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from inspect import isasyncgenfunction, isgeneratorfunction
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    overload,
)
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from pgqueue import schema
from pgqueue.arguments import LARGEST_TEXT, MAX_PAYLOAD_BYTES, SCALARS, Encoder
from pgqueue.batches import OUTCOMES, ExtendedBatch, NewBatch, OpenBatch, in_words
from pgqueue.checks import (
    AT_ONCE,
    check,
    check_application,
    check_queue_name,
    check_version,
    check_whole,
    checked_id,
    span,
)
from pgqueue.claims import OpenClaim
from pgqueue.context import Around, JobContext, Resource, name_of, nothing_around
from pgqueue.database import async_sessions
from pgqueue.database.autocommit import autocommitting, in_savepoint
from pgqueue.database.handlers import session_in_savepoint
from pgqueue.database.opening import (
    connect_idle,
    connection_parameters,
    on_psycopg,
    refuse_others,
    worker_engine_for_now,
)
from pgqueue.errors import (
    ArgumentsError,
    NotBound,
    OptionError,
    PgQueueError,
    TaskDefinitionError,
    UnknownTask,
    WaitTimeout,
)
from pgqueue.events import AttemptCallback
from pgqueue.middleware import Middleware, layers_of, middleware_of, resource_of
from pgqueue.models import DEFAULT_QUEUE, Job
from pgqueue.nodes import CITUS, Node, checked_nodes, coordinator_of, nodes_of_citus, number_in_list
from pgqueue.operations import AsyncOperator, Operations, Operator
from pgqueue.options import Options, TaskOptions
from pgqueue.redaction import redacted
from pgqueue.repository.job_state import JobState
from pgqueue.rules.job_tokens import id_in_token, token_of
from pgqueue.rules.limits import (
    Limit,
    by_name,
    limits_of_queues,
)
from pgqueue.rules.retention import DEFAULT_KEEP, Keep, Retention, keep_of
from pgqueue.rules.ticks import checked_rule
from pgqueue.schedules import (
    Args,
    CatchUp,
    Days,
    OverlapName,
    ScheduleOptions,
    Schedules,
    declaration,
)
from pgqueue.tasks import Task, queues_of
from pgqueue.tasks.address import address_of, default_name
from pgqueue.tasks.by_name import OptionsByName, enqueue_by_name
from pgqueue.tasks.decorator import TaskDecorator
from pgqueue.tasks.duplicates import running_job
from pgqueue.tasks.several import enqueue_all
from pgqueue.tasks.task import MetaSource
from pgqueue.views import Views
from pgqueue.waiting import waits_on
from pgqueue.workflows import ExtendedWorkflow, NewWorkflow, OpenWorkflow

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=AttemptCallback)
M = TypeVar("M", bound=Middleware)
Opens = TypeVar("Opens", bound=Resource[Any])
S = TypeVar("S", bound=MetaSource)
T = TypeVar("T", bound=Task[..., Any])

_queues: WeakSet["PgQueue"] = WeakSet()

Bind = Union[str, URL, Engine, Connection, "AsyncConnection", sessionmaker[Any]]


class QueueOptions(TypedDict, total=False):
    """The options of :class:`PgQueue`, for subclasses that pass them on."""

    application: str
    version: str
    notify: bool
    max_payload_bytes: int
    keep: Keep | timedelta | None
    queue_keep: Mapping[str, Keep | timedelta | None] | None
    queue_limits: Mapping[str, Limit | Sequence[Limit]] | None
    secret: str | None
    nodes: Sequence[str | URL] | None
    encoders: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] | None


class PgQueue(Operations):
    """The tasks of an application, and the database that stores their jobs.

    Args:
        bind: The database: a URL, an Engine, a sessionmaker, or in a test a Connection.  Omit it to
            call :meth:`bind` later.
        notify: Whether an enqueue wakes workers by NOTIFY.  False is for poolers that do not
            support it: workers then find new jobs by polling.
        max_payload_bytes: The largest JSON of the arguments of one job, in bytes.  An enqueue
            checks the limit, workers do not.
        keep: How long ended jobs stay: a :class:`Keep`, a timedelta for succeeded and cancelled
            jobs, or None for ever.  By default 14 days, and 90 days for failed jobs.  The option
            ``keep`` of a task takes precedence.
        queue_keep: The same for single queues, by their names.
        queue_limits: Limits of the jobs of a queue, by its name: a :class:`Limit`, or several.
        application: The name of this application, if others share the tables.  Workers then pause
            schedules and delete batches of their own application only.
        version: The version of the application, for example a tag or a commit.  Workers note which
            one they run, since when, and in which version an error has first occurred
            (:class:`Deploy`).
        secret: The key that signs the tokens of :meth:`token`.
        nodes: The URLs of several databases that each have tables and workers of their own, or
            ``"citus"`` for the nodes of the Citus cluster in which ``bind`` is (:attr:`nodes`).
        encoders: How arguments of types of the application are stored: a dict from each type to
            two functions.  One returns plain JSON data, the other makes the value of this data.

    Raises:
        OptionError: An option has a wrong value.
        ArgumentsError: ``bind`` is something else, or asynchronous.

    Example:
        >>> queue = PgQueue("postgresql://localhost/shop", keep=timedelta(days=30))
        >>> @queue.task(max_attempts=3)
        ... def greet(name: str) -> None:
        ...     print(f"Hello, {name}")
    """

    command_name = "pgqueue"
    """How its commands are called in a shell."""

    def __init__(
        self,
        bind: "Bind | None" = None,
        *,
        notify: bool = True,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        keep: Keep | timedelta | None = DEFAULT_KEEP,
        queue_keep: Mapping[str, Keep | timedelta | None] | None = None,
        queue_limits: Mapping[str, Limit | Sequence[Limit]] | None = None,
        application: str = "",
        version: str = "",
        secret: str | None = None,
        nodes: Sequence[str | URL] | None = None,
        encoders: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] | None = None,
    ) -> None:
        check_whole("PgQueue: ", "max_payload_bytes", max_payload_bytes, 1024, LARGEST_TEXT)
        self.notify = notify
        self.max_payload_bytes = max_payload_bytes
        self.tasks: dict[str, Task[..., Any]] = {}
        check_application(application)
        self.application = application
        check_version(version)
        self.version = version
        if secret is not None and (not isinstance(secret, str) or not secret):
            raise OptionError(
                "PgQueue: secret must be a text that is not empty; give random characters"
            )
        self._secret = secret
        self.encoders: dict[type, Encoder] = _checked_encoders({} if encoders is None else encoders)
        self._nodes = nodes if nodes is None or nodes == CITUS else checked_nodes(nodes)
        self.schedules: Schedules = Schedules(self.tasks, self.find, application)
        self.attempt_callbacks: list[AttemptCallback] = []
        self.middlewares: list[Callable[[JobContext], Any]] = []
        self.meta_sources: list[MetaSource] = []
        self.resources: dict[Any, Callable[[], Any]] = {}
        """By the registered function: what returns its context manager."""
        self.provided: Mapping[Any, Any] = {}
        """What :meth:`provide` has given in place of resources, by their functions."""
        self._keep = keep_of(keep, "PgQueue: ")
        self._queue_keep = _checked_queues(queue_keep or {})
        for queue in queue_limits if isinstance(queue_limits, Mapping) else ():
            check_queue_name(queue, "PgQueue: queue_limits: ")
        self.queue_limits: dict[str, tuple[Limit, ...]] = limits_of_queues(queue_limits or {})
        self._sessions: sessionmaker[Session] | None = None
        self._pid = os.getpid()
        _queues.add(self)
        if bind is not None:
            self.bind(bind)

    def bind(self, bind: "Bind") -> None:
        """Set the database that stores the jobs.

        In a test, give a Connection or AsyncConnection: the queue then does everything in the
        transaction of this connection, and a rollback undoes it all.

        Args:
            bind: A URL, an Engine, a sessionmaker, a Connection or an AsyncConnection.

        Raises:
            ArgumentsError: It is something else, an async engine, or another database than
                PostgreSQL.
        """
        bind = async_sessions.sync_connection_of(bind)
        _refuse_async(bind)
        if isinstance(bind, sessionmaker):
            self._sessions = bind
        elif isinstance(bind, Engine | Connection):
            self._sessions = sessionmaker(bind)
        elif isinstance(bind, str | URL):
            # Every slot of a worker may need a connection; the default pool has 15.
            engine = create_engine(on_psycopg(bind), max_overflow=100)
            self._sessions = sessionmaker(engine)
        else:
            raise ArgumentsError(
                "PgQueue is bound to a URL, an Engine, a Connection or a sessionmaker, not "
                f"{type(bind).__name__}"
            )
        bound = self._sessions.kw.get("bind")
        if isinstance(bound, Engine | Connection):
            refuse_others(bound.dialect.name)

    @property
    def secret(self) -> str | None:
        """What signs the tokens of jobs."""
        return self._secret

    def token(self, job: Job | int) -> str:
        """Return a signed token of a job, which a web page may have in place of the id.

        Ids are consecutive, so a page that takes an id lets its user read other jobs.  A token
        shows the id, but cannot be made for another one without the secret.

        Args:
            job: The job, or its id.

        Returns:
            The token, a text that a URL may contain.

        Raises:
            OptionError: The queue has no ``secret``.
        """
        job_id = checked_id(job.id if isinstance(job, Job) else job)
        return token_of(self._signing_secret(), job_id)

    def job_id(self, token: str, *, max_age: timedelta = timedelta(days=1)) -> int:
        """Return the id of the job of which :meth:`token` has made a token.

        The job may have been deleted since.

        Args:
            token: The token.
            max_age: How old the token may be, in whole seconds.

        Returns:
            The id of the job.

        Raises:
            BadToken: The token was changed, was made with another secret, or is older than
                ``max_age``.
            OptionError: The queue has no ``secret``, or ``max_age`` is no timedelta.
        """
        if not isinstance(max_age, timedelta):
            raise OptionError(f"job_id: max_age is {max_age!r}; give a timedelta")
        return id_in_token(self._signing_secret(), token, max_age=max_age)

    def _signing_secret(self) -> str:
        if not self.secret:
            raise OptionError(
                "there is no secret to sign tokens of jobs: give PgQueue(secret=...), in a Flask "
                "application the SECRET_KEY"
            )
        return self.secret

    def wait(self, job: Job | int, *, timeout: timedelta) -> JobState:
        """Wait until a job has ended, and return its state.

        The worker that ends the job notifies this process.  Without notifications, as behind a
        pooler, the wait ends up to a second later.  One thread and one connection, outside of the
        pool, serve all waits of the process.

        Args:
            job: The job or its id.  The transaction that has enqueued it must be committed.
            timeout: How long to wait.

        Returns:
            What :meth:`job_state` returns, after the end of the job.

        Raises:
            WaitTimeout: The job has not ended in this time.  It goes on.
            JobNotFound: The job does not exist, its transaction is not committed, or it was deleted
                during the wait.
            PgQueueError: A handler waits, which would occupy its slot; or the queue is bound to a
                Connection, as in a test, and the job has not ended.
        """
        job_id, seconds = _checked_wait(job, timeout)
        if self.connection is not None:
            return self._state_in_test(job_id)
        ended = waits_on(self.engine, notify=self.notify).wait(job_id, seconds)
        return self._state_after_wait(job_id, timeout) if ended is None else ended

    async def wait_async(self, job: Job | int, *, timeout: timedelta) -> JobState:
        """:meth:`wait` for a coroutine.  A thousand of them at once need one connection too.

        Args:
            job: The job or its id.
            timeout: How long to wait.

        Returns:
            What :meth:`job_state` returns, after the end of the job.

        Raises:
            WaitTimeout, JobNotFound, PgQueueError: As :meth:`wait`.
        """
        job_id, seconds = _checked_wait(job, timeout)
        if self.connection is not None:
            return await greenlet_spawn(self._state_in_test, job_id)
        ended = await waits_on(self.engine, notify=self.notify).wait_async(job_id, seconds)
        if ended is not None:
            return ended
        return await asyncio.to_thread(self._state_after_wait, job_id, timeout)

    def _state_after_wait(self, job_id: int, timeout: timedelta) -> JobState:
        """The state of a job that may have ended in the last moment.  Raises WaitTimeout."""
        with self.session() as session:
            state = self.job_state(session, job_id)
        if state.has_ended:
            return state
        raise WaitTimeout(
            f"job {job_id} has not ended within {timeout}: it is {state.status}, attempt "
            f"{state.attempt} of {state.max_attempts}, and goes on; wait again, ask "
            f"queue.job_state(session, {job_id}), or run `{self.command_name} jobs {job_id}`, "
            "which says why",
            state,
        )

    def _state_in_test(self, job_id: int) -> JobState:
        with self.session() as session:
            state = self.job_state(session, job_id)
        if state.has_ended:
            return state
        raise PgQueueError(
            f"job {job_id} is {state.status}, and would never end: this PgQueue is bound to a "
            "Connection, as in a test, and no worker sees its transaction; first call "
            "run_jobs(session) or Worker(queue).run_until_empty()"
        )

    @contextmanager
    def bound_to(self, bind: "Bind") -> Iterator[None]:
        """Bind the queue to another database for a ``with`` block, as in a test.

        The sessions in the block have the options of the queue's previous sessionmaker.

        Args:
            bind: A Connection or an Engine; or the URL of a node, whose connections are closed at
                the end.
        """
        before = self._sessions
        self.bind(bind)
        try:
            if before is not None and not isinstance(bind, sessionmaker):
                now = self.sessions.kw["bind"]
                self.bind(sessionmaker(**{**before.kw, "class_": before.class_, "bind": now}))
            yield
        finally:
            if isinstance(bind, str | URL):
                self.engine.dispose()
            self._sessions = before

    @property
    def engine(self) -> Engine:
        """The engine that :meth:`session` uses."""
        engine = self.sessions.kw.get("bind")
        if isinstance(engine, Connection):
            return engine.engine
        if not isinstance(engine, Engine):
            raise NotBound("the sessionmaker of this PgQueue has no engine: give it bind=engine")
        if os.getpid() != self._pid:
            # After a fork, inherited sockets belong to the parent: drop them without closing.
            engine.dispose(close=False)
            self._pid = os.getpid()
        return engine

    @property
    def nodes(self) -> list[Node]:
        """The nodes of ``nodes=...``, in their order; those of Citus are read from its catalog.

        Empty without the option.  A session decides on which node a job is enqueued, cancelled or
        requeued; ``with queue.bound_to(node.url)`` puts everything else on a node.
        """
        if isinstance(self._nodes, list):
            return list(self._nodes)
        return [] if self._nodes is None else nodes_of_citus(self.engine)

    def coordinator(self) -> URL | None:
        """The URL of the coordinator, if the queue is bound to another node of Citus."""
        return coordinator_of(self.engine) if self._nodes == CITUS else None

    @property
    def connection(self) -> Connection | None:
        """The Connection that the queue is bound to, as in a test; None if it has an engine."""
        bound = self.sessions.kw.get("bind")
        return bound if isinstance(bound, Connection) else None

    @property
    def retention(self) -> Retention:
        """The rules by which the workers of this application delete ended jobs."""
        tasks = {name: task.settings.keep for name, task in self.tasks.items()}
        return Retention(self._keep, self._queue_keep, tasks, self.application)

    def autocommitting(self) -> AbstractContextManager[Connection]:
        """A connection of :attr:`engine`, on which each statement is its own transaction.

        If the queue is bound to a Connection: this connection, in a savepoint.
        """
        connection = self.connection
        return autocommitting(self.engine) if connection is None else in_savepoint(connection)

    @contextmanager
    def read_committed(self) -> Iterator[Session]:
        """A Session in a transaction of its own, which is committed at the end.

        At a stricter level PostgreSQL refuses to change a job that another transaction has just
        changed, and the caller has no transaction to repeat.  If the queue is bound to a
        Connection: in a savepoint.
        """
        if self.connection is not None:
            with self.session() as session, session.begin():
                yield session
            return
        with connect_idle(self.engine) as connection:
            connection.execution_options(isolation_level="READ COMMITTED")
            with Session(connection) as session, session.begin():
                yield session

    @property
    def sessions(self) -> sessionmaker[Session]:
        if self._sessions is None:
            raise NotBound("this PgQueue has no database yet: call queue.bind(engine) first")
        return self._sessions

    def session(self) -> Session:
        """Return a new Session; close it, or use it in a ``with`` block.

        If the queue is bound to a Connection, the Session is in a savepoint of its transaction.

        Returns:
            The Session, without a transaction yet.

        Raises:
            NotBound: The queue has no database yet.

        Example:
            >>> with queue.session() as session, session.begin():
            ...     job = mail.enqueue(session, "ann@example.org")
        """
        if (connection := self.connection) is not None:
            return session_in_savepoint(self.sessions, connection)
        self.engine  # noqa: B018  # forgets connections inherited by a fork
        return self.sessions()

    def async_session(self) -> "AsyncSession":
        """Return a new AsyncSession on psycopg, around a Session of the sessionmaker.

        The AsyncSession connects as :attr:`engine` does and uses no other engine.  If the queue is
        bound to a Connection, the AsyncSession uses this connection; one that does not come from an
        AsyncConnection blocks the event loop.

        Returns:
            The AsyncSession.

        Raises:
            NotBound: The queue has no database yet.
        """
        if (connection := self.connection) is not None:
            return async_sessions.session_in_savepoint(self.sessions, connection)
        engine = self.engine
        return async_sessions.new_session(
            self.sessions, engine, lambda: connection_parameters(engine)
        )

    def upgrade(self) -> None:
        """Create or upgrade the tables; safe to call from several processes at once.

        The tables get a migration history of their own.  An application that uses Alembic should
        call :func:`pgqueue.schema.upgrade` from one of its revisions instead.

        Upgrades the database to which the queue is bound, and no other.  If it is one of
        :attr:`nodes`, it gets its number, also if the application's history has made the tables.

        Raises:
            SchemaTooNew: The tables are of a newer version than this code supports.
            SchemaError: The tables cannot be upgraded; the message says why.
            NotBound: The queue has no database, or is bound to a Connection.
        """
        if self.connection is not None:
            raise NotBound(
                "this PgQueue is bound to a Connection, and upgrade() creates no tables in its "
                "transaction: first call upgrade() on a PgQueue that is bound to the engine"
            )
        with worker_engine_for_now(self.engine) as engine:
            schema.upgrade_database(engine)
            if isinstance(self._nodes, list):
                number_in_list(engine, self._nodes)

    @property
    def views(self) -> Views:
        """What reads jobs, queues, limits, schedules, workers and statistics."""
        return Views(self)

    def operate(self, actor: str, *, reason: str = "") -> Operator:
        """Return an operator, which acts on jobs, queues, limits, schedules and workers, and writes
        each action into the log of operators.

        Args:
            actor: Who acts, for the log.
            reason: Why, for the log.

        Returns:
            The operator.

        Example:
            >>> ada = queue.operate("ada", reason="wrong template")
            >>> run = ada.cancel(Selection(task="mail", status="pending"))
        """
        return Operator(self, actor, reason)

    def operate_async(self, actor: str, *, reason: str = "") -> AsyncOperator:
        """Return an operator for coroutines: each method is awaited, and runs in a thread.

        Args:
            actor: Who acts, for the log.
            reason: Why, for the log.

        Returns:
            The operator.
        """
        return AsyncOperator(Operator(self, actor, reason))

    def dashboard(self, *, authorize: Callable[[Any], Any], **options: Any) -> Any:
        """Return the dashboard of this queue, to mount in a web application.

        Needs ``sqlalchemy-pgqueue[dashboard]``.

        Args:
            authorize: A function that is given a request, and returns the
                :class:`~pgqueue.dashboard.Access` of its user, or None to refuse the request.
            **options: The other parameters of :class:`~pgqueue.dashboard.Dashboard`.

        Returns:
            The :class:`~pgqueue.dashboard.Dashboard`.
        """
        # By its name: nothing else here may need a web library, and no worker imports one.
        made = import_module("pgqueue.dashboard")
        return made.Dashboard(self, authorize=authorize, **options)

    def around_jobs(self) -> Around:
        """Return the context manager around each handler in a worker; a framework may override it.

        Each run of a worker calls this once, in the thread that runs the worker.
        """
        return nothing_around

    def around_finish(self) -> Around:
        """Return the context manager around each block of ``ctx.finish()``, whose ``session`` the
        context has; a framework may override it.

        Each run of a worker calls this once, in the thread that runs the worker.
        """
        return nothing_around

    def around_calls(self) -> Callable[[], AbstractContextManager[object]]:
        """Return the context manager around what workers call of the application outside of
        handlers: functions of schedules, and resources; a framework may override it.

        A run of a worker calls this in the thread that runs the worker.
        """
        return nullcontext

    def session_of_caller(self) -> Session | None:
        """Return the Session that a framework keeps for the calling code; here there is none."""
        return None

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
        """Make a function a task; used bare or with options.

        A Session or AsyncSession and a JobContext among the first parameters are supplied when the
        job runs; they are not arguments of the job.

        Args:
            function: The function or coroutine function that jobs call.
            **options: The options of the task, such as ``queue``, ``max_attempts``, ``timeout`` and
                ``retry``.  The page "Options" of the reference lists them with their defaults.
                ``name`` is by default that of the module and the function.

        Returns:
            The task, which is called as the function was.

        Raises:
            TaskDefinitionError: The function cannot be a task, or another task has its name.
            OptionError: An option has a wrong value.
            UnknownOption: There is no such option.

        Example:
            >>> @queue.task(queue="payments", timeout=timedelta(seconds=30))
            ... def refund(session: Session, order_id: int) -> None:
            ...     session.get_one(Order, order_id).is_paid = False
            >>> job = refund.enqueue(session, 7)
        """
        if function is not None:
            return self._register(function, options)
        return lambda function: self._register(function, options)

    def schedule(
        self,
        cron: str | None = None,
        *,
        every: timedelta | None = None,
        timezone: str = "UTC",
        days: Days = "or",
        name: str | None = None,
        args: Args = (),
        catch_up: CatchUp = "last",
        overlap: OverlapName = "allow",
        at_once: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> Callable[[T], T]:
        """Enqueue jobs of a task regularly.

        Write it above ``@queue.task``, once for each schedule of the task.

        Workers write the schedules of the code into the table when they start.  Each tick is fired
        once, however many workers run.  :attr:`schedules` changes schedules at run time.

        Args:
            cron: Five fields, minute, hour, day of month, month, day of week, in the local time of
                ``timezone``.  A time that is skipped when the clocks change runs once, at the end
                of the gap.  A time that comes twice runs once, the first time.  An expression whose
                hour is ``*`` runs in each hour that passes.  ``@hourly``, ``@daily``, ``@weekly``,
                ``@monthly`` and ``@yearly`` are short forms.
            days: What a day must match if the expression has a day of the month and a day of the
                week: "or", as in cron, one of the two; "and", as in Celery, both.
            every: Instead of ``cron``, an interval of at least a second, counted from 1970-01-01
                00:00 UTC.
            timezone: The IANA name of a zone.
            name: The name of the schedule, by default that of the task; the second schedule of a
                task needs one.
            args: The arguments of the jobs: a tuple, or a dict by name; or a function that takes
                the tick, in the zone of the schedule, and returns one of them, or None for a tick
                without a job.
            catch_up: How many missed ticks get a job when a worker runs again.  "last": one; a
                number up to 1000: the last so many; "none": none that is more than a minute late.
            overlap: What happens to a tick while the job of the tick before is unfinished: "allow"
                enqueues its job, "skip" drops the tick, "wait" lets it wait.
            at_once: Whether the first tick is when the first worker writes the schedule into the
                table, and not the next of the rule.  Later starts and changes fire no tick.
            **options: ``queue``, ``priority``, ``max_attempts``, ``unique_key``, ``meta`` and
                ``tags`` of the jobs.

        Returns:
            A decorator of a task, which returns the task.

        Raises:
            OptionError: The rule or an option is wrong.
            ArgumentsError, PayloadError: The arguments do not fit the task.
            TaskDefinitionError: Another schedule of the code has the name.

        Example:
            >>> @queue.schedule("0 3 * * *", timezone="Europe/Berlin")
            ... @queue.task
            ... def clean() -> None: ...
        """

        def declare(task: T) -> T:
            own = name or str(getattr(task, "name", "of a function"))
            rule = checked_rule(f"schedule {own}: ", cron, every, timezone, days)
            new = declaration(task, rule, own, args, catch_up, overlap, options, at_once=at_once)
            self.schedules.declare(task, new)
            return task

        return declare

    def middleware(self, function: M) -> M:
        """Register a context manager that workers enter around each handler; the first one
        registered is the outermost.

        The function takes the :class:`JobContext` and yields once, or returns a context manager.
        It runs in the handler's thread, coroutine or child process.  The pending changes of a
        transactional handler's session are flushed before the exit, and committed after it.  An
        error of the handler passes through and must not be suppressed; an error of the middleware
        fails the attempt.  Async handlers may have async context managers; plain handlers need
        plain ones.

        Args:
            function: A generator function of the :class:`JobContext` that yields once, or a
                function that returns a context manager.

        Returns:
            The function.

        Raises:
            TaskDefinitionError: It is no such function.

        Example:
            >>> @queue.middleware
            ... def log_attempt(ctx: JobContext) -> Iterator[None]:
            ...     log.info("attempt %s of %s", ctx.attempt, ctx.task)
            ...     yield
        """
        self.middlewares.append(middleware_of(function))
        return function

    def resource(self, function: Opens) -> Opens:
        """Register what each worker opens once, for its handlers, when it starts.

        The function yields once, or returns a context manager.  What is before the ``yield`` runs
        when a worker starts, before its first job; what is behind it when the worker stops, after
        its last handler.  Handlers get the value by :meth:`JobContext.resource`.  Resources are
        opened in the order of their registration.  A worker whose resource cannot be opened does
        not start.

        An async function is run on the event loop of the async handlers, any other in a thread of
        the worker.  A child process opens a resource, not an async one, when a handler first asks
        for it.

        Args:
            function: A generator function without parameters that yields once, or a function that
                returns a context manager.

        Returns:
            The function.

        Raises:
            TaskDefinitionError: It is no such function.

        Example:
            >>> @queue.resource
            ... def open_bank() -> Iterator[BankClient]:
            ...     with BankClient("https://bank.example") as client:
            ...         yield client
        """
        self.resources[function] = resource_of(function)
        return function

    @contextmanager
    def provide(self, function: Resource[Any], value: Any) -> Iterator[None]:
        """Give handlers a value in place of a resource for a ``with`` block.

        For tests, and for tasks that are called outside of workers, where nothing is opened.  Holds
        for all threads of the process.  A worker that starts in the block does not open the
        resource.

        Args:
            function: The function that :meth:`resource` has registered.
            value: What :meth:`JobContext.resource` returns for it.

        Raises:
            OptionError: The function is not registered.

        Example:
            >>> with queue.provide(open_bank, FakeBank()):
            ...     ran = run_jobs(session)
        """
        if function not in self.resources:
            raise OptionError(
                f"provide: {name_of(function)} is no resource of this queue; write @queue.resource "
                "above it"
            )
        before = self.provided
        self.provided = {**before, function: value}
        try:
            yield
        finally:
            self.provided = before

    def on_enqueue(self, function: S) -> S:
        """Register a function whose dict is added to the ``meta`` of each job that is enqueued.

        A key that ``task.options(meta=...)`` sets keeps its value.  An error of the function is
        raised by the enqueue.

        Args:
            function: Takes the :class:`Task`, and returns a dict of JSON data or None.

        Returns:
            The function.

        Raises:
            ArgumentsError: It cannot be called.

        Example:
            >>> @queue.on_enqueue
            ... def language_of_request(task: Task) -> dict[str, str]:
            ...     return {"language": "de"}
        """
        if not callable(function):
            raise ArgumentsError(f"on_enqueue takes a function of one Task, not {function!r}")
        self.meta_sources.append(function)
        return function

    def on_attempt_end(self, callback: C) -> C:
        """Register a function that workers call after each attempt; usable as a decorator.

        It receives an :class:`AttemptEnded` after the COMMIT of the outcome, however the attempt
        ended, also after a timeout or unreadable arguments.  After the crash of a worker, the
        worker that rescues the job calls it.  A worker calls its callbacks one at a time, in a
        thread of their own, and logs their errors.  If the process ends before a call, the event is
        lost.

        Args:
            callback: A function of one :class:`AttemptEnded`.

        Returns:
            The function.

        Raises:
            ArgumentsError: It cannot be called.

        Example:
            >>> @queue.on_attempt_end
            ... def count_attempt(ended: AttemptEnded) -> None:
            ...     attempts[ended.task, ended.outcome] += 1
        """
        if not callable(callback):
            raise ArgumentsError(
                f"on_attempt_end takes a function of one AttemptEnded, not {callback!r}"
            )
        self.attempt_callbacks.append(callback)
        return callback

    def find(self, name: str) -> Task[..., Any]:
        """Return the task with this name.

        Args:
            name: Its name, or an alias of it.

        Returns:
            The task.

        Raises:
            UnknownTask: No task of this process has the name.
        """
        if name not in self.tasks:
            others = f"known are {', '.join(sorted(self.tasks))}"
            none = "no module with tasks is imported; on the command line, name the app by --app"
            raise UnknownTask(f"no task {name!r} is registered; {others if self.tasks else none}")
        return self.tasks[name]

    def enqueue_all(
        self, session: "Session | scoped_session[Any] | Connection", jobs: Iterable[Job]
    ) -> list[int]:
        """Enqueue jobs of several tasks, each with options of its own, by one statement for each
        1000.

        Joins the caller's transaction and commits nothing.

        Args:
            session: The Session or Connection, in whose transaction the jobs are written.
            jobs: New jobs, as ``task.job(...)`` and ``task.options(...).job(...)`` return them.
                They stay as they are, in no Session.

        Returns:
            The ids of the jobs, in the same order.  For a job whose unique key is taken, the id of
            the job that holds the key.

        Raises:
            ArgumentsError: Something else than a new job is given.
            DuplicateJob: The key of a job is taken whose task has ``on_conflict="raise"``; no job
                was enqueued.

        Example:
            >>> later = mail.options(delay=timedelta(days=3))
            >>> jobs = [mail.job("ann@example.org"), later.job("ann@example.org")]
            >>> ids = queue.enqueue_all(session, jobs)
        """
        return enqueue_all(session, jobs)

    async def enqueue_all_async(
        self,
        session: "AsyncSession | async_scoped_session[Any] | AsyncConnection",
        jobs: Iterable[Job],
    ) -> list[int]:
        """Enqueue jobs in the transaction of an AsyncSession or AsyncConnection.

        Args:
            session: The AsyncSession or AsyncConnection.
            jobs: As for :meth:`enqueue_all`.

        Returns:
            The ids of the jobs, as from :meth:`enqueue_all`.

        Raises:
            ArgumentsError, DuplicateJob: As by :meth:`enqueue_all`.
        """
        actual = async_sessions.actual_caller(session, "enqueue_all")
        return await actual.run_sync(enqueue_all, jobs)

    def enqueue_by_name(
        self,
        session: "Session | scoped_session[Any] | Connection",
        task: str,
        args: Mapping[str, Any],
        **options: Unpack[OptionsByName],
    ) -> int:
        """Enqueue a job of a task whose code this application does not have.

        Joins the caller's transaction and commits nothing.  The worker that has the task checks the
        arguments: if they do not fit, the job fails at once with an ArgumentsError.

        Args:
            session: A Session or a Connection, whose transaction this joins.
            task: The name of the task.
            args: Its arguments by name, as JSON data in their stored form.
            options: ``queue``, ``priority``, ``max_attempts``, ``run_at``, ``delay``,
                ``unique_key``, ``meta`` and ``tags``; by default those of the task, as a worker has
                declared them.

        Returns:
            The id of the job, or of the job that holds its unique key.

        Raises:
            UnknownTask: No worker has declared the task, and no ``queue`` is given.
            ArgumentsError: The arguments are not JSON data by name.
            OptionError: An option has a wrong value; or the task makes its unique keys by a
                function, and no ``unique_key`` is given; or it has ``on_conflict="replace"``,
                ``"postpone"`` or ``"cancel"``.
            DuplicateJob: The unique key is taken, and the task has ``on_conflict="raise"``.

        Example:
            >>> id = queue.enqueue_by_name(session, "mail.welcome", {"user_id": 7}, queue="mail")
        """
        return enqueue_by_name(session, task, args, options, notify=self.notify)

    async def enqueue_by_name_async(
        self,
        session: "AsyncSession | async_scoped_session[Any] | AsyncConnection",
        task: str,
        args: Mapping[str, Any],
        **options: Unpack[OptionsByName],
    ) -> int:
        """Enqueue a job by the name of its task in the transaction of an AsyncSession or
        AsyncConnection.

        Args:
            session: An AsyncSession or an AsyncConnection, whose transaction this joins.
            task: As in :meth:`enqueue_by_name`.
            args: As in :meth:`enqueue_by_name`.
            options: As in :meth:`enqueue_by_name`.

        Returns:
            The id of the job, or of the job that holds its unique key.

        Raises:
            UnknownTask, ArgumentsError, OptionError, DuplicateJob: As by :meth:`enqueue_by_name`.
        """
        actual = async_sessions.actual_caller(session, f"task {task}")
        return await actual.run_sync(
            lambda caller: enqueue_by_name(caller, task, args, options, notify=self.notify)
        )

    def claim(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        queues: Sequence[str] | None = None,
    ) -> OpenClaim:
        """Return a ``with`` block that runs one job in the caller's transaction, or None if no job
        is due; ``async with`` for an AsyncSession.

        The block gets a :class:`ClaimedJob`, or None.  Its end writes that the job has succeeded;
        the caller commits.  An exception in the block does not leave it: the writes of the block
        are rolled back, and the failed attempt is recorded and retried as in a worker.
        ``claimed.outcome`` then says how the attempt has ended.  KeyboardInterrupt and SystemExit
        leave the block.

        Until the caller commits, nobody else sees the claim.  If the process is killed or the
        transaction rolls back, the job is free at once, and **the attempt is not counted**: run
        jobs that may kill their process with a :class:`Worker`.  Jobs under limits are found once a
        running worker has admitted them.

        Args:
            session: The Session or AsyncSession in whose transaction the job runs.
            queues: The names of the queues to look in, by default all queues of registered tasks.

        Returns:
            The ``with`` block.

        Raises:
            NoTransaction: By the entry, if the Session is in AUTOCOMMIT.
            OptionError: ``queues`` is no list of names.
            PgQueueError: The block ends the transaction.

        Example:
            >>> with queue.claim(session, ["mail"]) as claimed:
            ...     if claimed is not None:
            ...         claimed.run()
            >>> session.commit()
        """
        if queues is None:
            named = queues_of(self.tasks.values())
            queues = sorted(named | {DEFAULT_QUEUE})
        if isinstance(queues, str) or not queues:
            raise OptionError(f"claim: queues is {queues!r}; give a list of queue names")
        for name in queues:
            check_queue_name(name)
        return OpenClaim(
            session,
            list(dict.fromkeys(queues)),
            tasks=self.tasks,
            retention=self.retention,
            layers=layers_of(self.around_jobs(), self.middlewares),
            resources=self.provided,
            callbacks=self.attempt_callbacks,
            notify=self.notify,
        )

    def batch(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        name: str | None = None,
        *,
        on_success: Task[..., Any] | None = None,
        on_failure: Task[..., Any] | None = None,
        on_cancelled: Task[..., Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> OpenBatch:
        """Return a ``with`` block whose jobs are one batch; ``async with`` for an AsyncSession.

        All jobs that the block enqueues through ``session`` belong to the batch.  When the last of
        them has ended, one job starts, of one of the three tasks; its one argument is the id of the
        batch, an int.  The block enqueues a job for each of these tasks, which is blocked until
        then.

        Args:
            session: The Session, in whose transaction all is written.  Nothing is committed.
            name: What lists and pages show of it; at most 200 characters.
            on_success: The task to call if all jobs have succeeded.
            on_failure: The task to call if a job has failed; without ``on_cancelled`` also if one
                was cancelled.
            on_cancelled: The task to call if none has failed and one was cancelled.
            meta: A dict of JSON data, which :meth:`get_batch` returns.

        Returns:
            The batch, whose ``id`` can be read in the block.

        Raises:
            OptionError, ArgumentsError, PayloadError: A value is wrong.
            TaskDefinitionError: A callback is no task of this queue.

        Example:
            >>> with queue.batch(session, "import 12", on_success=tell) as batch:
            ...     ids = transform.enqueue_many(session, [(n,) for n in range(100)])
            >>> session.commit()
        """
        return NewBatch(
            session,
            name,
            meta=meta,
            callbacks=self._callbacks("batch", name, on_success, on_failure, on_cancelled),
            application=self.application,
        )

    def extend_batch(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        batch_id: int,
    ) -> OpenBatch:
        """Return a ``with`` block whose jobs are added to a batch, as from a job of the batch.

        The batch does not end before the transaction of ``session`` ends.

        Args:
            session: The Session, in whose transaction all is written.  Nothing is committed.
            batch_id: The batch.

        Returns:
            The batch.

        Raises:
            BatchEnded: By the entry of the block, if the batch has ended.
            BatchNotFound: By the entry of the block.
            ArgumentsError: ``batch_id`` is no id.
        """
        return ExtendedBatch(session, checked_id(batch_id, "batch"))

    def workflow(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        name: str | None = None,
        *,
        on_success: Task[..., Any] | None = None,
        on_failure: Task[..., Any] | None = None,
        on_cancelled: Task[..., Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        deadline: timedelta | None = None,
    ) -> OpenWorkflow:
        """Return a ``with`` block whose jobs are one workflow; ``async with`` for an AsyncSession.

        A workflow is a batch whose jobs wait for each other: all that :meth:`batch` says applies,
        and :meth:`get_batch` returns it.  A job that waits for one that has failed is skipped.  A
        requeue of the failed job brings back all that follows it and opens the workflow again,
        whose callbacks then wait for its new end.

        Args:
            session: The Session, in whose transaction all is written.  Nothing is committed.
            name: What lists and pages show of it; at most 200 characters.
            on_success: The task to call, with the id of the workflow, if all jobs have succeeded.
            on_failure: The same if a job has failed; without ``on_cancelled`` also if one was
                cancelled.
            on_cancelled: The same if none has failed and one was cancelled.
            meta: A dict of JSON data.
            deadline: How long after the enqueue workers cancel what has not ended.  They ask
                running handlers to stop.  Jobs that run when others are cancelled still do.

        Returns:
            The workflow, to which jobs can be added in the block.

        Raises:
            OptionError, ArgumentsError, PayloadError: A value is wrong.
            TaskDefinitionError: A callback is no task of this queue.

        Example:
            >>> with queue.workflow(session, "import 12", on_failure=tell) as flow:
            ...     rows = flow.add(extract.job(12))
            ...     parts = flow.add_many(transform, [(n,) for n in range(100)], after=rows)
            ...     flow.add(load.job(12), after=parts)
            >>> session.commit()
        """
        return NewWorkflow(
            session,
            name,
            meta=meta,
            deadline=deadline,
            callbacks=self._callbacks("workflow", name, on_success, on_failure, on_cancelled),
            application=self.application,
        )

    def extend_workflow(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        workflow_id: int | None,
        *,
        before_successors_of: int | None = None,
    ) -> OpenWorkflow:
        """Return a ``with`` block whose jobs are added to a workflow, as from a job of it.

        The workflow does not end before the transaction of ``session`` ends.

        Args:
            session: The Session, in whose transaction all is written.  Nothing is committed.
            workflow_id: The workflow, in a handler ``ctx.workflow_id``.
            before_successors_of: A running job, in a handler ``ctx.job_id``: what waits for it
                waits for the new jobs too.  These jobs cannot wait for others.

        Returns:
            The workflow.

        Raises:
            ArgumentsError: The job of ``ctx`` belongs to no workflow.
            BatchEnded: By the entry of the block, if the workflow has ended.
            BatchNotFound: By the entry of the block.

        Example:
            >>> @queue.task
            ... def extract(session: Session, ctx: JobContext, file: int) -> None:
            ...     with queue.extend_workflow(
            ...         session, ctx.workflow_id, before_successors_of=ctx.job_id
            ...     ) as flow:
            ...         flow.add_many(transform, rows_of(file))
        """
        before = None if before_successors_of is None else checked_id(before_successors_of, "job")
        return ExtendedWorkflow(session, checked_id(workflow_id, "workflow"), before=before)

    def __repr__(self) -> str:
        """Name the database without its password."""
        if self._sessions is None:
            return "<PgQueue not bound>"
        bound = self._sessions.kw.get("bind")
        # A Connection has an engine too; a sessionmaker with only ``binds`` has no ``bind``.
        engine = None if bound is None else bound.engine
        return f"<PgQueue {redacted(str(engine.url)) if engine else 'without an engine'}>"

    def _callbacks(
        self, kind: str, name: Any, *tasks: Task[..., Any] | None
    ) -> dict[str, Task[..., Any]]:
        """The tasks that are called at the end of a batch, by the names of the parameters."""
        given = zip(OUTCOMES, tasks, strict=True)
        callbacks = {parameter: task for parameter, task in given if task is not None}
        for parameter, task in callbacks.items():
            if not isinstance(task, Task) or task.owner is not self:
                raise TaskDefinitionError(
                    f"{in_words(kind, name)}: {parameter} is {task!r}; give a task of this queue"
                )
        return callbacks

    def _register(self, function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
        _refuse_what_cannot_run(function)
        name = options["name"] if "name" in options else default_name(function)
        task: Task[..., Any] = Task(function, Options.of_task(name, options), self)
        names = (name, *task.settings.aliases)
        for each in names:
            known = self.tasks.get(each)
            if known is not None and not _is_redefined(known, task):
                raise TaskDefinitionError(
                    f"task {each} is registered already, for {known.function!r}; give task {name} "
                    "another name=..., or remove the alias"
                )
        others = [limit for known in self.tasks.values() for limit in known.own_limits]
        if task.own_limits and not any(_is_redefined(self.tasks.get(name), task) for name in names):
            of_queues = chain.from_iterable(self.queue_limits.values())
            by_name([*others, *of_queues, *task.own_limits])
        self.tasks.update(dict.fromkeys(names, task))
        return task


def _checked_wait(job: Job | int, timeout: timedelta) -> tuple[int, float]:
    """The id and the seconds of a wait.  Raises PgQueueError in a handler."""
    if isinstance(job, OpenBatch):  # whose id is likely that of another job
        raise ArgumentsError(
            f"wait: a {job.KIND} is no job; wait for each of its jobs by its id, or for one that "
            "waits for the others: flow.add(task.job(...), after=...) in queue.workflow(...)"
        )
    job_id = checked_id(job.id if isinstance(job, Job) else job)
    check("wait: ", "timeout", timeout, span(AT_ONCE))
    if (running := running_job.get()) is not None:
        raise PgQueueError(
            f"job {running.job_id} {running.task}: its handler waits for job {job_id}, and would "
            "occupy a slot meanwhile: if all slots wait, no job runs; write ctx.gather(name, "
            "[task.job(...)]), which frees the slot"
        )
    return job_id, timeout.total_seconds()


def _refuse_what_cannot_run(function: Any) -> None:
    if not callable(function) or isinstance(function, (type, Task)):
        raise TaskDefinitionError(
            f"{function!r} cannot be made a task: decorate a function or a coroutine function"
        )
    if not hasattr(function, "__qualname__"):
        raise TaskDefinitionError(
            f"{function!r} cannot be made a task, also with name=, because it is no function, as a "
            "functools.partial is none; decorate a function that calls it"
        )
    if isgeneratorfunction(function) or isasyncgenfunction(function):
        raise TaskDefinitionError(
            f"{function!r} cannot be made a task, because it uses `yield`: a call would run "
            "none of it; decorate a function that iterates over it"
        )


def queues_with_tasks() -> list[PgQueue]:
    """Return the queues of this process that have tasks."""
    return [queue for queue in _queues if queue.tasks]


def _is_redefined(known: Task[..., Any] | None, task: Task[..., Any]) -> bool:
    """Whether this is the same task once more, as when its module is reloaded."""
    if known is None:
        return False
    is_same_function = address_of(known.function) == address_of(task.function)
    return is_same_function and known.name == task.name


def _refuse_async(bind: Any) -> None:
    """Refuse an async bind now; its first use would fail with MissingGreenlet."""
    bound = bind.kw.get("bind") if isinstance(bind, sessionmaker) else bind
    makes_async = async_sessions.is_async_session(getattr(bind, "class_", None))
    # The Connection of an AsyncConnection is used where the AsyncSession of a test runs.
    is_async = getattr(getattr(bound, "dialect", None), "is_async", False)
    if makes_async or (is_async and not isinstance(bound, Connection)):
        raise ArgumentsError(
            "PgQueue works synchronously, and is bound here to an async engine: give it the URL, "
            "or an Engine of create_engine(url.set(drivername='postgresql+psycopg')); "
            "enqueue_async takes an AsyncSession on any engine of that database"
        )


def _checked_encoders(given: Any) -> dict[type, Encoder]:
    if not isinstance(given, Mapping):
        raise OptionError(f"PgQueue: encoders is {given!r:.80}; give a dict by types")
    encoders: dict[type, Encoder] = {}
    for kind, pair in given.items():
        if not isinstance(kind, type) or kind in (*SCALARS, list, tuple, set, frozenset, dict):
            raise OptionError(
                f"PgQueue: encoders has {kind!r:.80}; give a type of your own: the types of Python "
                "are stored without an encoder"
            )
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
            raise OptionError(
                f"PgQueue: encoders has for {kind.__name__} {pair!r:.80}; give two functions: "
                "(to_json, from_json)"
            )
        encoders[kind] = Encoder(*pair)
    return encoders


def _checked_queues(keep: Mapping[str, Keep | timedelta | None]) -> dict[str, Keep]:
    if not isinstance(keep, Mapping):
        raise OptionError(f"PgQueue: queue_keep is {keep!r}; give a dict by names of queues")
    for name in keep:
        check_queue_name(name, "PgQueue: queue_keep: ")
    return {name: keep_of(value, f"PgQueue: queue {name}: ") for name, value in keep.items()}
