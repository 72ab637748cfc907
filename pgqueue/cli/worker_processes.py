"""Several worker processes under one parent: ``--processes``.

The parent loads no application and holds no connection.  It starts the workers, starts another one
for each that ends by itself, whatever its exit code, and forwards signals.  The command line is
checked before: a restart would not correct it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import click

from pgqueue import redaction
from pgqueue.worker.worker import stop_signals

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


class Place:
    """One of the processes: the worker that runs there, or the time at which one is started."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.worker: subprocess.Popen[bytes] | None = None
        self.starts_at: float | None = time.monotonic()
        """None while a worker runs here, and when no other is wanted."""
        self.pause = 0.0
        self._began = 0.0

    @property
    def is_over(self) -> bool:
        return self.worker is None and self.starts_at is None

    def start(self, pipe: int) -> subprocess.Popen[bytes]:
        self.starts_at, self._began = None, time.monotonic()
        self.worker = subprocess.Popen(  # noqa: S603
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, PARENT: str(pipe), PLACE: str(self._number)},
            pass_fds=[pipe],
            # In a session of its own: Ctrl-C reaches only the parent, which forwards it once.
            start_new_session=True,
        )
        return self.worker

    def start_again(self) -> None:
        """Plan the next start: each pause is twice the one before, except after a long run."""
        now = time.monotonic()
        if now - self._began > LONG_RUN:
            self.pause = 0.0
        self.pause = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
        self.starts_at = now + self.pause


class ProcessGroup:
    """The parent of the workers, which run this command."""

    def __init__(self, number: int, *, until_empty: bool) -> None:
        if os.name != "posix":
            raise click.ClickException("--processes needs a POSIX system")
        self._places = [Place(place) for place in range(number)]
        self._until_empty = until_empty
        self._is_stopping = False
        self._exit_code = 0
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pipe, self._never_written = os.pipe()

    def run(self) -> int:
        """Run until all workers have ended; returns the exit code."""
        with self._forwarding_signals():
            while not all(place.is_over for place in self._places):
                self._start_due()
                try:
                    self._events.get(timeout=self._next_start())()
                except Empty:
                    continue
        return self._exit_code

    def _start_due(self) -> None:
        for place in self._places:
            if place.starts_at is not None and place.starts_at <= time.monotonic():
                worker = place.start(self._pipe)
                wait = partial(self._wait, place, worker)
                threading.Thread(target=wait, name=f"pgqueue-{worker.pid}", daemon=True).start()

    def _next_start(self) -> float | None:
        starts = [place.starts_at for place in self._places if place.starts_at is not None]
        return max(0.0, min(starts) - time.monotonic()) if starts else None

    def _wait(self, place: Place, worker: subprocess.Popen[bytes]) -> None:
        code = worker.wait()
        self._events.put(partial(self._has_ended, place, worker.pid, code))

    def _has_ended(self, place: Place, pid: int, code: int) -> None:
        place.worker = None
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        is_done = code == 0 and self._until_empty
        if self._is_stopping or is_done:
            self._exit_code = max(self._exit_code, code if code >= 0 else 1)
            logger.info("worker %d has ended %s", pid, how)
            return
        place.start_again()
        message = "worker %d has ended %s; another one is started in %.0f s"
        logger.warning(message, pid, how, place.pause)

    def _stop(self, number: int) -> None:
        """Forward a signal, and start no more workers."""
        self._is_stopping = True
        for place in self._places:
            place.starts_at = None
            if place.worker is not None:
                place.worker.send_signal(number)

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        def forward(number: int, _frame: Any) -> None:
            self._events.put(partial(self._stop, number))

        before = {number: signal.signal(number, forward) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
