"""Fires the ticks that are due: locks their schedules, enqueues the jobs, moves the schedules.

All in one transaction for each batch, and in every worker; there is no leader.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.repository import DueSchedule, Moved, ScheduleRows
from pgqueue.schedule_rules import Overlap, Standing, decide
from pgqueue.schedules import task_of_schedule
from pgqueue.tasks import Task

logger = redaction.logger(__name__)

BATCH = 100
"""Schedules in one transaction."""


class Ticks:
    """Call :meth:`fire` when a tick is due.

    A schedule that cannot be fired stays due and stops no other: the batch around it is repeated
    one by one, and it is stepped over.
    """

    def __init__(self, tasks: Mapping[str, Task[..., Any]], task_names: str) -> None:
        self._tasks = tasks
        self._task_names = task_names
        self._told: dict[str, str] = {}
        self._found: list[DueSchedule] = []

    def fire(self, connection: Connection) -> float | None:
        """Fire all that is due; returns the seconds to the next tick, None if there is none."""
        after: DueSchedule | None = None
        limit = BATCH
        while True:
            self._found = []
            try:
                with connection.begin():
                    self._fire_batch(ScheduleRows(connection), connection, after, limit)
            except DBAPIError as error:
                if connection.invalidated or not self._found:
                    raise  # no schedule is at fault
                if limit > 1:
                    limit = 1
                    continue
                self._tell(self._found[0], error)
            if len(self._found) < limit:
                break
            after = self._found[-1]
        with connection.begin():
            return ScheduleRows(connection).seconds_to_next(self._task_names)

    def _fire_batch(
        self, rows: ScheduleRows, connection: Connection, after: DueSchedule | None, limit: int
    ) -> None:
        self._found = rows.due(self._task_names, after=after, limit=limit)
        before = [
            each.state.last_job_id
            for each in self._found
            if each.state.overlap != Overlap.ALLOW and each.state.last_job_id is not None
        ]
        running = rows.unfinished(before) if before else set()
        moved = [self._fire_one(connection, each, running) for each in self._found]
        rows.move([each for each in moved if each is not None])

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
            self._tell(due, error)
            return None
        self._told.pop(state.name, None)
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
                own = task_of_schedule(task, due.state.name, due.options, tick=tick)
                job_ids.append(own.enqueue_stored(connection, due.args))
                logger.debug("schedule %s: job %d for %s", due.state.name, job_ids[-1], tick)
        return job_ids

    def _tell(self, due: DueSchedule, error: Exception) -> None:
        """Log why a schedule cannot be fired: once, until the reason changes."""
        said = f"{type(error).__name__}: {error}"
        if self._told.get(due.state.name) == said:
            return
        self._told[due.state.name] = said
        logger.error(
            "schedule %s: its tick of %s cannot be fired here, and stays due: %s",
            due.state.name,
            due.state.next_at,
            said,
        )
