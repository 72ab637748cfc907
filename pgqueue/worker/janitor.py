"""The janitor: what may take seconds, and what no job waits for.

It has a thread and a connection of its own, so that the count of a million jobs and a slow delete
hold up no rescue.
"""

from threading import Event

from sqlalchemy import Connection

from pgqueue.database.settings import JANITOR
from pgqueue.worker.duties.batches import CancelOverdue, CountBatches
from pgqueue.worker.duties.depths import CountQueues
from pgqueue.worker.duties.prune import Prune
from pgqueue.worker.duty_list import DutyList
from pgqueue.worker.runtime import WorkerRuntime

MOMENT = 0.2
"""Seconds that a worker which ends waits for a statement before it cancels the statement."""


class Janitor(DutyList):
    """Prunes, and counts the jobs of the queues and of the batches in one worker at a time."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._prune = Prune(runtime.retention)
        self._count = CountQueues()
        stopping = Event()
        self._count_batches = CountBatches(stopping=stopping)
        self._cancel_overdue = CancelOverdue(stopping=stopping)
        super().__init__(
            runtime.engine,
            JANITOR,
            runtime.outage,
            [self._prune, self._count, self._count_batches, self._cancel_overdue],
            name="janitor",
            stopping=stopping,
            patience=MOMENT,
        )

    def count_if_elected(self, connection: Connection) -> None:
        """Begin a count if this worker is the one that counts.

        Upkeep asks on its connection, which is always open: a connection of each worker only to
        ask would be one too many.
        """
        if self._count.may_count(connection):
            self.wake_for(self._count)

    def count_batches(self) -> None:
        """Count the batches whose counts are due."""
        self.wake_for(self._count_batches)

    def keep_deadlines(self) -> None:
        """Cancel the jobs of workflows whose deadlines are over."""
        self.wake_for(self._cancel_overdue)

    def end(self) -> None:
        self._prune.end()
