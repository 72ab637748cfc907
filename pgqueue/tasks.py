"""A task: a function that can be called here and now, or enqueued to be called later."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

from sqlalchemy import Engine, func
from sqlalchemy.orm import Session, scoped_session

from pgqueue import async_session
from pgqueue.context import JobContext
from pgqueue.errors import ArgumentsError
from pgqueue.injection import Injection, injection_of
from pgqueue.models import Job
from pgqueue.options import JobOptions, Options, names_wanted_by, storable_key
from pgqueue.payload import Payload
from pgqueue.repository import Enqueued, Jobs, NewJob
from pgqueue.unit_of_work import dispatch_at_flush, loaded_job, sync_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

P = ParamSpec("P")
R = TypeVar("R")

CHUNK = 1000
"""Jobs to one statement of ``enqueue_many``."""


class Owner(Protocol):
    """What a task asks of the queue it belongs to."""

    notify: bool

    @property
    def autocommit(self) -> Engine: ...

    def session(self) -> Session: ...

    def async_session(self) -> "AsyncSession": ...


class Task(Generic[P, R]):
    """A function, its options, and the ways to have it run.

    Calling the task runs the function here and now; everything else writes a job.
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
        )
        self._owner = owner
        self._set_options(options)

    @property
    def is_async(self) -> bool:
        return self.injection.is_async

    @property
    def is_transactional(self) -> bool:
        """Whether the handler's writes commit together with the job's completion."""
        return self._options.transactional or self.injection.wants_session

    @property
    def settings(self) -> Options:
        """The options of this task, with their defaults."""
        return self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now.

        What pgqueue injects is a session of its own, which is committed when the function
        returns and rolled back when it raises.
        """
        if not self.injection.parameters:
            return self.function(*args, **kwargs)
        if self.is_async:
            return self._call_async(*args, **kwargs)  # type: ignore[return-value]  # R is the coroutine
        with self._owner.session() as session, session.begin():
            injected = self.injection.values(session=session, context=self._context(session))
            return self.function(*injected, *args, **kwargs)

    def enqueue(
        self, session: "Session | scoped_session[Any]", /, *args: P.args, **kwargs: P.kwargs
    ) -> Job:
        """Enqueue a job in the caller's transaction; it runs if, and only after, that commits.

        The job's rows are written at once and ``job.id`` is loaded; nothing else of the session
        is flushed, and nothing is committed.  When an unfinished job of the queue holds the
        unique key, that job is returned.  Raises ArgumentsError or PayloadError before anything
        is written.
        """
        target = sync_session(session, f"task {self.name}")
        args_json, text, key = self._written(args, kwargs)
        connection = target.connection(bind_arguments={"mapper": Job})
        found = Jobs(connection).enqueue(self._new, args=text, unique_key=key)
        if isinstance(found, int):
            with target.no_autoflush:
                return target.get_one(Job, found)
        job = self._loaded_job(found, args_json, key)
        target.add(job)
        return job

    async def enqueue_async(
        self,
        session: "AsyncSession | async_scoped_session[Any]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Job:
        """:meth:`enqueue` for an AsyncSession.

        As with every object of an AsyncSession, read what you need of the job before you
        commit, or make the session with ``expire_on_commit=False``.
        """
        return await async_session.run_sync(session, self.enqueue, *args, **kwargs)

    def enqueue_many(
        self,
        session: "Session | scoped_session[Any]",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """Enqueue a job for each row of arguments; returns their ids in the same order.

        A row is a tuple of positional arguments, or a dict of arguments by name.  All rows are
        checked before the first is written.
        """
        target = sync_session(session, f"task {self.name}")
        bound = [self._bound(row, index) for index, row in enumerate(rows)]
        encoded = self.payload.encode_many(bound)
        # Every text before the first statement: a row that cannot be written loses nothing.
        texts = [
            self.payload.dumps_many(encoded[start : start + CHUNK], first_index=start)
            for start in range(0, len(encoded), CHUNK)
        ]
        repository = Jobs(target.connection(bind_arguments={"mapper": Job}))
        if self._options.unique_key is not None:
            return self._enqueue_unique(repository, encoded, [self._key(row) for row in bound])
        ids: list[int] = []
        for text in texts:
            ids += repository.enqueue_chunk(self._new, documents=text)
        return ids

    async def enqueue_many_async(
        self,
        session: "AsyncSession | async_scoped_session[Any]",
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    ) -> list[int]:
        """:meth:`enqueue_many` for an AsyncSession."""
        return await async_session.run_sync(session, self.enqueue_many, rows)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """A new Job for ``session.add``; the flush that inserts it inserts its message too.

        A taken unique key raises DuplicateJob at that flush.
        """
        args_json, _, key = self._written(args, kwargs)
        job = Job(
            task=self.name,
            args=args_json,
            queue=self._options.queue,
            priority=self._options.priority,
            max_attempts=self._options.max_attempts,
            unique_key=key,
        )
        if self._options.run_at is not None:
            job.run_at = func.greatest(self._options.run_at, func.clock_timestamp())
        elif self._options.delay is not None:
            job.run_at = func.clock_timestamp() + self._options.delay
        return dispatch_at_flush(job, notify=self._owner.notify)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a job in a transaction of its own, committed when this returns."""
        args_json, text, key = self._written(args, kwargs)
        # One statement is one transaction: autocommit saves two round trips.
        with self._owner.autocommit.connect() as connection:
            found = Jobs(connection).enqueue(self._new, args=text, unique_key=key)
        if isinstance(found, Enqueued):
            return self._loaded_job(found, args_json, key)
        with self._owner.session() as session:
            job = session.get_one(Job, found)
            session.expunge(job)
            return job

    def options(self, **options: Unpack[JobOptions]) -> "Task[P, R]":
        """The same task with other options for what is enqueued through it.

        ``delay`` (a timedelta) or ``run_at`` (a datetime with a time zone), ``priority`` (0 to
        9, 0 first), ``queue``, ``unique_key``, ``max_attempts``.  Raises OptionError.
        """
        changed = copy.copy(self)
        changed._set_options(self._options.of_job(options))
        return changed

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def _set_options(self, options: Options) -> None:
        self._options = options
        self._key_names: frozenset[str] = frozenset()
        if callable(options.unique_key):
            self._key_names = names_wanted_by(
                options.unique_key, self.name, frozenset(self.payload.names)
            )
        self._new = NewJob(
            task=self.name,
            queue=options.queue,
            priority=options.priority,
            max_attempts=options.max_attempts,
            notify=self._owner.notify,
            delay=options.delay,
            run_at=options.run_at,
        )

    def _written(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str, str | None]:
        """The arguments as JSON and as its text, and the unique key they make."""
        values = self.payload.bind(args, kwargs)
        encoded = self.payload.encode(values)
        return encoded, self.payload.dumps(encoded), self._key(values)

    def _key(self, values: Mapping[str, Any]) -> str | None:
        key = self._options.unique_key
        if callable(key):
            known = self.payload.with_defaults(values)
            key = key(**{name: known[name] for name in self._key_names})
        return storable_key(key, self.name)

    def _bound(self, row: Sequence[Any] | Mapping[str, Any], index: int) -> dict[str, Any]:
        if isinstance(row, tuple):
            return self.payload.bind(row, {})
        if isinstance(row, Mapping):
            return self.payload.bind((), row)
        raise ArgumentsError(
            f"task {self.name}: row {index} of enqueue_many is {type(row).__name__}; give a tuple "
            "of positional arguments, as (7,), or a dict of arguments by name"
        )

    def _enqueue_unique(
        self, repository: Jobs, encoded: list[dict[str, Any]], keys: list[str | None]
    ) -> list[int]:
        # In the order of the keys, over all chunks: two callers in opposite orders would deadlock.
        order = sorted(range(len(keys)), key=lambda index: keys[index] or "")
        found: dict[int, int] = {}
        for start in range(0, len(order), CHUNK):
            part = order[start : start + CHUNK]
            ids = repository.enqueue_unique_chunk(
                self._new,
                payloads=[encoded[index] for index in part],
                keys=[keys[index] for index in part],
            )
            found.update(zip(part, ids, strict=True))
        return [found[index] for index in range(len(keys))]

    def _loaded_job(self, found: Enqueued, args: dict[str, Any], key: str | None) -> Job:
        return loaded_job(
            *found,
            task=self.name,
            args=args,
            queue=self._new.queue,
            priority=self._new.priority,
            max_attempts=self._new.max_attempts,
            unique_key=key,
        )

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        function: Callable[..., Any] = self.function
        if not self.injection.wants_async_session:
            injected = self.injection.values(session=None, context=self._context(None))
            return await function(*injected, *args, **kwargs)
        async with self._owner.async_session() as session, session.begin():
            injected = self.injection.values(session=session, context=self._context(session))
            return await function(*injected, *args, **kwargs)

    def _context(self, session: Any) -> JobContext:
        return JobContext(
            job_id=0,
            attempt=1,
            max_attempts=self._options.max_attempts,
            queue=self._options.queue,
            task=self.name,
            session=session,
        )
