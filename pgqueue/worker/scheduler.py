"""The scheduler: writes the schedules of the code at the start, fires ticks in time, ends batches.

It has its own thread and connection, so that the application's code in an enqueue, ten thousand
ticks at midnight or the count of a million jobs hold up no rescue.  The rescuer tells it when the
next tick is due and when a batch may have ended.  Without ticks and batches, the thread sleeps and
has no connection.  Every worker fires ticks and ends batches; there is no leader.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from threading import Event
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.connections.settings import SCHEDULING
from pgqueue.errors import ScheduleNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.repository import Batches, DueSchedule, Moved, ScheduleRows
from pgqueue.schedule_rules import Overlap, Standing, decide
from pgqueue.schedules import task_of_schedule
from pgqueue.tasks import Task
from pgqueue.worker.outage import Outage
from pgqueue.worker.reconnecting import REST_AFTER, ReconnectingConnection
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

NEVER = float("inf")
AGAIN = 0.5
"""Seconds until a tick that stays due is looked at again: it waits for the job before it, for a
lock, or for a worker that can fire it."""
NEWS = 0.01
"""Seconds by which a next tick must be earlier than the expected one to wake the thread."""


class Scheduler(WorkerThread):
    """The scheduling thread.  Every worker has one; a lock on its row lets one fire a schedule."""

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
        """Expect the next tick in ``seconds``, or none; the rescuer calls this at each look.

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


BATCH = 100
"""Schedules in one transaction."""


class Ticks:
    """Call :meth:`fire` when a tick is due.

    A schedule that cannot be fired stays due and stops no other: its transaction is repeated with
    one schedule at a time until this schedule is found, which is skipped.
    """

    def __init__(self, tasks: Mapping[str, Task[..., Any]], task_names: str) -> None:
        self._tasks = tasks
        self._task_names = task_names
        self._logged: dict[str, str] = {}
        self._due: list[DueSchedule] = []

    def fire(self, connection: Connection) -> float | None:
        """Fire all due schedules; returns the seconds to the next tick, None if there is none."""
        after: DueSchedule | None = None
        limit = BATCH
        while True:
            self._due = []
            try:
                with connection.begin():
                    self._fire_next(ScheduleRows(connection), connection, after, limit)
            except DBAPIError as error:
                if connection.invalidated or not self._due:
                    raise  # no schedule is at fault
                if limit > 1:
                    limit = 1
                    continue
                self._log_failure(self._due[0], error)
            if len(self._due) < limit:
                break
            after = self._due[-1]
            limit = min(2 * limit, BATCH)
        with connection.begin():
            return ScheduleRows(connection).seconds_to_next(self._task_names)

    def _fire_next(
        self, rows: ScheduleRows, connection: Connection, after: DueSchedule | None, limit: int
    ) -> None:
        self._due = rows.due(self._task_names, after=after, limit=limit)
        last_jobs = [
            due.state.last_job_id
            for due in self._due
            if due.state.overlap != Overlap.ALLOW and due.state.last_job_id is not None
        ]
        running = rows.unfinished(last_jobs) if last_jobs else set()
        fired = [self._fire_one(connection, due, running) for due in self._due]
        rows.move([moved for moved in fired if moved is not None])

    def _fire_one(
        self, connection: Connection, due: DueSchedule, running: set[int]
    ) -> Moved | None:
        """Enqueue the jobs of one schedule; None if it stays as it is."""
        state = due.state
        assert state.next_at is not None, "it is due"
        standing = Standing(
            next_at=state.next_at,
            catch_up=state.catch_up,
            overlap=state.overlap,
            is_running=state.last_job_id in running,
        )
        try:
            firing = decide(state.rule, standing, state.read_at)
            job_ids = [] if firing is None else self._enqueue(connection, due, firing.ticks)
        except DBAPIError:
            raise  # the transaction has failed
        except Exception as error:  # also the application's code: on_enqueue, unique_key
            self._log_failure(due, error)
            return None
        self._logged.pop(state.name, None)
        if firing is None:
            return None
        return Moved(state.name, firing, job_ids[-1] if job_ids else None)

    def _enqueue(
        self, connection: Connection, due: DueSchedule, ticks: Sequence[datetime]
    ) -> list[int]:
        job_ids = []
        # If the application's code fails the second of several jobs, the first must not stay.
        with connection.begin_nested() if len(ticks) > 1 else nullcontext():
            for tick in ticks:
                task = self._tasks[due.state.task]
                task_of_tick = task_of_schedule(task, due.state.name, due.options, tick=tick)
                job_ids.append(task_of_tick.enqueue_stored(connection, due.args))
                logger.debug("schedule %s: job %d for %s", due.state.name, job_ids[-1], tick)
        return job_ids

    def _log_failure(self, due: DueSchedule, error: Exception) -> None:
        """Log why a schedule cannot be fired: once, until the reason changes."""
        message = f"{type(error).__name__}: {error}"
        if self._logged.get(due.state.name) == message:
            return
        self._logged[due.state.name] = message
        logger.error(
            "schedule %s: its tick of %s cannot be fired here, and stays due: %s",
            due.state.name,
            due.state.next_at,
            message,
        )


def end_batches(connection: Connection, *, notify: bool, stopping: Event) -> int:
    """Look at every batch that may have ended; returns how many have."""
    ended = after = 0
    while not stopping.is_set():
        with connection.begin():
            batch = Batches(connection).end_next(after=after, notify=notify)
        if batch is None:
            break
        after = batch.id
        if batch.has_ended:
            ended += 1
            logger.info("batch %d has ended", batch.id)
    return ended


def end_batches_inline(connection: Connection) -> int:
    """Like :func:`end_batches`, in the transaction of a test."""
    ended = after = 0
    while (batch := Batches(connection).end_next(after=after, notify=False)) is not None:
        after = batch.id
        ended += batch.has_ended
    return ended
