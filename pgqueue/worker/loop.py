"""A thread that repeats a step on a connection of its own."""

import time
from abc import abstractmethod
from collections.abc import Mapping
from threading import TIMEOUT_MAX, Condition, Event

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.worker.outage import Outage
from pgqueue.worker.reconnecting import (
    IDLE_AFTER,
    LONGEST_WAIT,
    ReconnectingConnection,
    is_lock_timeout,
)
from pgqueue.worker.rows import RowGuard
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

NEVER = float("inf")
PAUSE_AFTER_ERROR = 1.0
"""Seconds for which a loop that is not vital waits after an error of Python."""
WAKE_MARGIN = 0.01
"""A wake that makes the next step less than this many seconds earlier is ignored."""


class Loop(WorkerThread):
    """Runs :meth:`step`, sleeps as long as it says, and so on until it is stopped.

    A step that the database fails, or for which a table is locked, is repeated.  The connection is
    opened again when it breaks, and closed when it is not used for a while.

    An error that is not one of the database ends a vital loop, and with it the worker, which cannot
    work without it.  Any other loop logs the error and goes on: what it does is worth less than the
    jobs.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Mapping[str, str],
        outage: Outage,
        *,
        name: str,
        isolation_level: IsolationLevel = "READ COMMITTED",
        stopping: Event | None = None,
        first_in: float = 0.0,
        repeat_after: float = 0.0,
        patience: float = NEVER,
        longest_wait: float = LONGEST_WAIT,
        is_kept: bool = False,
        is_vital: bool = False,
    ) -> None:
        """
        Args:
            name: Of the thread and the connection.
            stopping: Ends the loop too.
            first_in: Seconds until the first step.
            repeat_after: Seconds until a step that has failed is repeated; the reconnecting
                connection adds its own, more with each failure.
            patience: Seconds for which a stop waits for the last step before it cancels the
                statement.
            longest_wait: Seconds between two tries after many errors, at most.
            is_kept: Whether to keep the connection after a refused statement.
            is_vital: Whether the worker ends with this loop.
        """
        super().__init__(name=name)
        self.stopping = stopping or Event()
        self.reconnecting = ReconnectingConnection(
            engine,
            settings,
            outage,
            name=name,
            stopping=self.stopping,
            isolation_level=isolation_level,
            longest_wait=longest_wait,
            is_kept=is_kept,
        )
        self._changed = Condition()
        self._repeat_after = repeat_after
        self._patience = patience
        self._is_vital = is_vital
        self._errors = RowGuard()
        self._due_at = time.monotonic() + first_in

    @abstractmethod
    def step(self, connection: Connection) -> float:
        """Do what is to be done; returns the seconds until the next step."""

    def seconds_after_failure(self) -> float:
        """The seconds until the next step after one that the database, or an error, has failed."""
        return self._repeat_after

    def end(self) -> None:
        """Called after the last step."""

    def wake(self, seconds: float = 0.0) -> None:
        """Run the next step in so many seconds, or sooner."""
        due_at = time.monotonic() + seconds
        with self._changed:
            if due_at < self._due_at - WAKE_MARGIN:
                self._due_at = due_at
                self._changed.notify_all()

    def stop(self, *, seconds: float) -> None:
        """End the loop within so many seconds; after ``patience``, cancel the running statement."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self.stopping.set()
            self._changed.notify_all()
        if self.is_alive():
            self.join(min(seconds, self._patience))
        if self.is_alive():
            self.reconnecting.cancel()
            self.join(max(deadline - time.monotonic(), 0.0))

    def work(self) -> None:
        while self.wait_for_step():
            self.wake(self._seconds_after_step())
        self.end()
        self.reconnecting.close()

    def wait_for_step(self) -> bool:
        """Wait until the next step is due; False when the loop is to end."""
        while True:
            with self._changed:
                left = self._due_at - time.monotonic()
                if self.stopping.is_set():
                    return False
                if left <= 0:
                    self._due_at = NEVER  # a wake during the step counts
                    return True
                self._changed.wait(
                    min(left, IDLE_AFTER if self.reconnecting.is_open else TIMEOUT_MAX)
                )
            self.reconnecting.close_if_idle()

    def _seconds_after_step(self) -> float:
        """Run a step; returns the seconds until the next one."""
        try:
            seconds = self.reconnecting.run(self._step_unless_locked)
        except BaseException as error:
            if self._is_vital:
                raise
            self.reconnecting.close()
            self._errors.failed(self.name, f"{self.name} has failed, and goes on", error)
            self.stopping.wait(PAUSE_AFTER_ERROR)
            return self.seconds_after_failure()
        if seconds is None:
            return self.seconds_after_failure()
        self._errors.succeeded(self.name)
        return seconds

    def _step_unless_locked(self, connection: Connection) -> float | None:
        try:
            return self.step(connection)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            logger.info("%s: waiting for a lock; trying again", self.reconnecting.name)
            return None
