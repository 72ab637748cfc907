"""Schedules: writes those of the code at the start, and fires their ticks in time.

Every worker fires ticks; there is no leader.  A lock on its row lets one worker fire a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.repository.schedules import DueSchedule, Moved, ScheduleRows
from pgqueue.rules.ticks import Firing, Overlap, Standing, decide
from pgqueue.schedules import Schedules
from pgqueue.tasks import PreparedJob, Task
from pgqueue.worker.application_calls import ApplicationCalls
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.loop import NEVER
from pgqueue.worker.rows import RowGuard, may_be_of_row

logger = redaction.logger(__name__)

AGAIN = 0.5
"""Seconds until a tick that stays due is tried again: it waits for the job before it, for its
own jobs, for a lock, or for a worker that can fire it."""


class WriteSchedules(Duty):
    """Writes the schedules of the code, until all are written."""

    def __init__(self, schedules: Schedules) -> None:
        super().__init__(repeat_after=AGAIN)
        self._schedules = schedules
        self._guard = RowGuard()

    def step(self, connection: Connection) -> float:
        """Write each schedule that differs, in a transaction of its own."""
        with connection.begin():
            differing = self._schedules.differing(connection)
        unwritten = {declared.name for declared in differing}
        for declared in differing:
            words = f"schedule {declared.name} of the code cannot be written"
            if not self._guard.rests(declared.name):
                with self._guard.row(declared.name, words):
                    with connection.begin():
                        self._schedules.write(connection, declared)
                    unwritten.remove(declared.name)
        with connection.begin():
            self._schedules.pause_undeclared(connection)
        return AGAIN if unwritten else NEVER


class FireTicks(Duty):
    """Fires the ticks that are due."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__(repeat_after=AGAIN)
        self._ticks = ticks

    def step(self, connection: Connection) -> float:
        seconds = self._ticks.fire(connection)
        if seconds is None:
            return NEVER
        return seconds if seconds > 0 else AGAIN


BATCH = 100
"""Schedules in one transaction."""


class Prepared(NamedTuple):
    """The jobs of a due schedule, after all of the application's code has run."""

    due: DueSchedule
    firing: Firing
    task: Task[..., Any]
    jobs: Sequence[PreparedJob | None]
    """One for each tick; None for a tick whose function of arguments wants none."""


class Ticks:
    """Call :meth:`fire` when a tick is due.

    Due schedules are read, and their jobs are prepared by the application's code.  Only then are
    the rows locked, and moved in the transaction that enqueues the jobs, if they are still what was
    read.  A schedule that cannot be fired, or whose code hangs, stays due and stops no other.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        task_names: str,
        schedules: Schedules,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._tasks = tasks
        self._task_names = task_names
        self._schedules = schedules
        self._guard = RowGuard()
        self._calls: ApplicationCalls[Prepared | None] = ApplicationCalls(around)
        self._preparing: dict[str, DueSchedule] = {}

    def fire(self, connection: Connection) -> float | None:
        """Fire all due schedules; returns the seconds to the next tick, None if there is none."""
        rows = ScheduleRows(connection)
        after: DueSchedule | None = None
        while True:
            with connection.begin():
                due = rows.due(self._task_names, after=after, limit=BATCH)
                last_jobs = [
                    each.state.last_job_id
                    for each in due
                    if each.state.overlap != Overlap.ALLOW and each.state.last_job_id is not None
                ]
                running = rows.unfinished(last_jobs) if last_jobs else set()
            new = {
                each.state.name: each
                for each in due
                if each.state.name not in self._preparing and not self._guard.rests(each.state.name)
            }
            self._preparing |= new
            self._calls.start(
                {
                    name: partial(
                        self._prepared, each, is_running=each.state.last_job_id in running
                    )
                    for name, each in new.items()
                }
            )
            self._fire_prepared(connection)
            if len(due) < BATCH:
                break
            after = due[-1]
        with connection.begin():
            return rows.seconds_to_next(self._task_names)

    def hanging(self) -> dict[str, float]:
        """Return the schedules whose code hangs, with the seconds that it has run so far."""
        return self._calls.hanging()

    def close(self) -> None:
        """Prepare no further jobs."""
        self._calls.close()

    def _prepared(self, due: DueSchedule, *, is_running: bool) -> Prepared | None:
        """Prepare the jobs of one schedule; None if its tick waits."""
        state = due.state
        assert state.next_at is not None, "it is due"
        standing = Standing(
            next_at=state.next_at,
            catch_up=state.catch_up,
            overlap=state.overlap,
            is_running=is_running,
        )
        firing = decide(state.rule, standing, state.read_at)
        if firing is None:
            return None
        task = self._tasks[state.task]
        prepare = partial(self._schedules.prepared, task, state, due.args, due.options)
        jobs = [prepare(tick=tick) for tick in firing.ticks]
        return Prepared(due, firing, task, jobs)

    def _fire_prepared(self, connection: Connection) -> None:
        """Fire the schedules whose jobs are prepared, in one transaction.

        If the database refuses the transaction, each schedule gets one of its own.
        """
        ready = []
        for name, result in self._calls.take_results().items():
            due = self._preparing.pop(name)
            if (error := result.exception()) is not None:
                self._guard.failed(name, _cannot_fire(due), error)
            elif (prepared := result.result()) is not None:
                ready.append(prepared)
        try:
            self._fire_all(connection, ready)
        except Exception as error:
            if not may_be_of_row(error):
                raise
            for each in ready:
                with self._guard.row(each.due.state.name, _cannot_fire(each.due)):
                    self._fire_all(connection, [each])
        else:
            for each in ready:
                self._guard.succeeded(each.due.state.name)

    def _fire_all(self, connection: Connection, ready: Sequence[Prepared]) -> None:
        """Lock these schedules, enqueue their jobs and move them to their next ticks.

        Leaves out those that were changed since they were read.
        """
        if not ready:
            return
        with connection.begin():
            rows = ScheduleRows(connection)
            locked = rows.lock(each.due.state.name for each in ready)
            moved = []
            for due, firing, task, jobs in ready:
                now = locked.get(due.state.name)
                if now is None or not due.is_same(now):
                    continue
                last_job_id = None
                for tick, job in zip(firing.ticks, jobs, strict=True):
                    if job is None:
                        continue
                    last_job_id = task.enqueue_prepared(connection, job)
                    logger.debug("schedule %s: job %d for %s", due.state.name, last_job_id, tick)
                moved.append(Moved(due.state.name, firing, last_job_id))
            rows.move(moved)


def _cannot_fire(due: DueSchedule) -> str:
    state = due.state
    return f"schedule {state.name}: its tick of {state.next_at} cannot be fired here, and stays due"
