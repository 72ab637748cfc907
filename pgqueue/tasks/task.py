"""A task: a function that can be called directly, or enqueued for a worker to call."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

from sqlalchemy import Connection, func
from sqlalchemy.orm import Session, scoped_session

from pgqueue.arguments import Payload
from pgqueue.connections.autocommit import refuse_autocommit
from pgqueue.context import Around, JobContext
from pgqueue.errors import ArgumentsError, PayloadError, TaskDefinitionError
from pgqueue.meta import checked_meta, meta_text
from pgqueue.models import Job
from pgqueue.options import JobOptions, Options
from pgqueue.redaction import is_secret
from pgqueue.repository import Enqueued, Jobs, KeyHolder, NewJob
from pgqueue.sessions import async_sessions
from pgqueue.sessions.callers import joined, may_notify, sync_session, telling_failures
from pgqueue.sessions.flush import dispatch_at_flush, held_job, loaded_job
from pgqueue.statements.follow_ups import MOST_ATTEMPTS_OF_FOLLOW_UP, ON_FAILED
from pgqueue.statements.tables import clock
from pgqueue.tasks.address import Address, importable_address
from pgqueue.tasks.binding import Arguments, Written, WrittenRows
from pgqueue.tasks.delaying import warn_of_open_transaction
from pgqueue.tasks.duplicates import check_holder, check_rows
from pgqueue.tasks.finishing import PlainFinishing
from pgqueue.tasks.injection import Injection, injection_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

P = ParamSpec("P")
R = TypeVar("R")


class Owner(Protocol):
    """What a task needs of the queue to which it belongs."""

    notify: bool
    max_payload_bytes: int

    def autocommitting(self) -> AbstractContextManager[Connection]: ...

    def session(self) -> Session: ...

    def async_session(self) -> "AsyncSession": ...

    def in_child(self, told: Mapping[str, str]) -> AbstractContextManager[object]: ...

    def around_jobs(self) -> Around: ...

    @property
    def middlewares(self) -> Sequence[Callable[[JobContext], Any]]: ...

    @property
    def meta_sources(self) -> "Sequence[MetaSource]": ...

    def session_of_caller(self) -> Session | None: ...


class Task(Generic[P, R]):
    """A function, its options, and the methods that enqueue it.

    Calling the task runs the function directly and writes no job.
    """

    def __init__(self, function: Callable[..., R], options: Options, owner: Owner) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = options.task
        self.injection: Injection = injection_of(function, task_name=self.name)
        self.payload = Payload.of(
            function,
            task_name=self.name,
            injected=len(self.injection.parameters),
            hints=self.injection.hints,
            renamed=options.renamed,
        )
        self.address: Address | None = None
        """Where a child process finds the function, if handlers of this task run in one."""
        if options.executor == "process":
            self.injection.refuse_process(self.name)
            self.address = importable_address(function, self.name)
        self.owner = owner
        self.is_async = self.injection.is_async
        self.is_transactional: bool
        """Whether the handler's writes commit together with the job's completion."""
        hints = self.injection.hints
        secret = [name for name in self.payload.names if is_secret(hints.get(name))]
        hidden = {*secret, *options.secret_args}
        # Jobs that were enqueued before a renaming have the argument under its old name.
        old = [name for name, new in options.renamed.items() if new in hidden]
        self._set_options(options.hiding([*secret, *old]))

    @property
    def _where(self) -> str:
        return f"task {self.name}"

    @property
    def settings(self) -> Options:
        """The options of this task, with their defaults."""
        return self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function directly.

        An injected session is a new one, committed when the function returns and rolled back when
        it raises.
        """
        if not self.injection.parameters:
            return self.function(*args, **kwargs)
        if self.is_async:
            return self._call_async(*args, **kwargs)  # type: ignore[return-value]  # R is the coroutine
        if not self.is_transactional:
            injected = self.injection.values(session=None, context=self._context(None))
            return self.function(*injected, *args, **kwargs)
        with self.owner.session() as session, session.begin():
            injected = self.injection.values(session=session, context=self._context(session))
            return self.function(*injected, *args, **kwargs)

    def run(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run the function directly in a given session, as a test wants it; writes no job.

        The arguments are encoded as for a job and decoded again.  Flushes the session after the
        function, and commits nothing.  For an async task, give an AsyncSession and await the
        result.
        """
        arguments = self.payload.loads(self._written(args, kwargs).text)
        if self.is_async:
            actual = async_sessions.actual(session, self._where)
            return self._run_async(actual, arguments)  # type: ignore[return-value]  # R is the coroutine
        target = sync_session(session, self._where)
        injected = self.injection.values(session=target, context=self._context(target))
        returned = self.function(*injected, **arguments)
        target.flush()
        return returned

    def enqueue(
        self, session: "Session | scoped_session[Any]", /, *args: P.args, **kwargs: P.kwargs
    ) -> Job:
        """Enqueue a job in the caller's transaction; it runs only after the transaction commits.

        Writes the rows of the job at once and loads ``job.id``; flushes nothing else of the session
        and commits nothing.  If an unfinished job of the queue holds the unique key, returns that
        job, whose ``is_new`` is False, or raises DuplicateJob if ``on_duplicate="raise"`` or if the
        holder is the job that calls this.  Raises ArgumentsError or PayloadError before anything is
        written.
        """
        target = sync_session(session, self._where)
        written = self._written(args, kwargs)
        connection = joined(target, self._where)
        new = self._new_on(connection)
        with telling_failures():
            found = Jobs(connection).enqueue(new, args=written.text, unique_key=written.unique_key)
        if isinstance(found, KeyHolder):
            check_holder(self._options, found.id, written.unique_key)
            return held_job(target, found)
        job = self._loaded_job(found, written, new)
        # The row is written and needs no flush, so a mapper event may enqueue too: SQLAlchemy warns
        # of an add there, because the flush would miss new or changed objects.
        Session.add(target, job, _warn=False)
        return job

    async def enqueue_async(
        self,
        session: "AsyncSession | async_scoped_session[Any]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Job:
        """:meth:`enqueue` for an AsyncSession.

        As with every object of an AsyncSession, read the job's attributes before the commit, or
        create the session with ``expire_on_commit=False``.
        """
        actual = async_sessions.actual(session, self._where)
        return await actual.run_sync(self.enqueue, *args, **kwargs)

    def enqueue_many(
        self,
        session: "Session | scoped_session[Any]",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """Enqueue a job for each row of arguments; returns their ids in the same order.

        A row is a tuple of positional arguments, or a dict of arguments by name.  All rows are
        checked before the first is written.  For a taken unique key the list has the id of the job
        that holds it; with ``on_duplicate="raise"``, raises DuplicateJob and enqueues no row.
        """
        target = sync_session(session, self._where)
        # Encode every row before the first statement: if one is refused, none is written.
        written = self._arguments.of_rows(rows, max_bytes=self.owner.max_payload_bytes)
        connection = joined(target, self._where)
        refuse_autocommit(connection, f"{self._where}: enqueue_many")
        jobs, new = Jobs(connection), self._new_on(connection)
        with telling_failures():
            if self._options.unique_key is not None:
                raises = self._options.on_duplicate == "raise"
                with connection.begin_nested() if raises else nullcontext():
                    return _enqueue_unique(jobs, new, written, self._options)
            return [id for text in written.texts for id in jobs.enqueue_chunk(new, documents=text)]

    async def enqueue_many_async(
        self,
        session: "AsyncSession | async_scoped_session[Any]",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """:meth:`enqueue_many` for an AsyncSession."""
        actual = async_sessions.actual(session, self._where)
        return await actual.run_sync(self.enqueue_many, rows)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Return a new Job for ``session.add``; the flush that inserts it also inserts its message.

        This holds also for a Job that reaches a flush by ``merge``, a cascade or a pickle, but not
        for a bulk insert.  The flush raises DuplicateJob if the unique key is taken.
        """
        written, new = self._written(args, kwargs), self._new_now()
        job = Job(
            task=self.name,
            args=written.args,
            queue=self._options.queue,
            priority=self._options.priority,
            max_attempts=self._options.max_attempts,
            interruptions=0,  # a value that the database chose would have to be read back
            unique_key=written.unique_key,
            **new.labels,
        )
        job.is_new = True
        if self._options.run_at is not None:
            job.run_at = func.greatest(self._options.run_at, clock())
        elif self._options.delay is not None:
            job.run_at = clock() + self._options.delay
        return dispatch_at_flush(job, notify=self.owner.notify)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a job in its own transaction, committed when this method returns.

        The job runs even if the caller's own transaction is rolled back; :meth:`enqueue` joins it.
        Warns with DelayInTransaction if a handler's session, or ``db.session`` of a Flask
        application, has a transaction open.
        """
        warn_of_open_transaction(self.name, self.owner.session_of_caller())
        written, new = self._written(args, kwargs), self._new_now()
        # In autocommit one statement is one transaction, which saves two round trips.
        with self.owner.autocommitting() as connection, telling_failures():
            found = Jobs(connection).enqueue(new, args=written.text, unique_key=written.unique_key)
        if isinstance(found, Enqueued):
            return self._loaded_job(found, written, new)
        check_holder(self._options, found.id, written.unique_key)
        with self.owner.session() as session:
            session.begin()  # if its sessionmaker has autobegin=False
            job = held_job(session, found)
            session.expunge(job)
            return job

    def options(self, **options: Unpack[JobOptions]) -> "Task[P, R]":
        """Return the same task with other options for the jobs enqueued through it.

        ``delay`` (a timedelta) or ``run_at`` (a datetime with a time zone), ``priority`` (0 to
        9, 0 first), ``queue``, ``unique_key``, ``on_duplicate``, ``max_attempts``, ``meta`` (a dict
        of JSON data for ``ctx.meta`` and for your queries), ``tags`` (texts to find jobs by).
        Raises OptionError.
        """
        changed = copy.copy(self)
        changed._set_options(self._options.of_job(options))
        return changed

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def _set_options(self, options: Options) -> None:
        self._options = options
        self.is_transactional = options.transactional or self.injection.wants_session
        self._arguments = Arguments(self.payload, options)
        self._follow_up: dict[str, Any] = {}
        if options.on_failed is not None:
            self._follow_up = {ON_FAILED: self._described(options.on_failed)}
        self._new = NewJob(
            task=self.name,
            queue=options.queue,
            priority=options.priority,
            max_attempts=options.max_attempts,
            notify=self.owner.notify,
            delay=options.delay,
            run_at=options.run_at,
            meta=meta_text(f"{self._where}: ", {**options.meta, **self._follow_up}),
            tags=options.tags,
        )

    def _described(self, follow_up: Any) -> dict[str, Any]:
        """Return the values of the job that follows when a job of this task fails, as each job
        keeps them in its meta."""
        if not isinstance(follow_up, Task) or follow_up.owner is not self.owner:
            raise TaskDefinitionError(
                f"{self._where}: on_failed is {follow_up!r}; give another task of this queue"
            )
        new = follow_up._new
        if new.delay is not None or new.run_at is not None or new.is_labelled:
            raise TaskDefinitionError(
                f"{self._where}: on_failed takes the queue, priority and max_attempts of its task, "
                "and no delay, run_at, meta, tags or on_failed; leave them away"
            )
        try:
            [argument] = follow_up._written((1,), {}).args
        except (ArgumentsError, PayloadError, ValueError) as error:
            raise TaskDefinitionError(
                f"{self._where}: on_failed calls {follow_up.name} with the id of the failed job as "
                f"its one argument, an int: {error}"
            ) from error
        return {
            "task": new.task,
            "argument": argument,
            "queue": new.queue,
            "priority": new.priority,
            "max_attempts": min(new.max_attempts, MOST_ATTEMPTS_OF_FOLLOW_UP),
        }

    def _written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Written:
        return self._arguments.of_call(args, kwargs, max_bytes=self.owner.max_payload_bytes)

    def _new_on(self, connection: Connection) -> NewJob:
        new = self._new_now()
        return new if may_notify(connection) else replace(new, notify=False)

    def _new_now(self) -> NewJob:
        """The values of a job that is enqueued now, with the meta of ``queue.on_enqueue``."""
        if not self.owner.meta_sources:
            return self._new
        where = f"{self._where}: on_enqueue: "
        own = {**self._options.meta, **self._follow_up}
        meta: dict[str, Any] = {}
        for source in self.owner.meta_sources:
            meta |= checked_meta(where, source(self) or {})
        return replace(self._new, meta=meta_text(where, {**meta, **own}))

    def _loaded_job(self, found: Enqueued, written: Written, new: NewJob) -> Job:
        return loaded_job(
            *found,
            task=self.name,
            args=written.args,
            queue=self._new.queue,
            priority=self._new.priority,
            max_attempts=self._new.max_attempts,
            unique_key=written.unique_key,
            **new.labels,
        )

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        function: Callable[..., Any] = self.function
        if not self.injection.wants_async_session:
            injected = self.injection.values(session=None, context=self._context(None))
            return await function(*injected, *args, **kwargs)
        async with self.owner.async_session() as session, session.begin():
            injected = self.injection.values(session=session, context=self._context(session))
            return await function(*injected, *args, **kwargs)

    async def _run_async(self, session: "AsyncSession", arguments: Mapping[str, Any]) -> Any:
        function: Callable[..., Any] = self.function
        injected = self.injection.values(session=session, context=self._context(session))
        returned = await function(*injected, **arguments)
        await session.flush()
        return returned

    def _context(self, session: Any) -> JobContext:
        return JobContext(
            job_id=0,
            attempt=1,
            max_attempts=self._options.max_attempts,
            queue=self._options.queue,
            task=self.name,
            session=session,
            finishing=lambda: PlainFinishing(self.owner.session, self.owner.async_session),
        )


MetaSource = Callable[[Task[..., Any]], Mapping[str, Any] | None]
"""Returns what to add to the meta of a job of this task that is being enqueued."""


def _enqueue_unique(jobs: Jobs, new: NewJob, written: WrittenRows, options: Options) -> list[int]:
    # By ascending key, over all chunks: two callers in opposite orders would deadlock.
    keys = written.unique_keys
    check_rows(options, keys)
    order = sorted(range(len(keys)), key=lambda index: keys[index] or "")
    found: dict[int, int] = {}
    for start in range(0, len(order), written.to_a_statement):
        part = order[start : start + written.to_a_statement]
        placed = jobs.enqueue_unique_chunk(
            new,
            payloads=[written.args[index] for index in part],
            keys=[keys[index] for index in part],
        )
        for index, job in zip(part, placed, strict=True):
            if not job.is_new:
                check_holder(options, job.id, keys[index])
            found[index] = job.id
    return [found[index] for index in range(len(keys))]
