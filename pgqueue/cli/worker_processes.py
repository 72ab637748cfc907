"""Several worker processes under one parent: ``--processes`` and ``--nodes``.

The parent holds no connection, and loads the application only to learn its nodes.  It starts the
workers, starts another one for each that ends by itself, whatever its exit code, and forwards
signals.  The command line is checked before: a restart would not correct it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import click

from pgqueue import redaction
from pgqueue.worker.worker import report_signals, stop_signals

logger = redaction.logger(__name__)

PARENT = "PGQUEUE_PARENT"
"""In the environment of a worker under a parent: the descriptor of a pipe that the parent alone
holds open, and that ends with the parent, however it ends."""

PLACE = "PGQUEUE_PLACE"
"""In the same environment: which of the processes this worker is, counted from 0."""

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LONG_RUN = 60.0
"""Seconds after which a worker counts as healthy: the pause before its successor is short again."""


def is_under_parent() -> bool:
    return PARENT in os.environ


def place_under_parent() -> int:
    """Return which of several processes this worker is; 0 for a worker alone."""
    return int(os.environ.get(PLACE, "0"))


def end_with_parent() -> None:
    """Stop this worker as SIGTERM does when its parent ends, also if the parent is killed."""
    pipe = int(os.environ.pop(PARENT))
    os.set_inheritable(pipe, False)  # a handler may start processes of its own

    def wait() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="pgqueue-parent", daemon=True).start()


class ProcessGroup:
    """The parent of the workers, which run this command.  A thread keeps one of them running."""

    def __init__(self, places: Sequence[Mapping[str, str]], *, until_empty: bool) -> None:
        """``places``: of each worker, what its environment has besides that of the parent."""
        if os.name != "posix":
            raise click.ClickException("several workers need a POSIX system")
        self._places = places
        self._until_empty = until_empty
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        """The signals to forward; None for each place whose last worker has ended."""
        self._is_stopping = threading.Event()
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()
        """Held while a worker starts, so that a signal reaches it or prevents its start."""
        self._pipe, self._never_written = os.pipe()

    def run(self) -> int:
        """Run until all workers have ended; returns the exit code."""

        def note(number: int, _frame: Any) -> None:
            self._signals.put(number)

        reports = report_signals()
        before = {number: signal.signal(number, note) for number in [*stop_signals(), *reports]}
        try:
            count = len(self._places)
            with ThreadPoolExecutor(count) as threads:
                places = [threads.submit(self._keep_running, n) for n in range(count)]
                for place in places:
                    place.add_done_callback(lambda _place: self._signals.put(None))
                for _ in places:
                    while (number := self._signals.get()) is not None:
                        if number not in reports:
                            self._is_stopping.set()
                        with self._starting:
                            for worker in self._workers.values():
                                worker.send_signal(number)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return max(place.result() for place in places)

    def _keep_running(self, place: int) -> int:
        """Start a worker, and another one whenever it ends; returns the exit code.

        Each pause is twice the one before, except after a long run.
        """
        pause = 0.0
        while True:
            with self._starting:
                if self._is_stopping.is_set():
                    return 0
                began = time.monotonic()
                worker = self._workers[place] = self._started(place)
            code = worker.wait()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            if self._is_stopping.is_set() or (code == 0 and self._until_empty):
                logger.info("worker %d has ended %s", worker.pid, how)
                return code if code >= 0 else 1
            if time.monotonic() - began > LONG_RUN:
                pause = 0.0
            pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
            message = "worker %d has ended %s; another one is started in %.0f s"
            logger.warning(message, worker.pid, how, pause)
            self._is_stopping.wait(pause)

    def _started(self, place: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, *sys.orig_argv[1:]],
                env=os.environ | self._places[place] | {PARENT: str(self._pipe), PLACE: str(place)},
                pass_fds=[self._pipe],
                # In a session of its own: Ctrl-C reaches only the parent, which forwards it once.
                start_new_session=True,
            )
        except OSError:  # the system starts no more processes: end all, with this error
            self._signals.put(signal.SIGTERM)
            raise
