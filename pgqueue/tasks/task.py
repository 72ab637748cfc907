"""A task: a function that can be called directly, or enqueued for a worker to call."""

import asyncio
import copy
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import greenlet_spawn

from pgqueue.arguments import Encoder, Payload
from pgqueue.context import Around, JobContext, ReadOnlyMeta
from pgqueue.database import async_sessions
from pgqueue.database.autocommit import in_autocommit, refuse_autocommit
from pgqueue.database.callers import (
    Caller,
    caller,
    joined,
    may_notify,
    sync_session,
    translated_errors,
)
from pgqueue.database.collecting import collecting_of
from pgqueue.database.flush import found_job, loaded_job, new_job, note_conflict
from pgqueue.database.uncommitted import note_enqueued
from pgqueue.errors import ArgumentsError, OptionError, PayloadError, TaskDefinitionError
from pgqueue.meta import checked_meta, meta_text, meta_with, values_of_keys
from pgqueue.models import Job
from pgqueue.options import JobOptions, Options
from pgqueue.redaction import is_secret, unmaskable
from pgqueue.repository.deadlines import DUE
from pgqueue.repository.enqueue import (
    Enqueues,
    NewJob,
    NewJobRow,
    Placed,
    until_placed,
)
from pgqueue.repository.follow_ups import MOST_ATTEMPTS_OF_FOLLOW_UP, ON_FAILED, ON_SUCCESS
from pgqueue.repository.jobs import JobValues
from pgqueue.repository.messages import StartsAt
from pgqueue.repository.unique_keys import KeyChanges
from pgqueue.rules.limits import Limit, LimitKeys, limits_of_task
from pgqueue.rules.unique import split_period
from pgqueue.tasks.binding import Arguments, EncodedCall
from pgqueue.tasks.delaying import warn_of_event_loop, warn_of_open_transaction
from pgqueue.tasks.duplicates import (
    Enqueued,
    check_holder,
    check_rows,
    rows_to_place,
    running_id,
)
from pgqueue.tasks.finishing import PlainFinishing
from pgqueue.tasks.injection import Injection, injection_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

NO_META: Mapping[str, Any] = {}

P = ParamSpec("P")
R = TypeVar("R")


class Owner(Protocol):
    """What a task needs of the queue to which it belongs."""

    notify: bool
    max_payload_bytes: int

    @property
    def encoders(self) -> Mapping[type, Encoder]: ...

    def autocommitting(self) -> AbstractContextManager[Connection]: ...
    def read_committed(self) -> AbstractContextManager[Session]: ...

    def session(self) -> Session: ...

    def async_session(self) -> "AsyncSession": ...

    def around_jobs(self) -> Around: ...

    @property
    def middlewares(self) -> Sequence[Callable[[JobContext], Any]]: ...

    @property
    def meta_sources(self) -> "Sequence[MetaSource]": ...

    @property
    def queue_limits(self) -> Mapping[str, tuple[Limit, ...]]: ...

    def session_of_caller(self) -> Session | None: ...

    @property
    def connection(self) -> Connection | None: ...

    @property
    def provided(self) -> Mapping[Any, Any]: ...


