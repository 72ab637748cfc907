"""One attempt while its handler runs, as its own thread and others see it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from threading import Event, Lock
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from pgqueue.context import Finishing, JobContext, Progress, ReadOnlyMeta, Steps
from pgqueue.database.keepalive import has_ended
from pgqueue.database.opening import backend_pid, driver_connection
from pgqueue.errors import PgQueueError
from pgqueue.meta import read_meta, workflow_in
from pgqueue.outcomes import AttemptEnd, Cancel, Suspended, TimeIsUp
from pgqueue.repository.claim import Claimed
from pgqueue.tasks import Task

T = TypeVar("T")

NO_RESOURCES: Mapping[Any, Any] = MappingProxyType({})

CANCEL_WITHIN = 1.0
"""Seconds a cancelled async handler has to end."""


class Child(Protocol):
    """A child process, as the attempt sees whose handler runs in it."""

    @property
    def pid(self) -> int | None: ...

    def notify(self, attempt: "RunningAttempt") -> None: ...

    def kill(self, end: AttemptEnd) -> None: ...

    def show_stack(self) -> None: ...


class Clock(Protocol):
    """What ends an async handler."""

    task: "asyncio.Task[Any] | None"
    """The asyncio task of the handler."""

    def interrupt(self) -> None:
        """Raise CancelledError in the handler.  Any thread may call it."""

    def held(self) -> AbstractContextManager[None]:
        """Interrupt nothing in this block."""


def context_of(
    claimed: Claimed,
    *,
    session: Any = None,
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    reporting: Callable[[Progress], None],
    finishing: Finishing | None = None,
    steps: Steps | None = None,
    remaining: Callable[[], timedelta | None],
    checking: Callable[[], None],
    resources: Mapping[Any, Any],
) -> JobContext:
    """The context of a claimed job, in the worker or in a child process."""
    return JobContext(
        job_id=claimed.job_id,
        attempt=claimed.attempt,
        max_attempts=claimed.max_attempts,
        queue=claimed.queue,
        task=claimed.task,
        session=session,
        cancelled=cancelled,
        meta=ReadOnlyMeta(read_meta(claimed.meta)),
        stopping=stopping,
        reporting=reporting,
        finishing=finishing,
        workflow_id=workflow_in(claimed.meta),
        steps=steps,
        remaining=remaining,
        checking=checking,
        resources=resources,
    )


class RunningAttempt:
    """One attempt while its handler runs."""

    # Defaults of the class, not assignments in __init__, which would cost every job.
    finishing: Finishing | None = None
    """The ``ctx.finish()`` of its handler, if it has one."""
    steps: Steps | None = None
    """The steps of its handler, if it may have some."""
    has_begun = False
    """Whether its transactional handler has been called."""
    is_committed = False
    """Whether its transaction is committed, and the end of its job with it."""
    stopped_for: BaseException | None = None
    """Why its handler was told to stop, if it was.  The attempt of an async handler that is ended
    by this has the outcome as if the handler had raised this error."""
    clock: "Clock | None" = None
    """That of its handler, while it is async and runs."""
    is_lost = False
    """It was settled from outside of its thread, or its lease has passed on: its result is
    dropped."""
    is_abandoned = False
    """Its thread did not return in time, and another thread has taken the slot."""
    backend_pid: int | None = None
    """The server process of its transaction, if it has one."""
    session: Session | None = None
    """The Session of its handler, or of its ``ctx.finish()``, until its transaction has ended."""
    child: Child | None = None
    """The child process its handler runs in, if it has one."""
    _driver: Any = None
    _block: str | None = None

    def __init__(
        self,
        claimed: Claimed,
        task: Task[..., Any],
        *,
        worker_id: UUID,
        stopping: Event,
        resources: Mapping[Any, Any] = NO_RESOURCES,
        report: Callable[["RunningAttempt", Progress], object] | None = None,
    ) -> None:
        """
        ``resources``: what is open for its handler, by the functions that open it.  ``report``:
        keeps what the handler reports of its progress; it must not block.
        """
        self.claimed = claimed
        self.task = task
        self.settings = task.settings.as_enqueued(claimed.meta)
        self.worker_id = worker_id
        """The worker id of its lease: a worker that is declared dead takes another id."""
        self.stopping = stopping
        self.resources = resources
        self.started_at = self.ended_at = time.monotonic()
        self.leaving = Lock()
        """Held by a thread that settles the attempt from outside of its own thread."""
        self._report = report
        self._unfinished = [True]

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A step of its handler, or its block of ``ctx.finish()``: one at a time, because each has
        the transaction of the attempt."""
        if self._block is not None:
            raise PgQueueError(
                f"job {self.claimed.job_id} {self.task.name}: {name} begins inside of "
                f"{self._block}, or beside it; let one end before the next"
            )
        self._block = name
        try:
            yield
        finally:
            self._block = None

    @contextmanager
    def on(self, connection: Connection) -> Iterator[None]:
        """Set the connection of its transaction, which no other thread uses, until it has ended."""
        self._driver = driver_connection(connection)
        self.backend_pid = backend_pid(connection)  # last: other threads read it
        try:
            yield
        finally:
            self.leave_connection()

    def leave_connection(self) -> None:
        """Forget the connection: its transaction has ended."""
        with self.leaving:
            self.backend_pid = None

    def wait_for(self, function: Callable[[], T]) -> T:
        """Call a function that blocks; for an async handler in a thread: its loop goes on."""
        return await_only(asyncio.to_thread(function)) if self.task.is_async else function()

    def begin(self) -> None:
        """Start the clock: the handler is called now.

        Waiting for a connection or a process does not count towards the timeout.
        """
        self.has_begun = True
        self.started_at = time.monotonic()

    def forget_session(self) -> None:
        """Close the handler's Session: its writes are not kept."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def begin_in(self, child: Child) -> None:
        """Set the process its handler will run in; kill it if the attempt is lost already."""
        self.child = child
        if self.is_lost:
            child.kill(AttemptEnd.INTERRUPTED)

    def leave_child(self) -> None:
        """Forget the child process, which may run another attempt from now on."""
        with self.leaving:
            self.child = None

    def kill(self) -> None:
        """Kill the child process its handler runs in, if any: the job is cancelled."""
        with self.leaving:
            if self.child is not None:
                self.child.kill(AttemptEnd.CANCELLED)

    def ask_to_stop(self, reason: BaseException) -> None:
        """Tell its handler to stop.

        An async handler is interrupted.  Another one stops if it checks ``is_cancelled()``.
        """
        if self.stopped_for is None:
            self.stopped_for = reason
            self.notify_child()
            self._interrupt()

    def _interrupt(self) -> None:
        clock = self.clock  # its handler may end meanwhile
        if clock is not None:
            clock.interrupt()

    def committing(self) -> AbstractContextManager[None]:
        """A block of its handler that commits, and that nothing interrupts."""
        return nullcontext() if self.clock is None else self.clock.held()

    def notify_child(self) -> None:
        """Tell the process of its handler of a cancel or of a stop."""
        child = self.child  # its slot may take it away meanwhile
        if child is not None:
            child.notify(self)

    def finish(self) -> bool:
        """Take the right to decide how this attempt ended; True for the first caller only."""
        try:
            is_first = self._unfinished.pop()
        except IndexError:
            return False
        self.ended_at = time.monotonic()
        return is_first

    @property
    def times(self) -> tuple[float, float]:
        """When the attempt started and ended, by this process's clock."""
        return self.started_at, self.ended_at

    def lose(self) -> bool:
        """Take the attempt away from its thread; False if it has ended already."""
        self.is_lost = self.finish() or self.is_lost
        if self.is_lost and self.child is not None:
            self.child.kill(AttemptEnd.INTERRUPTED)
        if self.is_lost:
            self._interrupt()
        return self.is_lost

    def is_cancelled(self) -> bool:
        return self.stopped_for is not None or self.is_lost

    def is_stopping(self) -> bool:
        return self.stopping.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether it is decided how this attempt ended."""
        return not self._unfinished

    def report(self, progress: Progress) -> None:
        """Pass on what the handler reports of its progress."""
        if self._report is not None:
            self._report(self, progress)

    @property
    def server_process(self) -> int | None:
        """The server process of its transaction.  Hold ``leaving`` to read it.

        None once the transaction has ended: another process may have the same pid by then.
        """
        has_none = self.backend_pid is None or has_ended(self._driver)
        return None if has_none else self.backend_pid

    @property
    def is_cut_off(self) -> bool:
        """Whether its transaction has ended with its connection, noticed by its thread or not."""
        with self.leaving:
            return self.backend_pid is not None and has_ended(self._driver)

    @property
    def deadline(self) -> float | None:
        timeout = self.settings.timeout
        return None if timeout is None else self.started_at + timeout.total_seconds()

    def check(self) -> None:
        """End its handler, by raising, if it should not go on."""
        if self.is_lost:
            raise Cancel("the attempt has ended: its job is no longer this handler's")
        if self.is_cancelled():
            raise Cancel("the job was cancelled while its handler ran")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise TimeIsUp(f"the handler ran longer than {self.settings.timeout}")
        if self.is_stopping():
            raise Suspended(0.0)

    def time_left(self) -> timedelta | None:
        """How long its handler may still run; None without a timeout."""
        if self.deadline is None:
            return None
        return timedelta(seconds=max(self.deadline - time.monotonic(), 0.0))

    @property
    def is_overdue(self) -> bool:
        """Whether its thread must be abandoned; never, if the handler is in a child process.

        The event loop cancels an async handler first, unless a handler blocks the loop.
        """
        deadline = self.deadline
        if deadline is None or self.task.in_process:
            return False
        if self.task.is_transactional and not self.has_begun:
            return False  # its handler still waits for a connection
        margin = CANCEL_WITHIN if self.task.is_async else 0.0
        return time.monotonic() > deadline + margin

    @property
    def is_settled(self) -> bool:
        """Whether the end of the job is committed, while its thread perhaps still runs: by
        ``ctx.finish()``, or before the listeners to ``after_commit`` are called."""
        return self.is_committed or (self.finishing is not None and self.finishing.is_done)

    def context(self, session: Any = None) -> JobContext:
        return context_of(
            self.claimed,
            session=session,
            cancelled=self.is_cancelled,
            stopping=self.is_stopping,
            reporting=self.report,
            finishing=self.finishing,
            steps=self.steps,
            remaining=self.time_left,
            checking=self.check,
            resources=self.resources,
        )
