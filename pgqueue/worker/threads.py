"""The base class of a worker's threads, which records their failures."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Thread

from pgqueue import redaction

logger = redaction.logger(__name__)


class WorkerThread(Thread, ABC):
    """Runs :meth:`work` and keeps the error it failed with, so that the worker can stop."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=f"pgqueue-{name}", daemon=True)
        self.failure: BaseException | None = None

    @abstractmethod
    def work(self) -> None: ...

    def run(self) -> None:
        try:
            self.work()
        except BaseException as failure:
            # Only an error in pgqueue itself comes here: after database errors, threads retry.
            logger.exception("%s ended with an unexpected error", self.name)
            self.failure = failure


def wait_until(condition: Callable[[], bool], seconds: Callable[[], float]) -> None:
    """Wait for a condition, for a number of seconds that may decrease meanwhile."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < seconds():
        time.sleep(0.01)
