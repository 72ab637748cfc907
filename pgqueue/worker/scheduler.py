"""The scheduler: writes the schedules of the code at the start, fires ticks in time, ends batches.

It has a separate thread and connection, so that the application's code in an enqueue, ten
thousand ticks at midnight and the count of a million jobs hold up no rescue.  The rescuer tells it
when the next tick is due and when a batch may have ended, so a worker without either has this
thread asleep and no connection for it.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import Any

from sqlalchemy import Connection, Engine

from pgqueue.connections.settings import SCHEDULING
from pgqueue.errors import ScheduleNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.tasks import Task
from pgqueue.worker.batch_ends import end_batches
from pgqueue.worker.outage import Outage
from pgqueue.worker.reconnecting import REST_AFTER, ReconnectingConnection
from pgqueue.worker.threads import WorkerThread
from pgqueue.worker.ticks import Ticks

NEVER = float("inf")
AGAIN = 0.5
"""Seconds until a tick that stays due is looked at again: it waits for the job before it, for a
lock, or for a worker that can fire it."""
NEWS = 0.01
"""Seconds by which a next tick must be earlier than the expected one to wake the thread."""


class Scheduler(WorkerThread):
    """The scheduling thread.  Every worker has one; the lock of a schedule's row lets one fire."""

    def __init__(
        self,
        engine: Engine,
        queue: PgQueue,
        tasks: Mapping[str, Task[..., Any]],
        task_names: str,
        outage: Outage,
    ) -> None:
        super().__init__(name="scheduler")
        self.task_names = task_names
        self._schedules = queue.schedules
        self._around_ticks = queue.around_ticks()
        self._ticks = Ticks(tasks, task_names)
        self._stopping = Event()
        self._awake = Event()
        self._due_at = NEVER
        self._may_end_batches = False
        self._end_batches = partial(end_batches, notify=queue.notify, stopping=self._stopping)
        self._reconnecting = ReconnectingConnection(
            engine,
            SCHEDULING,
            outage,
            name="schedule",
            stopping=self._stopping,
            isolation_level="READ COMMITTED",
        )

    def work(self) -> None:
        while not self._stopping.is_set() and not self._reconnecting.attempt(self._synchronise):
            pass
        self._reconnecting.close()
        while self._wait_until_due():
            if self._due_at <= time.monotonic():
                self._due_at = time.monotonic() + AGAIN
                self._reconnecting.attempt(self._fire)
            if self._may_end_batches:
                self._may_end_batches = False
                self._reconnecting.attempt(self._end_batches)
        self._reconnecting.close()

    def expect(self, seconds: float | None, *, batches: bool) -> None:
        """Expect the next tick in this time, or none; called at each look of the rescuer.

        ``batches``: whether a batch may have ended.
        """
        due_at = NEVER if seconds is None else time.monotonic() + max(seconds, 0.0)
        if due_at < self._due_at - NEWS:
            self._due_at = due_at
            self._awake.set()
        if batches:
            self._may_end_batches = True
            self._awake.set()

    def stop(self, *, seconds: float) -> None:
        """End, and cancel a statement that takes longer: the ticks stay due."""
        self._stopping.set()
        self._awake.set()
        self.join(seconds)
        if self.is_alive():
            self._reconnecting.cancel()

    def _wait_until_due(self) -> bool:
        """Sleep until a tick is due or a batch may have ended; False when the worker stops."""
        while not self._stopping.is_set():
            left = self._due_at - time.monotonic()
            if left <= 0 or self._may_end_batches:
                return True
            is_open = self._reconnecting.is_open
            self._awake.wait(min(left, REST_AFTER) if is_open else min(left, threading.TIMEOUT_MAX))
            self._awake.clear()
            self._reconnecting.rest()
        return False

    def _synchronise(self, connection: Connection) -> bool:
        try:
            with connection.begin():
                self._schedules.synchronise(connection)
        except ScheduleNotFound:  # removed at the same moment: compare again
            return False
        return True

    def _fire(self, connection: Connection) -> None:
        with self._around_ticks():
            seconds = self._ticks.fire(connection)
        now = time.monotonic()
        self._due_at = NEVER if seconds is None else now + (seconds if seconds > 0 else AGAIN)
