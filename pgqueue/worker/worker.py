"""The worker that an application or the command line starts."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from _thread import start_new_thread
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any, Self, Unpack

from sqlalchemy.orm import configure_mappers

from pgqueue import redaction
from pgqueue.checks import AT_ONCE, check, span
from pgqueue.errors import AttemptFailed, OptionError, PgQueueError, UsedAcrossFork, WorkerBroken
from pgqueue.events import AttemptOutcome, attempt_outcome
from pgqueue.job_queue import PgQueue
from pgqueue.models import DEFAULT_QUEUE
from pgqueue.options import OptionsOfWorker, WorkerOptions
from pgqueue.repository.listing import Listing
from pgqueue.rules.served_queues import is_pattern
from pgqueue.tasks import queues_of
from pgqueue.worker.health import WorkerHealth
from pgqueue.worker.hosting import HostedWorker
from pgqueue.worker.inline_attempt import InlineAttempt
from pgqueue.worker.inline_worker import InlineWorker
from pgqueue.worker.ledger import STALE
from pgqueue.worker.supervisor import Supervisor
from pgqueue.worker.until_empty import HandlerErrors, drain_ahead

logger = redaction.logger(__name__)


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a worker: SIGTERM, SIGINT and SIGHUP.

    SIGHUP only if it is not ignored: ``nohup`` starts a program that is to outlive its terminal.
    """
    signals = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def report_signals() -> list[signal.Signals]:
    """SIGUSR1, by which a worker logs what it is doing, unless the application handles it."""
    number = getattr(signal, "SIGUSR1", None)
    return [] if number is None or signal.getsignal(number) is not signal.SIG_DFL else [number]


