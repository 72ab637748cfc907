"""The worker an application or the command line starts."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any

from sqlalchemy.orm import configure_mappers

from pgqueue import redaction
from pgqueue.errors import OptionError, PgQueueError, UsedAcrossFork, WorkerBroken
from pgqueue.job_queue import PgQueue
from pgqueue.models import DEFAULT_QUEUE
from pgqueue.worker.config import Mode, checked_config
from pgqueue.worker.supervisor import Supervisor

logger = redaction.logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Runs the jobs of some queues until it is stopped.

    ``queues`` (all queues that registered tasks name) are the names to serve; ``concurrency``
    handlers run at once, each in a thread.  ``mode`` is ``"lease"`` or ``"transaction"``; in
    the latter, ``batch`` jobs share a transaction.  ``poll_interval`` is the longest a due job
    waits when a wake-up is lost, and ``grace`` how long running handlers may take to end when
    the worker is stopped.
    """

    def __init__(
        self,
        queue: PgQueue,
        queues: Sequence[str] | None = None,
        *,
        concurrency: int = 10,
        mode: str = Mode.LEASE,
        batch: int = 1,
        poll_interval: timedelta = timedelta(seconds=1),
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        if not isinstance(queue, PgQueue):
            raise OptionError(
                f"Worker({type(queue).__name__}): give the PgQueue whose tasks it is to run"
            )
        named = {task.settings.queue for task in queue.tasks.values()}
        if queues is None:
            queues = sorted(named | {DEFAULT_QUEUE})
        self._queue = queue
        self._config = checked_config(queues, concurrency, mode, batch, poll_interval, grace)
        for name in sorted(set(self._config.queues) - named - {DEFAULT_QUEUE}):
            logger.warning(
                "queue %r: no task of this application names it; a slip of the pen?", name
            )
        self._pid = os.getpid()
        self._stopping = Event()
        self._signals = 0
        self._supervisor: Supervisor | None = None

    def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT; a second signal ends the grace.

        Returns at the end of the grace.  Handlers that still run then keep their leases until they
        end, :meth:`interrupt` is called, or the process ends.

        Signals are heeded when this runs in the main thread.  Waits for a database that cannot
        be reached; raises SchemaError when its tables are missing or of another version, and
        PgQueueError when a mapped class of the application is wrong.
        """
        with _past_left_alone():
            self._work(until_empty=False, timeout=None)

    def run_until_empty(self, timeout: float | None = None) -> dict[str, int]:
        """Work until nothing is due and nothing runs, or for ``timeout`` seconds.

        Returns how often attempts have ended how: succeeded, failed, cancelled, retried,
        snoozed, released, stale.  That is all it says: jobs may be left, of tasks this application
        has not, or because the time was over, which a database that is away can take up.
        """
        return self._work(until_empty=True, timeout=timeout)

    def stop(self) -> None:
        """Have the worker stop; returns at once, from any thread."""
        self._stopping.set()

    def interrupt(self) -> bool:
        """Give up the handlers that have outlived the grace; call it before the process ends.

        Their attempts are recorded as ``interrupted``, and nothing they do counts any more; their
        threads go on.  Python calls it at its exit.  Returns whether the last run has interrupted
        anything.
        """
        return self._supervisor is not None and self._supervisor.interrupt()

    def _work(self, *, until_empty: bool, timeout: float | None) -> dict[str, int]:
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
        deadline = None if timeout is None else time.monotonic() + timeout

        def is_over() -> bool:
            out_of_time = deadline is not None and time.monotonic() >= deadline
            return self._stopping.is_set() or self._signals > 0 or out_of_time

        def grace() -> float:
            return 0.0 if self._signals > 1 else self._config.grace.total_seconds()

        stopping = Event()
        self._supervisor = Supervisor(
            self._queue, self._config, stopping=stopping, until_empty=until_empty
        )
        with self._heeding_signals():
            counts = self._supervisor.work(is_over, grace)
        self._stopping.clear()
        return dict(counts)

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._signals = 0

    def _on_signal(self, number: int, _frame: Any) -> None:
        # A number and nothing else: whatever takes a lock may be interrupted holding it.
        self._signals += 1


def _configure_mappers() -> None:
    """Find a wrong relationship now, not in the first query of each job's handler."""
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
    """Keep Python's garbage collector from all that was there before the first job.

    Jobs make many objects, so it comes often; and what an application has imported takes it 40
    to 60 ms to go through, in which no thread does anything.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
