"""What is done for open batches: their jobs are counted, so that the progress is one row to read,
and cancelled if the deadline is over."""

import time
from abc import ABC, abstractmethod
from threading import Event

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.repository.batches import Batches
from pgqueue.repository.jobs import Jobs
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.loop import NEVER
from pgqueue.worker.rows import RowGuard

logger = redaction.logger(__name__)

REST = 5.0
"""Seconds between two looks for jobs past a deadline, if the first has found none to cancel."""
CANDIDATES = 100
"""Batches to count, or jobs to cancel, in one read."""


class BatchDuty(Duty, ABC):
    """Goes through batches or jobs, in the order of their ids, when it is told that there are any.

    One that fails rests, and stops no other.
    """

    def __init__(self, *, stopping: Event) -> None:
        super().__init__(first_in=NEVER, repeat_after=NEVER)
        self._stopping = stopping
        self._guard = RowGuard()

    def step(self, connection: Connection) -> float:
        rows, after = Batches(connection), 0
        while not self._stopping.is_set():
            with connection.begin():
                found = self.next_ids(rows, after)
            for id in found:
                if not self._stopping.is_set() and not self._guard.rests(id):
                    with self._guard.row(id, self.failure(id)):
                        self.do(connection, id)
            if len(found) < CANDIDATES:
                break
            after = found[-1]
        return NEVER

    @abstractmethod
    def next_ids(self, rows: Batches, after: int) -> list[int]:
        """The next ids after one, at most ``CANDIDATES``."""

    @abstractmethod
    def do(self, connection: Connection, id: int) -> None:
        """Do what is due for one of them."""

    @abstractmethod
    def failure(self, id: int) -> str:
        """What cannot be done, for the log."""


class CountBatches(BatchDuty):
    """Counts the jobs of open batches.  One worker counts a batch."""

    def next_ids(self, rows: Batches, after: int) -> list[int]:
        return rows.due_counts(after=after, limit=CANDIDATES)

    def do(self, connection: Connection, id: int) -> None:
        rows = Batches(connection)
        with connection.begin():
            last = rows.begin_count(id)
        if last is not None:
            with connection.begin():
                rows.count(id, last)

    def failure(self, id: int) -> str:
        return f"batch {id} cannot be counted"


class CancelOverdue(BatchDuty):
    """Cancels the jobs of workflows past their deadlines."""

    _rests_until = 0.0
    """Until when nothing is looked for, while running handlers do not stop."""

    def next_ids(self, rows: Batches, after: int) -> list[int]:
        if time.monotonic() < self._rests_until:
            return []
        found = rows.past_deadline(after=after, limit=CANDIDATES)
        if not found and not after:
            self._rests_until = time.monotonic() + REST
        return found

    def do(self, connection: Connection, id: int) -> None:
        with connection.begin():
            if Jobs(connection).cancel(id):
                logger.info("job %d is cancelled: the deadline of its workflow is over", id)

    def failure(self, id: int) -> str:
        return f"job {id}, past the deadline of its workflow, cannot be cancelled"
