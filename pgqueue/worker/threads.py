"""The base class of a worker's threads, which records their failures."""

import time
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Event, Thread

from pgqueue import redaction

logger = redaction.logger(__name__)


BEGINS_WITHIN = 10.0
"""Seconds, without those in which the process was stopped."""


class WorkerThread(Thread, ABC):
    """Runs :meth:`work` and keeps the error it failed with, so that the worker can stop."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=f"pgqueue-{name}", daemon=True)
        self.failure: BaseException | None = None
        self._has_begun = Event()

    @abstractmethod
    def work(self) -> None: ...

    def start(self) -> None:
        """Start the thread.  Raises RuntimeError if it cannot begin.

        ``Thread.start`` waits for ever if the new thread has no memory for its first steps, because
        a handler has taken all.  The worker would send heartbeats, and settle nothing.
        """
        start_new_thread(super().start, ())
        for _ in range(round(BEGINS_WITHIN * 10)):
            if self._has_begun.wait(0.1):
                return
        raise RuntimeError(f"{self.name} has not begun: the process may have no memory left")

    def run(self) -> None:
        self._has_begun.set()
        try:
            self.work()
        except BaseException as failure:
            # Only an error in pgqueue itself comes here: after database errors, threads retry.
            self.failure = failure
            logger.exception("%s ended with an unexpected error", self.name)


def wait_until(condition: Callable[[], bool], seconds: Callable[[], float]) -> None:
    """Wait for a condition, for a number of seconds that may decrease meanwhile."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < seconds():
        time.sleep(0.01)