class Worker:
    """Runs the jobs of some queues until it is stopped.

    Args:
        queue: The queue whose tasks it runs.
        queues: The names of the queues to serve, by default all queues of registered tasks; ``"*"``
            serves all queues, and ``"mail.*"`` all whose names begin with ``mail.``.  Or weights by
            name: with ``{"mail": 3, "reports": 1}`` three of four jobs are of the queue ``mail``
            while both have jobs.
        **options: ``concurrency``, ``poll_interval``, ``grace`` and others.  The page "Options" of
            the reference lists them with their defaults.

    Raises:
        OptionError: An option has a wrong value.
        UnknownOption: There is no such option.

    Example:
        >>> worker = Worker(queue, ["mail", "default"], concurrency=4)
        >>> counts = worker.run_until_empty(timeout=60)
    """

    def __init__(
        self,
        queue: PgQueue,
        queues: Sequence[str] | Mapping[str, int] | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        if not isinstance(queue, PgQueue):
            raise OptionError(
                f"Worker({type(queue).__name__}): give the PgQueue whose tasks it is to run"
            )
        named = queues_of(queue.tasks.values())
        if queues is None:
            queues = sorted(named | {DEFAULT_QUEUE})
        self._queue = queue
        self._config = OptionsOfWorker.checked(queues, options)
        given = {queue for queue in self._config.names if not is_pattern(queue)}
        for name in sorted(given - named - {DEFAULT_QUEUE}):
            logger.warning(
                "queue %r: no task of this application uses it; is the name misspelt?", name
            )
        self._pid = os.getpid()
        self._stopping = Event()
        self._signals = 0
        self._supervisor: Supervisor | None = None
        self._hosted: HostedWorker | None = None
        """The run in a block of a coroutine."""

    def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM, SIGINT or SIGHUP; a second signal ends the grace.

        With ``max_jobs`` or ``max_idle`` also until so many attempts have ended, or no job has run
        for so long.

        Returns when all handlers have ended, or at the end of the grace period.  Handlers that
        still run then keep their leases until they end, :meth:`interrupt` is called, or the process
        ends.

        Handles signals only in the main thread: the stop, and SIGUSR1, which logs
        :meth:`activity`.  Waits for a database that cannot be reached.

        Raises:
            SchemaError: The tables are missing or of another version.
            NotBound: The queue has no database.
            OptionError: The queue is bound to a Connection.
            UsedAcrossFork: The worker was made before a fork of this process.
            WorkerBroken: A child process imports the main module again, and that starts a worker;
                or a thread has ended because of a bug in pgqueue.
            TooManyStuck: Handlers that are past their timeouts occupy all slots.
            PgQueueError: A mapped class of the application is wrong.
        """
        self._check_process()
        self._refuse_connection()
        with _past_left_alone():
            self._work(until_empty=False, deadline=None)

    async def __aenter__(self) -> Self:
        """Run the worker inside of an asyncio application, for the length of the block.

        The worker has its threads, as in :meth:`run`.  Async handlers run on the event loop of the
        application.  The worker handles no signals.  The end of the block stops it and waits for
        running handlers, for the grace period; a cancel meanwhile ends the grace period.

        If the worker fails, the block is cancelled and raises the error of the worker, as an
        ``asyncio.TaskGroup`` does for a failed task.

        Returns:
            The worker, for :meth:`health` and :meth:`stop`.

        Raises:
            SchemaError: The tables are missing or of another version.  The block does not begin.
                It does begin if the database cannot be reached: the worker waits for it.
            OptionError: The queue is bound to a Connection, or this worker runs already.
        """
        self._check_process()
        self._refuse_connection()
        if self._hosted is not None:
            raise OptionError("this Worker runs already; make another one for another block")
        self._signals = 0
        work = partial(self._work, until_empty=False, deadline=None)
        self._hosted = HostedWorker(work, stop=self.stop, end_grace=self._end_grace)
        try:
            await self._hosted.begin()
        except BaseException:
            self._end_hosting()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._hosted is not None, "the block has begun"
        try:
            await self._hosted.end()
        finally:
            self._end_hosting()

    def run_until_empty(
        self,
        timeout: float | None = None,
        *,
        raise_errors: bool = False,
        ahead: timedelta = timedelta(0),
    ) -> dict[str, int]:
        """Work until no job is due or running, or for ``timeout`` seconds.

        Jobs may be left: those of tasks this application does not have, those whose arguments it
        cannot read, or all that did not run within ``timeout``, for example because the database
        was away.

        If the queue is bound to a Connection, as in a test, the jobs run in this thread and in the
        transaction of the connection, one after the other, without ``timeout``.

        Args:
            timeout: For how many seconds at most.  None: without a limit.
            raise_errors: For tests: raise the first error of a handler, when all jobs have run.
            ahead: Also run the jobs that become due within this time, in the order of their due
                times.

        Returns:
            The number of attempts by ending: succeeded, failed, cancelled, retried, snoozed,
            interrupted, unreadable, stale.

        Raises:
            AttemptFailed: With ``raise_errors``, an attempt failed without an exception, such as by
                its timeout.
            SchemaError, NotBound, PgQueueError: As by :meth:`run`.
        """
        self._check_process()
        check("run_until_empty: ", "ahead", ahead, span(AT_ONCE))
        seconds = ahead.total_seconds()
        counts: Counter[str] = Counter()
        if (connection := self._queue.connection) is not None:

            def count(attempt: InlineAttempt) -> None:
                outcome = attempt.outcome
                counts[STALE if outcome is None else attempt_outcome(outcome)] += 1

            worker = InlineWorker(self._queue, connection, self._config.names)
            worker.run_until_empty(count, ahead=seconds, raise_errors=raise_errors)
            return dict(counts)
        deadline = None if timeout is None else time.monotonic() + timeout
        errors = HandlerErrors() if raise_errors else None

        def drain() -> None:
            counts.update(self._work(until_empty=True, deadline=deadline, errors=errors))

        drain_ahead(self._queue, self._config.names, drain, ahead=seconds, deadline=deadline)
        counts.pop(AttemptOutcome.RELEASED, None)  # claimed ahead and given back, not started
        return dict(counts)

    def stop(self) -> None:
        """Stop the worker.  Returns at once; may be called from any thread."""
        self._stopping.set()

    def interrupt(self) -> bool:
        """Give up handlers that still run after the grace period; call it before the process ends.

        Their attempts are recorded as ``interrupted`` and their results are dropped; their threads
        go on.  Python calls this at exit.

        Returns:
            Whether the last run interrupted any attempt.
        """
        return self._supervisor is not None and self._supervisor.interrupt()

    def health(self) -> WorkerHealth | None:
        """Return the state of this worker.  May be called from any thread.

        Returns:
            The state; None before the worker runs.
        """
        return None if self._supervisor is None else self._supervisor.health()

    def activity(self) -> str:
        """Return what each slot and each thread of the process is doing: the job with its task and
        time, and the innermost calls.  May be called from any thread.

        Returns:
            Lines of text, for people; empty before the worker runs.
        """
        return "" if self._supervisor is None else self._supervisor.activity()

    def _log_activity(self) -> None:
        if self._supervisor is not None:
            self._supervisor.log_activity()

    def _end_grace(self) -> None:
        self._signals = 2

    def _end_hosting(self) -> None:
        self._hosted = None
        self._stopping.clear()  # a worker that has failed was stopped too late

    def _refuse_connection(self) -> None:
        if self._queue.connection is not None:
            raise OptionError(
                "this PgQueue is bound to a Connection, on which a worker cannot wait for jobs; "
                "call run_until_empty()"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAcrossFork(
                f"this Worker was made in process {self._pid} and is run in {os.getpid()}; "
                "make it after the fork"
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise WorkerBroken(
                "a child process imports the main module again, and that starts a worker; put what "
                "is to run only once below `if __name__ == '__main__':`"
            )
        _configure_mappers()

    def _work(
        self,
        *,
        until_empty: bool,
        deadline: float | None,
        errors: HandlerErrors | None = None,
        loop: AbstractEventLoop | None = None,
        asked: Callable[[], object] = lambda: None,
    ) -> dict[str, int]:
        def is_over() -> bool:
            out_of_time = deadline is not None and time.monotonic() >= deadline
            is_asked = self._stopping.is_set() or self._signals > 0
            return is_asked or out_of_time or supervisor.has_done_enough()

        def grace() -> float:
            return 0.0 if self._signals > 1 else self._config.grace.total_seconds()

        stopping = Event()
        self._supervisor = supervisor = Supervisor(
            self._queue,
            self._config,
            stopping=stopping,
            until_empty=until_empty,
            errors=errors,
            loop=loop,
            asked=asked,
        )
        with self._counting_signals():
            counts = self._supervisor.work(is_over, grace)
        self._stopping.clear()
        if errors is not None:
            if (error := errors.take_first()) is not None:
                raise error
            with self._queue.autocommitting() as connection:
                failure = Listing(connection).first_failure(self._supervisor.worker_id)
            if failure is not None:
                raise AttemptFailed(failure)
        return dict(counts)

    @contextmanager
    def _counting_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(_number: int, _frame: Any) -> None:
            self._signals += 1  # and no more: the signal may interrupt code that holds a lock

        def report(_number: int, _frame: Any) -> None:
            # In a thread, for the same reason; one of `threading` would need a lock.
            start_new_thread(self._log_activity, ())

        before = {number: signal.signal(number, count) for number in stop_signals()}
        before |= {number: signal.signal(number, report) for number in report_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._signals = 0


def _configure_mappers() -> None:
    """Raise for a wrong relationship now, not in the first query of each handler."""
    try:
        configure_mappers()
    except Exception as error:  # the application's code
        remedy = "; relate to Job by its class: relationship(Job)" if "'Job'" in str(error) else ""
        raise PgQueueError(
            f"the mapped classes of the application cannot be configured: {error}{remedy}; the "
            "worker has started no job"
        ) from error


@contextmanager
def _past_left_alone() -> Iterator[None]:
    """Exclude all objects made before the first job from garbage collection.

    Jobs make many objects, so collections are frequent; traversing the modules an application has
    imported takes 40 to 60 ms, during which no thread runs.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
