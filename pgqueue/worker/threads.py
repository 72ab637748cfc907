"""A thread of the worker that must not die unseen."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Thread

from pgqueue import redaction

logger = redaction.logger(__name__)


class WorkerThread(Thread, ABC):
    """Runs :meth:`work` and keeps what it failed with, so that the worker can stop over it."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=f"pgqueue-{name}", daemon=True)
        self.failure: BaseException | None = None

    @abstractmethod
    def work(self) -> None: ...

    def run(self) -> None:
        try:
            self.work()
        except BaseException as failure:
            # Only a mistake of ours comes here: the database's errors are waited out.
            logger.exception("%s ended by a mistake", self.name)
            self.failure = failure


def wait_until(condition: Callable[[], bool], seconds: Callable[[], float]) -> None:
    """Look until it is so, for a time that may become shorter meanwhile."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < seconds():
        time.sleep(0.01)