class Task(Generic[P, R]):
    """A function, its options, and the methods that enqueue it.

    Calling the task runs the function directly and writes no job.

    Example:
        >>> @queue.task
        ... def mail(address: str) -> None: ...
        >>> job = mail.enqueue(session, "ann@example.org")
        >>> session.commit()
    """

    is_transactional: bool
    """Whether the handler's writes commit together with the job's completion."""
    asks_before_start: bool
    """Whether a worker asks the database before it calls the handler, as for ``expires_in``."""
    is_from_options = False
    """Whether :meth:`options` has returned it."""

    def __init__(self, function: Callable[..., R], options: Options, owner: Owner) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = options.task
        self.injection: Injection = injection_of(function, task_name=self.name)
        self.payload: Payload = Payload(
            function,
            task_name=self.name,
            injected=len(self.injection.parameters),
            hints=self.injection.hints,
            renamed=options.renamed,
            encoders=owner.encoders,
        )
        self.in_process: bool = options.executor == "process"
        """Whether handlers of this task run in child processes."""
        if self.in_process:
            self.injection.refuse_process(self.name)
        self.owner = owner
        self.is_async: bool = self.injection.is_async
        hints = self.injection.hints
        annotated = [name for name in self.payload.names if is_secret(hints.get(name))]
        # A secret stays secret under each of its names: older jobs have it under an old one.
        declared = {options.renamed.get(name, name) for name in options.secret_args}
        hidden = {*annotated, *declared}
        for name in self.payload.names:
            kind = unmaskable(
                hints.get(name), is_inside=name in declared, more=tuple(owner.encoders)
            )
            if kind is not None:
                raise TaskDefinitionError(
                    f"{self._where}: the secret argument {name!r} has values of the type "
                    f"{kind.__name__}, which errors quote in forms that cannot be masked; declare "
                    "text, a number, or a list or a dataclass of such, and convert it in the task"
                )
        old = [name for name, new in options.renamed.items() if new in hidden]
        self._own_meta: dict[str, Any] = {}
        """What pgqueue itself notes in the meta of each job of this task."""
        self._set_options(options.hiding([*hidden, *old]))

    @property
    def _where(self) -> str:
        return f"task {self.name}"

    @property
    def settings(self) -> Options:
        """The options of this task, with their defaults."""
        return self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function directly.

        If the function asks for a session, it gets a new one, which is committed when the function
        returns and rolled back when it raises.
        """
        if not self.injection.parameters:
            return self.function(*args, **kwargs)
        if self.is_async:
            return self._call_async(*args, **kwargs)  # type: ignore[return-value]  # R is the coroutine
        if not self.is_transactional:
            return self.injection.call(self.function, self._context(None), *args, **kwargs)
        with self.owner.session() as session, session.begin():
            return self.injection.call(self.function, self._context(session), *args, **kwargs)

    def run(
        self,
        session: "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run the function directly in a given session, as a test needs; writes no job.

        The arguments are encoded as for a job and decoded again.  ``ctx.meta`` is that of
        ``task.options(meta=...)``, and ``ctx.attempt`` is 1.  Flushes the session after the
        function, and commits nothing.

        Args:
            session: The Session; for an async task an AsyncSession.
            *args: The arguments of the job.
            **kwargs: The arguments of the job by name.

        Returns:
            What the function returns, also a :class:`Snooze` or :class:`Cancel`; of an async task,
            a coroutine to await.

        Raises:
            ArgumentsError: The arguments do not fit the task.
            PayloadError: An argument cannot be stored.
        """
        arguments = self.payload.loads(self._encoded(args, kwargs).text)
        if self.is_async:
            actual = async_sessions.actual(session, self._where)
            return self._run_async(actual, arguments)  # type: ignore[return-value]  # R is the coroutine
        target = sync_session(session, self._where)
        returned = self.injection.call(self.function, self._context(target), **arguments)
        target.flush()
        return returned

    def enqueue(
        self,
        session: "Session | scoped_session[Any] | Connection",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Job:
        """Enqueue a job in the caller's transaction; it runs only after the transaction commits.

        Writes the rows of the job at once and loads ``job.id``; flushes nothing else of the session
        and commits nothing.  With ``options(node=...)`` the Job is in no Session, and of a job that
        already held the unique key only ``id`` is loaded: the rows are in the database of another
        node.

        Args:
            session: The Session, in whose transaction the job is written.  With a Connection, the
                Job is in no Session.
            *args: The arguments of the job, behind a Session and a JobContext, which are supplied.
            **kwargs: The arguments of the job by name.

        Returns:
            The job.  If another job of the queue holds the unique key, that job, whose ``is_new``
            is False, or what :class:`Unique` says.

        Raises:
            ArgumentsError: The arguments do not fit the task; nothing was written.
            PayloadError: An argument cannot be stored; nothing was written.
            DuplicateJob: The unique key is taken, and :class:`Unique` says so; or a handler
                enqueues under the key that its own job holds.

        Example:
            >>> order = Order()
            >>> session.add(order)
            >>> session.flush()
            >>> job = pay.enqueue(session, order.id)
        """
        target = caller(session, self._where)
        prepared = self._prepared(args, kwargs)
        connection = joined(target, self._where)
        new = self._job_values_for(prepared.new, connection, target)
        encoded = self._with_period(connection, new, prepared.encoded)
        if new.node is not None and collecting_of(target) is not None:
            self._refuse_node("a batch")

        def place() -> Job | None:
            with translated_errors():
                placed = self._place(connection, new, encoded)
            if placed is None:
                return None
            if placed.times is None:
                return found_job(target, placed)
            job = self._loaded_job(placed.id, placed.times, encoded, new)
            if isinstance(target, Connection):
                return job
            # The row is written and needs no flush, so a mapper event may enqueue too:
            # SQLAlchemy warns of an add there, because the flush would miss new or changed
            # objects.
            if new.node is None:
                Session.add(target, job, _warn=False)
            return job

        job = until_placed(place, new.task, new.queue, encoded.unique_key)
        may_be_lost = job.is_new and not in_autocommit(connection)
        note_enqueued(target, self.name, [job.id], may_be_lost=may_be_lost)
        return job

    async def enqueue_async(
        self,
        session: "AsyncSession | async_scoped_session[Any] | AsyncConnection",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Job:
        """Enqueue a job in the transaction of an AsyncSession or AsyncConnection.

        As with every object of an AsyncSession, read the job's attributes before the commit, or
        create the session with ``expire_on_commit=False``.

        Args:
            session: The AsyncSession, in whose transaction the job is written.
            *args: The arguments of the job.
            **kwargs: The arguments of the job by name.

        Returns:
            The job, as from :meth:`enqueue`.

        Raises:
            ArgumentsError, PayloadError, DuplicateJob: As by :meth:`enqueue`.
        """
        actual = async_sessions.actual_caller(session, self._where)
        return await actual.run_sync(self.enqueue, *args, **kwargs)

    def enqueue_many(
        self,
        session: "Session | scoped_session[Any] | Connection",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """Enqueue a job for each row of arguments.

        All rows are checked before the first is written.

        Args:
            session: The Session, in whose transaction the jobs are written.
            rows: Each a tuple of positional arguments, or a dict of arguments by name.

        Returns:
            The ids of the jobs, in the order of the rows.  If a unique key is taken, the id of the
            job that holds it.

        Raises:
            ArgumentsError: A row does not fit the task; nothing was written.
            PayloadError: An argument cannot be stored; nothing was written.
            DuplicateJob: A unique key is taken, with ``on_conflict="raise"``; nothing was written.

        Example:
            >>> ids = mail.enqueue_many(session, [("ann@example.org",), ("bob@example.org",)])
        """
        self._refuse_node("enqueue_many")
        target = caller(session, self._where)
        now = self._job_values_now()
        encoded = self._arguments.of_rows(
            rows,
            meta=self._meta_of_keys(now),
            limits=self._limits,
            max_bytes=self.owner.max_payload_bytes,
        )
        connection = joined(target, self._where)
        refuse_autocommit(connection, f"{self._where}: enqueue_many")
        with translated_errors():
            enqueues, new = Enqueues(connection), self._job_values_for(now, connection, target)
            if self._options.uniqueness is None and not self._limits:
                job_ids = [
                    id
                    for text in encoded.texts
                    for id in enqueues.enqueue_chunk(new, documents=text)
                ]
            else:
                encoded_rows = encoded.rows(enqueues.with_period(new, encoded.unique_keys))
                may_raise = self._options.conflict != "return"
                with connection.begin_nested() if may_raise else nullcontext():
                    job_ids = _enqueue_unique(
                        connection, new, encoded_rows, encoded.per_statement, self._options
                    )
        note_enqueued(target, self.name, job_ids, may_be_lost=bool(job_ids))
        return job_ids

    async def enqueue_many_async(
        self,
        session: "AsyncSession | async_scoped_session[Any] | AsyncConnection",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """Enqueue a job for each row of arguments in the transaction of an AsyncSession or
        AsyncConnection.

        Args:
            session: The AsyncSession, in whose transaction the jobs are written.
            rows: As for :meth:`enqueue_many`.

        Returns:
            The ids of the jobs, as from :meth:`enqueue_many`.

        Raises:
            ArgumentsError, PayloadError, DuplicateJob: As by :meth:`enqueue_many`.
        """
        actual = async_sessions.actual_caller(session, self._where)
        return await actual.run_sync(self.enqueue_many, rows)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Return a new Job for ``session.add``; the flush that inserts it also inserts its message.

        A Job that reaches a flush by ``merge``, a cascade or a pickle gets its message too.  A Job
        of a bulk insert does not.  The flush raises DuplicateJob if the unique key is taken.  Needs
        no database: a test can check arguments so.

        Args:
            *args: The arguments of the job, behind a Session and a JobContext, which are supplied.
            **kwargs: The arguments of the job by name.

        Returns:
            The job, in no Session yet.

        Raises:
            ArgumentsError: The arguments do not fit the task.
            PayloadError: An argument cannot be stored.
            OptionError: The options ask for more than a flush can do, such as ``node``, or a
                :class:`Unique` with ``period`` or ``on_conflict="replace"``.

        Example:
            >>> session.add_all([Order(id=8), pay.job(8)])
        """
        if self._unfit_for_flush:
            raise OptionError(f"{self._where}: {self._unfit_for_flush}")
        prepared = self._prepared(args, kwargs)
        encoded, new = prepared.encoded, prepared.new
        job = new_job({**self._columns, **encoded.values(), **new.labels}, notify=new.notify)
        if encoded.unique_key is not None and self._options.conflict == "raise":
            note_conflict(job)
        return job

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a job in its own transaction, committed when this method returns.

        The job runs even if the caller's own transaction is rolled back; use :meth:`enqueue` to
        join that transaction.  Warns with DelayInTransaction if a handler's session, or
        ``db.session`` of a Flask application, has an open transaction, and with DelayInEventLoop
        in an event loop, which it blocks.

        Args:
            *args: The arguments of the job.
            **kwargs: The arguments of the job by name.

        Returns:
            The job, detached, with its id.

        Raises:
            ArgumentsError, PayloadError, DuplicateJob: As by :meth:`enqueue`.
            NotBound: The queue has no database.
        """
        warn_of_open_transaction(self.name, self.owner.session_of_caller())
        if self.owner.connection is None:  # in a test, plain handlers may run inside of a loop
            warn_of_event_loop(self.name)
        return self._delay(*args, **kwargs)

    async def delay_async(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """:meth:`delay` for a coroutine: a thread waits for the database, and the loop goes on.

        Warns as :meth:`delay` does of an open transaction.  If the coroutine is cancelled, the job
        may have been enqueued.

        Args:
            *args: The arguments of the job.
            **kwargs: The arguments of the job by name.

        Returns:
            The job.  It is in no Session; its attributes can be read.
        """
        warn_of_open_transaction(self.name, self.owner.session_of_caller())
        if self.owner.connection is None:
            return await asyncio.to_thread(self._delay, *args, **kwargs)
        return await greenlet_spawn(partial(self._delay, *args, **kwargs))

    def _delay(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        if self._job_values.changes_holder:
            with self.owner.read_committed() as session:
                changed = self.enqueue(session, *args, **kwargs)
                session.expunge(changed)  # as loaded: the COMMIT would expire it
                return changed
        prepared = self._prepared(args, kwargs)
        encoded, new = prepared.encoded, prepared.new
        # In autocommit one statement is one transaction, which saves two round trips.
        if new.unique is not None and new.unique.period is not None:
            with self.owner.autocommitting() as connection, translated_errors():
                encoded = self._with_period(connection, new, encoded)

        def place() -> Job | None:
            with self.owner.autocommitting() as connection, translated_errors():
                placed = self._place(connection, new, encoded)
            if placed is None:
                return None
            if placed.times is not None:
                return self._loaded_job(placed.id, placed.times, encoded, new)
            with self.owner.session() as session:
                session.begin()  # if its sessionmaker has autobegin=False
                job = found_job(session, placed)
                session.expunge_all()
                return job

        return until_placed(place, new.task, new.queue, encoded.unique_key)

    def options(self, **options: Unpack[JobOptions]) -> "Task[P, R]":
        """Return the same task with other options for the jobs enqueued through it.

        Args:
            **options: The options that one enqueue may change, such as ``delay``, ``priority``,
                ``unique_key``, ``meta`` and ``tags``.  The page "Options" of the reference lists
                them.

        Returns:
            The task, for ``enqueue``, ``delay``, ``job`` and the others.

        Raises:
            OptionError: An option has a wrong value.
            UnknownOption: There is no such option for one enqueue.

        Example:
            >>> later = mail.options(delay=timedelta(hours=1), priority=0)
            >>> job = later.enqueue(session, "ann@example.org")
        """
        changed, checked = copy.copy(self), self._options.of_job(options)
        changed.is_from_options = True
        changed._own_meta = self._own_meta | checked.noted(options)
        changed._set_options(checked)
        return changed

    def stored(self, arguments: tuple[Any, ...] | Mapping[str, Any]) -> str:
        """Return the arguments of a call as JSON text, in the form in which a schedule stores them.

        Raises ArgumentsError or PayloadError.
        """
        if isinstance(arguments, tuple):
            return self._encoded(arguments, {}).text
        if isinstance(arguments, Mapping):
            return self._encoded((), arguments).text
        raise ArgumentsError(
            f"{self._where}: args is {type(arguments).__name__}; give a tuple of positional "
            "arguments, as (7,), or a dict of arguments by name"
        )

    def prepared(self, stored: str) -> "PreparedJob":
        """Return a job with stored arguments that can be enqueued without the application's code.

        Raises PayloadError if this version of the task cannot read the arguments, and what
        ``on_enqueue`` or the function of the unique key raises.
        """
        return self._prepared((), self.payload.loads(stored))

    def enqueue_prepared(self, connection: Connection, job: "PreparedJob") -> int:
        """Enqueue a prepared job of this task; returns its id, or that of the job that holds
        its unique key."""
        new = _for_connection(job.new, connection)
        encoded = self._with_period(connection, new, job.encoded)
        write = functools.partial(self._write, connection, new, encoded)
        return until_placed(write, new.task, new.queue, encoded.unique_key).id

    def declaration(self) -> dict[str, Any]:
        """What an enqueue by the name of this task has to know."""
        new, options, keys = self._job_values, self._options, self._arguments.unique_keys
        own = LimitKeys(self.own_limits, secret=options.secret_args)
        return {
            "queue": new.queue,
            "priority": new.priority,
            "max_attempts": new.max_attempts,
            "meta": None if new.meta is None else json.loads(new.meta),
            "unique": keys.declared(),
            "limits": own.declared(),
            "queue_limits": {
                queue: LimitKeys(limits).declared()
                for queue, limits in self.owner.queue_limits.items()
            },
            "defaults": {**self._limits.defaults_of_keys(), **keys.defaults_of_key},
        }

    def limit_keys_of(self, queue: str, args: str, meta: str | None) -> str | None:
        """The keys of a job of this task in a queue, from its arguments and meta as JSON text."""
        defaults = self._limits.defaults_of_keys
        keys = LimitKeys(
            self._limits_in(queue), secret=self._options.secret_args, defaults=defaults
        )
        return keys.of(json.loads(args), json.loads(meta or "{}"))

    def edited(
        self, job: JobValues, args: Mapping[str, Any], *, are_stored: bool
    ) -> dict[str, Any]:
        """Return the changed values of a job of this task after some arguments are replaced.

        The unique key changes too, if it was made of the arguments.  Raises ArgumentsError or
        PayloadError.  A change of the keys of its limits raises ArgumentsError, because the job may
        have been admitted under them.
        """
        meta = job.meta or {}
        changed = self.payload.changed(job.args, args, are_stored=are_stored)
        encoded = self._encoded((), changed, meta)
        if encoded.args == job.args:
            return {}
        if job.limit_keys is not None and encoded.limit_keys != self._limits.of(job.args, meta):
            raise ArgumentsError(
                f"{self._where}: job {job.id} counts in a limit by one of these arguments, so they "
                "cannot change; cancel it, and enqueue another job"
            )
        unique_key = self._unique_key_after(job, encoded.unique_key)
        changed = {} if unique_key == job.unique_key else {"unique_key": unique_key}
        return {"args": encoded.args, **changed}

    def check_meta(self, job: JobValues, meta: Mapping[str, Any]) -> None:
        """Raise OptionError if a new meta of a job has another value for a key of meta of which its
        unique key or the keys of its limits are made: the job may have been admitted under them."""
        limits = LimitKeys(self._limits_in(job.queue))
        names = limits.names_in_meta | self._arguments.unique_keys.names_in_meta
        old, new = (values_of_keys({}, one) for one in (job.meta or {}, meta))
        for name in sorted(names):
            if old.get(name) != new.get(name):
                raise OptionError(
                    f"{self._where}: job {job.id} counts in a limit or is unique by {name}, so "
                    "this key of its meta cannot change; cancel it, and enqueue another job"
                )

    def check_move(self, job: JobValues, queue: str) -> None:
        """Raise OptionError if the queue of a waiting job, or the one to which it would move, has
        limits: the job counts in those of the queue in which it was enqueued."""
        if (limited := self.limited_among(job.queue, queue)) is not None:
            raise OptionError(
                f"{self._where}: job {job.id} cannot move from queue {job.queue} to {queue}: "
                f"queue {limited} has limits; cancel it, and enqueue another job"
            )

    def _limits_in(self, queue: str) -> tuple[Limit, ...]:
        """The limits under which a job of this task is in a queue."""
        return (*self.own_limits, *self.owner.queue_limits.get(queue, ()))

    def limited_among(self, *queues: str) -> str | None:
        """The first of these queues that has limits: no job moves to it, or leaves it."""
        return next((name for name in queues if self.owner.queue_limits.get(name)), None)

    def check_callback(self, batch_id: int) -> None:
        """Raise OptionError, ArgumentsError or PayloadError unless this task can be called with the
        id of a batch when that ends."""
        new = self._job_values_now()
        if (new.unique, new.delay, new.run_at, new.node) != (None,) * 4:
            raise OptionError(
                f"{self._where}: the callback of a batch starts when the batch ends, and takes no "
                "unique key, delay, run_at or node; give task.options(...) without them, or "
                "another task"
            )
        self._encoded((batch_id,), {})

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def _set_options(self, options: Options) -> None:
        self._options = options
        self.is_transactional = options.transactional or self.injection.wants_session
        self.asks_before_start = options.expires_in is not None or options.frees_key_at_start
        self._arguments = Arguments(self.payload, options)
        names = self.payload.names
        self.own_limits: tuple[Limit, ...] = limits_of_task(
            options.limit, options.fair_by, self.name, names
        )
        self._limits = LimitKeys(
            self._limits_in(options.queue),
            secret=options.secret_args,
            defaults=lambda: self.payload.encode(self.payload.with_defaults({})),
        )
        in_meta = (self._limits.names_in_meta, self._arguments.unique_keys.names_in_meta)
        self._names_in_meta = frozenset().union(*in_meta)
        limited = self.limited_among(*options.queues) if len(options.queues) > 1 else None
        if limited is not None:
            raise OptionError(
                f"{self._where}: its retries move from queue {options.queue} to "
                f"{options.retry.queue}, and queue {limited} has limits, in which a job counts "
                "that was enqueued there; give the limit to the task, or omit in_queue()"
            )
        unique = options.uniqueness
        if unique is not None and unique.moves_holder and self._limits:
            raise OptionError(
                f"{self._where}: on_conflict={options.conflict!r} changes a job that waits for its "
                "time, and not one that waits for a limit; omit the limit, or give "
                "on_conflict='return', 'raise' or 'cancel'"
            )
        if unique is not None and unique.changes_holder and options.node is not None:
            raise OptionError(
                f"{self._where}: on_conflict={options.conflict!r} changes no job on another node; "
                "omit the node, or give on_conflict='return' or 'raise'"
            )
        if options.expires_in is not None and self._limits:
            self._own_meta[DUE] = None  # the admission notes here when the job was due
        for name, key in (("on_failed", ON_FAILED), ("on_success", ON_SUCCESS)):
            if (follow_up := getattr(options, name)) is not None:
                self._own_meta[key] = self._follow_up_values(name, follow_up)
        self._job_values = NewJob(
            task=self.name,
            queue=options.queue,
            priority=options.priority,
            max_attempts=options.max_attempts,
            notify=self.owner.notify,
            delay=options.delay,
            run_at=options.run_at,
            meta=meta_text(f"{self._where}: ", {**options.meta, **self._own_meta}),
            tags=options.tags,
            unique=options.uniqueness,
            node=options.node,
        )
        self._columns: dict[str, Any] = {
            "is_new": True,
            "task": self.name,
            "queue": options.queue,
            "priority": options.priority,
            "max_attempts": options.max_attempts,
            "interruptions": 0,  # a default of the database would have to be read back
        }
        if options.run_at is not None or options.delay is not None:
            self._columns["run_at"] = StartsAt(options.run_at, options.delay)
        self._unfit_for_flush = _unfit_for_flush(options)

    def has_secret_key(self, name: str) -> bool:
        """Whether the keys of this limit contain secret arguments of the task."""
        secret = frozenset(self._options.secret_args)
        return any(limit.name == name and limit.is_secret(secret) for limit in self.own_limits)

    def _follow_up_values(self, option: str, follow_up: Any) -> dict[str, Any]:
        """Return the values of the follow-up; each job of this task keeps them in its meta.

        ``option``: ``on_failed`` or ``on_success``.
        """
        if not isinstance(follow_up, Task) or follow_up.owner is not self.owner:
            raise TaskDefinitionError(
                f"{self._where}: {option} is {follow_up!r}; give another task of this queue"
            )
        new = follow_up._job_values
        if follow_up._limits:
            raise TaskDefinitionError(
                f"{self._where}: {option} is task {follow_up.name}, which is under a limit: the "
                "statement that records the end does not wait for room; omit the limit"
            )
        if (new.delay, new.run_at, new.node) != (None,) * 3 or new.is_labelled:
            raise TaskDefinitionError(
                f"{self._where}: {option} takes the queue, priority and max_attempts of its task, "
                "and no delay, run_at, node, timeout, retry, meta, tags, on_failed or on_success; "
                "omit them"
            )
        payload = follow_up.payload
        takes_result = option == "on_success" and "result" in payload.names[1:]
        try:
            payload.bind((1,), {"result": None} if takes_result else {})
            [argument] = payload.encode(dict.fromkeys(payload.names[:1], 1))
        except (ArgumentsError, PayloadError, ValueError) as error:
            which = "failed job" if option == "on_failed" else "job, and its result by name,"
            raise TaskDefinitionError(
                f"{self._where}: {option} calls {follow_up.name} with the id of the {which} as "
                f"its one argument, an int: {error}"
            ) from error
        return {
            "task": new.task,
            "argument": argument,
            **({"result": "result"} if takes_result else {}),
            "queue": new.queue,
            "priority": new.priority,
            "max_attempts": min(new.max_attempts, MOST_ATTEMPTS_OF_FOLLOW_UP),
        }

    def _encoded(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], meta: Mapping[str, Any] = NO_META
    ) -> EncodedCall:
        """Return a call in its stored form, with the keys that its arguments and meta make."""
        most = self.owner.max_payload_bytes
        return self._arguments.of_call(args, kwargs, meta=meta, limits=self._limits, max_bytes=most)

    def _prepared(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "PreparedJob":
        """Return a new job after all of the application's code has run."""
        new = self._job_values_now()
        return PreparedJob(new, self._encoded(args, kwargs, self._meta_of_keys(new)))

    def _meta_of_keys(self, new: NewJob) -> Mapping[str, Any]:
        """Return the meta of a new job if keys are made of it."""
        if not self._names_in_meta or new.meta is None:
            return NO_META
        meta: dict[str, Any] = json.loads(new.meta)
        return meta

    def _unique_key_after(self, job: JobValues, new: str | None) -> str | None:
        """Return the unique key of a job whose new arguments make the key ``new``.

        A key that the old arguments do not make was chosen at the enqueue, and stays.
        """
        if job.unique_key is None:
            return None
        period, key = split_period(job.unique_key)
        try:
            made = self._encoded((), self.payload.decode(job.args), job.meta or {}).unique_key
        except (ArgumentsError, OptionError, PayloadError):
            return job.unique_key
        if key != made:
            return job.unique_key
        return None if new is None else f"{period}{new}"

    def _place(self, connection: Connection, new: NewJob, encoded: EncodedCall) -> Placed | None:
        """Write a job, or change or find the job that holds its unique key.

        Returns None if the holder has ended since.  Raises DuplicateJob if the call must not get
        the holder.
        """
        placed = self._write(connection, new, encoded)
        if placed is not None and placed.is_held:
            check_holder(Enqueued.by(self._options), placed.id, encoded.unique_key)
        return placed

    def _write(self, connection: Connection, new: NewJob, encoded: EncodedCall) -> Placed | None:
        if new.changes_holder:
            where = f"{self._where}: on_conflict={self._options.conflict!r}"
            refuse_autocommit(connection, where, instead="another on_conflict")
            [placed] = KeyChanges(connection, running=running_id()).enqueue(new, [encoded])
            return placed
        keys = {"unique_key": encoded.unique_key, "limit_keys": encoded.limit_keys}
        return Enqueues(connection).try_to_enqueue(new, encoded.text, **keys)

    def _with_period(
        self, connection: Connection, new: NewJob, encoded: EncodedCall
    ) -> EncodedCall:
        """Add the period to the unique key, if it has one; asks the database."""
        if new.unique is None or new.unique.period is None:
            return encoded
        [key] = Enqueues(connection).with_period(new, [encoded.unique_key])
        return replace(encoded, unique_key=key)

    def _job_values_for(self, new: NewJob, connection: Connection, target: Caller) -> NewJob:
        new = _for_connection(new, connection)
        if (collecting := collecting_of(target)) is None:
            return new
        if collecting.after and new.changes_holder:
            raise OptionError(
                f"{self._where}: on_conflict={self._options.conflict!r} changes a job that exists, "
                "and this job waits for others; give on_conflict='return' or 'raise'"
            )
        return replace(
            new,
            meta=meta_with(new.meta, collecting.meta),
            after=collecting.after,
            notify=new.notify and not collecting.after,
        )

    def _job_values_now(self) -> NewJob:
        """The values of a job that is enqueued now, with the meta of ``queue.on_enqueue``."""
        if not self.owner.meta_sources:
            return self._job_values
        where = f"{self._where}: on_enqueue: "
        of_task = {**self._options.meta, **self._own_meta}
        meta: dict[str, Any] = {}
        for source in self.owner.meta_sources:
            meta |= checked_meta(where, source(self) or {})
        return replace(self._job_values, meta=meta_text(where, {**meta, **of_task}))

    def _loaded_job(
        self, id: int, times: tuple[datetime, datetime], encoded: EncodedCall, new: NewJob
    ) -> Job:
        return loaded_job(
            id,
            *times,
            task=self.name,
            queue=new.queue,
            priority=new.priority,
            max_attempts=new.max_attempts,
            is_blocked=encoded.limit_keys is not None or bool(new.after),
            **(encoded.values() | new.labels),
        )

    def _refuse_node(self, what: str) -> None:
        if self._options.node is not None:
            raise OptionError(
                f"{self._where}: {what} takes no node; omit it, and open a session on the node"
            )

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        function: Callable[..., Any] = self.function
        if not self.injection.wants_async_session:
            return await self.injection.call(function, self._context(None), *args, **kwargs)
        async with self.owner.async_session() as session, session.begin():
            return await self.injection.call(function, self._context(session), *args, **kwargs)

    async def _run_async(self, session: "AsyncSession", arguments: Mapping[str, Any]) -> Any:
        function: Callable[..., Any] = self.function
        returned = await self.injection.call(function, self._context(session), **arguments)
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
            meta=ReadOnlyMeta(self._options.meta),
            finishing=PlainFinishing(self.owner.session, self.owner.async_session),
            resources=self.owner.provided,
        )


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """The values of a new job, after all of the application's code has run."""

    new: NewJob
    encoded: EncodedCall


def queues_of(tasks: Iterable[Task[..., Any]]) -> set[str]:
    """The queues that the jobs of these tasks have, also those in which they are retried."""
    return {queue for task in tasks for queue in task.settings.queues}


MetaSource = Callable[[Task[..., Any]], Mapping[str, Any] | None]
"""Returns what to add to the meta of a new job of this task."""


def _unfit_for_flush(options: Options) -> str:
    """Why no flush can enqueue a job with these options; empty if one can."""
    if options.node is not None:
        return "session.add(task.job(...)) takes no node; omit it, and open a session on the node"
    unique = options.uniqueness
    if unique is not None and unique.changes_holder:
        return (
            "session.add(task.job(...)) cannot change another job, as "
            f"on_conflict={options.conflict!r} asks; use enqueue(...)"
        )
    if unique is not None and unique.period is not None:
        return (
            "session.add(task.job(...)) cannot ask the database for the period of a unique key; "
            "use enqueue(...)"
        )
    return ""


def _for_connection(new: NewJob, connection: Connection) -> NewJob:
    return new if may_notify(connection) else replace(new, notify=False)


def _enqueue_unique(
    connection: Connection, new: NewJob, rows: list[NewJobRow], per_statement: int, options: Options
) -> list[int]:
    """Enqueue jobs with unique keys; returns the id of the job of each row."""
    keys = [row.unique_key for row in rows]
    check_rows(options, keys)
    row_of = rows_to_place(options, keys)  # for each row, by ascending key, that enqueued for it
    # Over all chunks in this order: two callers in opposite orders would deadlock.
    order = list(dict.fromkeys(row_of.values()))
    job_ids: dict[int, int] = {}
    if new.changes_holder:
        write = KeyChanges(connection, running=running_id()).enqueue
    else:
        write = Enqueues(connection).enqueue_keyed_chunk
    for start in range(0, len(order), per_statement):
        part = order[start : start + per_statement]
        placed = write(new, [rows[index] for index in part])
        for index, job in zip(part, placed, strict=True):
            if job.is_held:
                check_holder(Enqueued.by(options), job.id, keys[index])
            job_ids[index] = job.id
    return [job_ids[row_of[index]] for index in range(len(keys))]
