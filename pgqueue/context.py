"""The context of a running job, which a handler may take as a parameter."""

from collections.abc import Callable, Iterable, Mapping
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


def _never() -> bool:
    return False


def _ignore(_: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class JobContext:
    """The running job, passed to a handler that has this type among its first parameters."""

    job_id: int
    """0 when the task is called as a plain function."""
    attempt: int
    """1 for the first attempt; unchanged after a Snooze."""
    max_attempts: int
    queue: str
    task: str
    session: Any = None
    """The Session or AsyncSession of a transactional handler, else None.  Writes through it commit
    together with the job's completion, or not at all."""
    cancelled: Callable[[], bool] = field(default=_never, repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The data given by ``task.options(meta=...)`` and ``queue.on_enqueue`` at enqueue."""
    stopping: Callable[[], bool] = field(default=_never, repr=False)
    reporting: Callable[[Progress], None] = field(default=_ignore, repr=False)
    finishing: Finishing | None = field(default=None, repr=False)
    workflow_id: int | None = None
    """The workflow to which the job belongs."""
    steps: Steps | None = field(default=None, repr=False)

    def is_cancelled(self) -> bool:
        """Return whether the handler should stop.

        True if the job was cancelled, the attempt has timed out or was taken over, or the
        transaction of the handler has ended with its connection.  Sends no query; a cancel is
        visible within a second.  In an async handler, ``CancelledError`` is raised too.
        """
        return self.cancelled()

    def is_stopping(self) -> bool:
        """Return whether the worker was asked to stop; the grace period is then running.

        A long handler saves its progress and returns ``Snooze(timedelta(0))``, so that another
        worker continues the job.  Sends no query.
        """
        return self.stopping()

    def progress(self, done: float, total: float | None = None, note: str | None = None) -> None:
        """Report the progress of the handler, for ``Job.progress`` and ``pgqueue jobs ID``.

        Returns at once.  The worker writes the last report at most once a second, on a separate
        connection, so the report is visible while the handler's transaction is open.  A note is
        cut to 500 characters.  Raises ArgumentsError for numbers below zero and for other types.
        """
        self.reporting(checked_progress(done, total, note, where=f"job {self.job_id} {self.task}"))

    def finish(self, result: Any = None) -> AbstractContextManager[Session]:
        """Return a ``with`` block with a Session, whose commit also ends the job as succeeded.

        For a handler without a session, in a thread of a worker.  The end of the
        block writes ``result`` to ``job.result`` and commits.  It raises LeaseLost if the lease was
        lost, and Cancel if the job was cancelled; the block is then rolled back, as after any error
        in it.  After the block the job has ended: a return value of the handler is ignored, and an
        exception is logged.
        """
        return self._finishing().begin(result)

    def finish_async(self, result: Any = None) -> "AbstractAsyncContextManager[AsyncSession]":
        """:meth:`finish` for async handlers: an ``async with`` block with an AsyncSession."""
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
        """:meth:`step` for async handlers; the function may be a coroutine function, and take an
        AsyncSession."""
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
        """:meth:`each` for async handlers; the function may be a coroutine function that takes an
        AsyncSession."""
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
        """:meth:`sleep` for async handlers."""
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
        """:meth:`wait_for` for async handlers."""
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
        """:meth:`gather` for async handlers."""
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
