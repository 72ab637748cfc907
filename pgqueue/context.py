"""The context of a running job, which a handler may take as a parameter."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from sqlalchemy.orm import Session

from pgqueue.errors import ArgumentsError, PgQueueError

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncSession

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Resource = Callable[
    [],
    Iterator[T] | AsyncIterator[T] | AbstractContextManager[T] | AbstractAsyncContextManager[T],
]
"""Opens what handlers share, and closes it: a generator function that yields it once, or a function
that returns a context manager."""

MOST = 2**53
"""The largest number in a progress report; up to this number a float is exact."""
LONGEST_NOTE = 500
"""How many characters of a note are stored, after secrets are masked."""


class Progress(NamedTuple):
    """The last report of a handler; None for omitted values."""

    done: float
    total: float | None = None
    note: str | None = None


class Finishing(Protocol):
    """Ends one job in a transaction that its handler begins."""

    @property
    def is_done(self) -> bool: ...

    def begin(self, result: Any) -> AbstractContextManager[Session]: ...

    def begin_async(self, result: Any) -> "AbstractAsyncContextManager[AsyncSession]": ...


class Steps(Protocol):
    """Records the steps of a job."""

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...

    async def run_async(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any: ...

    def each(
        self, name: str, query: Any, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> int: ...

    async def each_async(
        self, name: str, query: Any, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> int: ...

    def sleep(self, name: str, span: timedelta) -> None: ...

    async def sleep_async(self, name: str, span: timedelta) -> None: ...

    def wait_for(
        self, signal: str, key: Any, *, timeout: timedelta | None, name: str | None
    ) -> Any: ...

    async def wait_for_async(
        self, signal: str, key: Any, *, timeout: timedelta | None, name: str | None
    ) -> Any: ...

    def gather(self, name: str, jobs: Iterable[Any]) -> list[Any]: ...

    async def gather_async(self, name: str, jobs: Iterable[Any]) -> list[Any]: ...


class ReadOnlyMeta(dict[str, Any]):
    """``ctx.meta``: a dict that refuses writes, because nothing would store them."""

    def _refuse(self, *_args: Any, **_values: Any) -> Any:
        raise PgQueueError(
            "ctx.meta cannot be changed: it is what the enqueue has noted, and a write would be "
            "lost; report ctx.progress(), return a result, or write into a table of yours"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return ReadOnlyMeta, (dict(self),)


def _never() -> bool:
    return False


def _unlimited() -> None:
    return None


def _goes_on() -> None:
    return None


def _ignore(_: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class JobContext:
    """The running job, passed to a handler that has this type among its first parameters.

    Example:
        >>> @queue.task
        ... def deliver(ctx: JobContext, order_id: int) -> None:
        ...     if ctx.attempt > 1:
        ...         log.info("order %s again: attempt %s", order_id, ctx.attempt)
    """

    job_id: int
    """0 when the task is called as a plain function."""
    attempt: int
    """1 for the first attempt; unchanged after a Snooze."""
    max_attempts: int
    """How often the job may start."""
    queue: str
    """The name of its queue."""
    task: str
    """The name under which it was enqueued."""
    session: Any = None
    """The Session or AsyncSession of a transactional handler, else None.  Writes through it commit
    together with the job's completion, or not at all."""
    cancelled: Callable[[], bool] = field(default=_never, repr=False)
    meta: Mapping[str, Any] = field(default_factory=ReadOnlyMeta)
    """The data given by ``task.options(meta=...)`` and ``queue.on_enqueue`` at enqueue.  A write
    raises PgQueueError."""
    stopping: Callable[[], bool] = field(default=_never, repr=False)
    reporting: Callable[[Progress], None] = field(default=_ignore, repr=False)
    finishing: Finishing | None = field(default=None, repr=False)
    workflow_id: int | None = None
    """The workflow to which the job belongs."""
    steps: Steps | None = field(default=None, repr=False)
    remaining: Callable[[], timedelta | None] = field(default=_unlimited, repr=False)
    checking: Callable[[], None] = field(default=_goes_on, repr=False)
    resources: Mapping[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def is_last_attempt(self) -> bool:
        """Whether ``max_attempts`` is reached: if this attempt fails, the job fails.

        An error that the retry policy does not retry fails the job in any attempt.
        """
        return self.attempt >= self.max_attempts

    def is_cancelled(self) -> bool:
        """Return whether the handler should stop.

        Sends no query; a cancel is visible within a second.  In an async handler,
        ``CancelledError`` is raised too.

        Returns:
            True if the job was cancelled, the attempt has timed out or was taken over, or the
            transaction of the handler has ended with its connection.
        """
        return self.cancelled()

    def check(self) -> None:
        """End the handler here if it should not go on; call it in a loop.  Sends no query.

        For a handler whose work may begin again.  One that is to finish in the grace period of a
        stop asks :meth:`is_cancelled`.

        Raises:
            Cancel: The job was cancelled, or another worker has taken it over.
            TimeoutError: The timeout is over: the attempt is recorded as ``timeout``, and retried
                as the policy says.
            Suspended: The worker stops.  The job starts again on another worker, which uses up no
                attempt.

        Example:
            >>> for number in range(3):
            ...     ctx.check()
            ...     print(number)
        """
        self.checking()

    def time_left(self) -> timedelta | None:
        """Return how long the handler may still run.  Sends no query.

        Returns:
            The time until its timeout, zero after it; None without a timeout.
        """
        return self.remaining()

    def is_stopping(self) -> bool:
        """Return whether the worker was asked to stop; the grace period is then running.

        A long handler saves its progress and returns ``Snooze(timedelta(0))``, so that another
        worker continues the job.  Sends no query.

        Returns:
            True while the worker stops.
        """
        return self.stopping()

    def progress(self, done: float, total: float | None = None, note: str | None = None) -> None:
        """Report the progress of the handler, for ``Job.progress`` and ``pgqueue jobs ID``.

        Returns at once.  The worker writes the last report at most once a second, on a separate
        connection, so the report is visible while the handler's transaction is open.

        Args:
            done: How much is done, from 0.
            total: How much there is.
            note: A text, of which the first 500 characters are kept.

        Raises:
            ArgumentsError: A number is below zero, or a value has another type.

        Example:
            >>> ctx.progress(3, 10, "March")
        """
        self.reporting(checked_progress(done, total, note, where=f"job {self.job_id} {self.task}"))

    def resource(self, function: Resource[T], /) -> T:
        """Return what a function under :meth:`PgQueue.resource` has opened for this process.

        Args:
            function: The function.

        Returns:
            What it yields, or its context manager returns.

        Raises:
            PgQueueError: It is not open here: this is no worker, and :meth:`PgQueue.provide` has
                given no value; or it is async, and this is a child process.

        Example:
            >>> @queue.task
            ... def charge(ctx: JobContext, order_id: int) -> None:
            ...     ctx.resource(open_bank).charge(order_id, key=ctx.job_id)
        """
        try:
            value: T = self.resources[function]
        except KeyError:
            raise PgQueueError(
                f"job {self.job_id} {self.task}: the resource {name_of(function)} is not open "
                "here: workers open those that @queue.resource has registered before they start; "
                f"elsewhere, as in a test, write `with queue.provide({name_of(function)}, value):`"
            ) from None
        return value

    def finish(self, result: Any = None) -> AbstractContextManager[Session]:
        """Return a ``with`` block with a Session, whose commit also ends the job as succeeded.

        For a handler without a session, in a thread of a worker.  After an error in the block it is
        rolled back.  After the block the job has ended: a return value of the handler is ignored,
        and an exception is logged.

        Args:
            result: What is stored as ``job.result``.

        Returns:
            The block, which gets the Session.

        Raises:
            LeaseLost: By the end of the block, if the job has passed to another worker; the block
                was rolled back.
            Cancel: By the end of the block, if the job was cancelled; the block was rolled back.
            PayloadError: The result cannot be written as JSON.
            PgQueueError: The handler has a session, or has ended its job already.

        Example:
            >>> receipt = bank.charge(7, key=ctx.job_id)
            >>> with ctx.finish(result=receipt) as session:
            ...     session.get_one(Order, 7).is_paid = True
        """
        return self._finishing().begin(result)

    def finish_async(self, result: Any = None) -> "AbstractAsyncContextManager[AsyncSession]":
        """Return an ``async with`` block with an AsyncSession, as :meth:`finish` for async
        handlers.

        Args:
            result: What is stored as ``job.result``.

        Returns:
            The block, which gets the AsyncSession.

        Raises:
            LeaseLost, Cancel, PayloadError, PgQueueError: As by :meth:`finish`.
        """
        return self._finishing().begin_async(result)

    @property
    def is_finished(self) -> bool:
        """Whether :meth:`finish` has ended the job."""
        return self.finishing is not None and self.finishing.is_done

    @overload
    def step(
        self,
        name: str,
        function: "Callable[Concatenate[Session, P], R]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...
    @overload
    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function once, whatever becomes of this attempt, and return its result.

        The result is recorded under the name.  A later attempt of the job gets the record, and does
        not call the function.  A function that takes a ``Session`` writes in the transaction that
        records the step: both are committed, or neither.  Any other function may be called again,
        if its process dies before the record: give an outside service ``f"{ctx.job_id}:{name}"``
        as the key of the request.

        Args:
            name: The key of the record, at most 200 characters.  Each step of a handler has its
                own.
            function: What to call.
            *args: Its arguments, behind a Session and a JobContext, which are filled in.
            **kwargs: Its arguments by name.

        Returns:
            The result as JSON gives it back, also the first time.

        Raises:
            LeaseLost: The job has passed to another worker, so nothing was recorded.
            PayloadError: The result cannot be written as JSON.
            PgQueueError: The name comes twice, or the handler takes a Session itself: such a
                handler is one transaction.

        Example:
            >>> @queue.task
            ... def order(ctx: JobContext, order_id: int) -> None:
            ...     receipt = ctx.step("charge", bank.charge, order_id)
            ...     ctx.step("book", book, order_id, receipt)
        """
        return self._steps("ctx.step()").run(name, function, *args, **kwargs)

    async def step_async(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function once, as :meth:`step` does, in an async handler.

        Args:
            name: The key of the record.
            function: A function or coroutine function, which may take an AsyncSession.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            The result, as from :meth:`step`.

        Raises:
            LeaseLost, PayloadError, PgQueueError: As by :meth:`step`.
        """
        return await self._steps("ctx.step_async()").run_async(name, function, *args, **kwargs)

    def each(
        self,
        name: str,
        query: "Select[Any]",
        function: Callable[..., Any],
        /,
        *args: Any,
        key: Any = None,
        size: int = 100,
    ) -> int:
        """Call a function with all rows of a query, a page at a time, and go on where it was.

        Each page is one transaction: it reads the rows, calls the function, and records the key of
        the last row.  So no row whose writes are committed is repeated or skipped, wherever the
        process dies.  Between two pages the job ends as cancelled if it was cancelled, and a worker
        that stops hands it on, which uses up no attempt.

        Rows are read in the order of the key, also those that are added meanwhile behind the
        current one.

        Args:
            name: The key of the record, as for :meth:`step`.
            query: A ``select()`` without an order and a limit.
            function: Called with a ``Session``, the list of the rows of a page, and ``args``.
            *args: Further arguments.
            key: The column, or a tuple of columns, by which the rows are ordered.  Its values are
                unique, never NULL, and not changed by the function.  Default: the primary key of
                the class that the query selects.
            size: The rows of a page, at most 10,000.

        Returns:
            How many rows there were, in all attempts.

        Raises:
            ArgumentsError: The query has an order or a limit, or no key, or is none.
            LeaseLost: The job has passed to another worker.
            PgQueueError: A key is NULL or not unique, or as for :meth:`step`.

        Example:
            >>> def export(session: Session, orders: list[Order]) -> None:
            ...     session.add_all(Line(order_id=order.id) for order in orders)
            >>> ctx.each("orders", select(Order), export)
        """
        steps = self._steps("ctx.each()")
        return steps.each(name, query, function, *args, key=key, size=size)

    async def each_async(
        self,
        name: str,
        query: "Select[Any]",
        function: Callable[..., Any],
        /,
        *args: Any,
        key: Any = None,
        size: int = 100,
    ) -> int:
        """Call a function with all rows of a query, as :meth:`each` does, in an async handler.

        Args:
            name: The key of the record.
            query: A ``select()`` without an order and a limit.
            function: A function or coroutine function, called with an ``AsyncSession``, the list of
                the rows of a page, and ``args``.
            *args: Further arguments.
            key: The column or columns by which the rows are ordered, as for :meth:`each`.
            size: The rows of a page, at most 10,000.

        Returns:
            How many rows there were, in all attempts.

        Raises:
            ArgumentsError, LeaseLost, PgQueueError: As by :meth:`each`.
        """
        steps = self._steps("ctx.each_async()")
        return await steps.each_async(name, query, function, *args, key=key, size=size)

    def sleep(self, name: str, span: timedelta) -> None:
        """Let the job go on later, with its slot free until then.

        Ends the attempt by an exception that ``except Exception`` does not catch, and uses up no
        attempt.  The job starts again from the beginning of its handler, whose steps are on record.

        Args:
            name: The key of the record, as for :meth:`step`.
            span: How long, from the first time.

        Raises:
            LeaseLost: The job has passed to another worker.
            PgQueueError: As for :meth:`step`.

        Example:
            >>> ctx.sleep("cool down", timedelta(days=1))
        """
        self._steps("ctx.sleep()").sleep(name, span)

    async def sleep_async(self, name: str, span: timedelta) -> None:
        """Let the job go on later, as :meth:`sleep` does, in an async handler.

        Args:
            name: The key of the record.
            span: How long, from the first time.

        Raises:
            LeaseLost, PgQueueError: As by :meth:`sleep`.
        """
        await self._steps("ctx.sleep_async()").sleep_async(name, span)

    def wait_for(
        self,
        signal: str,
        key: "str | int | UUID" = "",
        *,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> Any:
        """Wait for a signal that the application sends by :meth:`PgQueue.signal`, and return what
        it carries.

        Lets the job sleep, as :meth:`sleep` does, and wakes it when the signal is committed.  A
        signal that was sent since the job was enqueued is received at once.  It is not used up:
        other jobs may receive it too.  Each wait of a job receives another signal.

        Args:
            signal: The name of the signal.
            key: Of what it is, for example the id of an order.
            timeout: How long to wait, from the first time; default: without end.
            name: The key of the record, as for :meth:`step`; default: made of the signal and the
                key.

        Returns:
            The payload of the signal, as JSON gives it back.

        Raises:
            SignalTimeout: The signal has not come in time; also in each later attempt.
            LeaseLost: The job has passed to another worker.
            ArgumentsError: A signal cannot have this name or key.
            PgQueueError: As for :meth:`step`.

        Example:
            >>> paid = ctx.wait_for("paid", order_id, timeout=timedelta(days=7))
        """
        steps = self._steps("ctx.wait_for()")
        return steps.wait_for(signal, key, timeout=timeout, name=name)

    async def wait_for_async(
        self,
        signal: str,
        key: "str | int | UUID" = "",
        *,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> Any:
        """Wait for a signal, as :meth:`wait_for` does, in an async handler.

        Args:
            signal: The name of the signal.
            key: Of what it is, for example the id of an order.
            timeout: How long to wait, from the first time; default: without end.
            name: The key of the record; default: made of the signal and the key.

        Returns:
            The payload of the signal.

        Raises:
            SignalTimeout, LeaseLost, ArgumentsError, PgQueueError: As by :meth:`wait_for`.
        """
        steps = self._steps("ctx.wait_for_async()")
        return await steps.wait_for_async(signal, key, timeout=timeout, name=name)

    def gather(self, name: str, jobs: Iterable[Any]) -> list[Any]:
        """Enqueue jobs, and return their results when all have succeeded.

        Enqueues the jobs as a batch, once, in one transaction with the record of the step.  Lets
        the job sleep, as :meth:`sleep` does, and wakes it when the last of them has ended.

        Args:
            name: The key of the record, as for :meth:`step`, and the name of the batch.
            jobs: New jobs, as ``task.job(...)`` returns them.

        Returns:
            Their results, as JSON gives them back, in the order of the jobs.

        Raises:
            JobsFailed: A job has failed or was cancelled; its ``jobs`` has the outcome of each.
                If the handler does not catch it, the attempt fails; later attempts look again,
                and wait for jobs that were requeued meanwhile.
            JobNotFound: A job was deleted before its result was read.
            LeaseLost: The job has passed to another worker.
            ArgumentsError: Something else than a new job is given, or one job twice.
            DuplicateJob: The unique key of a job is taken; nothing was enqueued.
            PgQueueError: As for :meth:`step`.

        Example:
            >>> counts = ctx.gather("months", [count.job(year, month) for month in range(1, 13)])
            >>> total = sum(counts)
        """
        return self._steps("ctx.gather()").gather(name, jobs)

    async def gather_async(self, name: str, jobs: Iterable[Any]) -> list[Any]:
        """Enqueue jobs and return their results, as :meth:`gather` does, in an async handler.

        Args:
            name: The key of the record, and the name of the batch.
            jobs: New jobs, as ``task.job(...)`` returns them.

        Returns:
            Their results, in the order of the jobs.

        Raises:
            JobsFailed, JobNotFound, LeaseLost, ArgumentsError, DuplicateJob, PgQueueError: As by
                :meth:`gather`.
        """
        return await self._steps("ctx.gather_async()").gather_async(name, jobs)

    def _steps(self, what: str) -> Steps:
        where = f"job {self.job_id} {self.task}: {what}"
        if self.session is not None:
            raise PgQueueError(
                f"{where} is for handlers without a session; this handler has one, and is one "
                "transaction: let the functions of the steps take the Session"
            )
        if self.steps is None:
            raise PgQueueError(f"{where} needs a worker; a JobContext made by hand has none")
        return self.steps

    def _finishing(self) -> Finishing:
        where = f"job {self.job_id} {self.task}: ctx.finish()"
        if self.session is not None:
            raise PgQueueError(
                f"{where} is for handlers without a session; this handler has one, which is "
                "committed with the end of its job when the handler returns"
            )
        if self.finishing is None:
            raise PgQueueError(
                f"{where} needs a thread of a worker, which neither a child process nor a "
                "JobContext made by hand has: omit executor='process', or open "
                "queue.session() in the handler"
            )
        return self.finishing


def name_of(function: Any) -> str:
    """What messages call a function of the application."""
    return str(getattr(function, "__qualname__", repr(function)))


def checked_progress(done: Any, total: Any, note: Any, *, where: str) -> Progress:
    """Check a progress report and return it.  Raises ArgumentsError."""
    for name, value in (("done", done), ("total", 0 if total is None else total)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MOST:
            raise ArgumentsError(
                f"{where}: {name} of its progress is {value!r:.60}; give a number from 0 to 2**53"
            )
    if note is not None and not isinstance(note, str):
        raise ArgumentsError(
            f"{where}: the note of its progress is {type(note).__name__}; give a str or None"
        )
    return Progress(done, total, note if note is None else note[: 10 * LONGEST_NOTE])


Around = Callable[[JobContext], AbstractContextManager[None]]
"""A function that returns a context manager.  A worker enters it before a handler and exits it
after the handler, in the handler's thread or coroutine.

The pending changes of a transactional handler's session are flushed before the exit.  The context
manager must not suppress an error of the handler.  An error that the context manager raises fails
the attempt, like an error of the handler.
"""

_NOTHING = nullcontext()


def nothing_around(_context: JobContext) -> nullcontext[None]:
    return _NOTHING
