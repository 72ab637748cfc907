"""Timers: fire the ticks of schedules when they are due.

It has a thread and a connection of its own, so that ten thousand ticks at midnight hold up no
rescue.  Upkeep reads when something is due.  Until then the thread sleeps, and has no connection.
"""

from pgqueue.database.settings import TIMERS
from pgqueue.job_queue import PgQueue
from pgqueue.repository.workers import Notices
from pgqueue.worker.duties.ticks import FireTicks, Ticks, WriteSchedules
from pgqueue.worker.duty_list import DutyList
from pgqueue.worker.runtime import WorkerRuntime


class Timers(DutyList):
    """Writes the schedules of the code, and fires ticks."""

    def __init__(self, runtime: WorkerRuntime, queue: PgQueue) -> None:
        self.task_names = runtime.task_names
        """The tasks whose schedules this worker can fire."""
        around = queue.around_calls()
        self._ticks = Ticks(runtime.tasks, runtime.task_names, queue.schedules, around)
        self._fire_ticks = FireTicks(self._ticks)
        super().__init__(
            runtime.engine,
            TIMERS,
            runtime.outage,
            [WriteSchedules(queue.schedules), self._fire_ticks],
            name="timers",
        )

    def noticed(self, notices: Notices) -> None:
        """Learn from upkeep when the next tick is due."""
        if notices.seconds_to_tick is not None:
            self.wake_for(self._fire_ticks, max(notices.seconds_to_tick, 0.0))

    def hanging(self) -> list[str]:
        """Return what hangs, in words: schedules whose jobs the application's code prepares."""
        found = self._ticks.hanging()
        return [f"schedule {name}, for {seconds:.0f} s" for name, seconds in sorted(found.items())]

    def stop(self, *, seconds: float) -> None:
        """End, and wait for none of the application's code: the ticks stay due."""
        self.stopping.set()
        self._ticks.close()
        super().stop(seconds=seconds)
