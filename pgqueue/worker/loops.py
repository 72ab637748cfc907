"""A loop: a thread of the worker that must not die unseen."""

import logging
from abc import ABC, abstractmethod
from threading import Thread

logger = logging.getLogger(__name__)


class Loop(Thread, ABC):
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
