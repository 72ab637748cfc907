"""An application that enqueues all the while, and keeps the ledger."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from sqlalchemy.exc import DBAPIError

from chaos.environment import Environment
from pgqueue import Task

EVERY = 0.02


class Enqueuer:
    """A thread: one job at a time, of these tasks in turn, each in a transaction of its own.

    What COMMIT has acknowledged goes into the ledger; whatever failed may exist or not.
    """

    def __init__(
        self, environment: Environment, tasks: Sequence[Task[..., Any]], *, every: float = EVERY
    ):
        self._environment = environment
        self._tasks = [task.options(max_attempts=1000) for task in tasks]
        self._every = every
        self._stopping = threading.Event()
        self._acknowledged = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.refused = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def until_acknowledged(self) -> None:
        """Return in the moment in which a COMMIT has been acknowledged."""
        self._acknowledged.clear()
        self._environment.until(self._acknowledged.is_set, what="an enqueue is acknowledged")

    def _work(self) -> None:
        number = 0
        while not self._stopping.wait(self._every):
            number += 1
            try:
                self._environment.enqueue(self._tasks[number % len(self._tasks)], [()])
            except DBAPIError:
                self.refused += 1
                continue
            self._acknowledged.set()
