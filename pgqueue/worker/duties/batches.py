"""What is done for open batches: their jobs are counted, so that the progress is one row to read,
and cancelled if the deadline is over."""

import time
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


class CountBatches(Duty):
    """Counts when it is told that a batch is to be counted.  One worker counts a batch."""

    def __init__(self, *, stopping: Event) -> None:
        super().__init__(first_in=NEVER, repeat_after=NEVER)
        self._stopping = stopping
        self._guard = RowGuard()

    def step(self, connection: Connection) -> float:
        rows, after = Batches(connection), 0
        while not self._stopping.is_set():
            with connection.begin():
                found = rows.due_counts(after=after, limit=CANDIDATES)
            for batch_id in found:
                if self._stopping.is_set() or self._guard.rests(batch_id):
                    continue
                with self._guard.row(batch_id, f"batch {batch_id} cannot be counted"):
                    with connection.begin():
                        last = rows.begin_count(batch_id)
                    if last is not None:
                        with connection.begin():
                            rows.count(batch_id, last)
            if len(found) < CANDIDATES:
                break
            after = found[-1]
        return NEVER


class CancelOverdue(Duty):
    """Cancels the jobs of workflows past their deadlines, when it is told that there are any."""

    def __init__(self, *, stopping: Event) -> None:
        super().__init__(first_in=NEVER, repeat_after=NEVER)
        self._stopping = stopping
        self._guard = RowGuard()
        self._rests_until = 0.0
        """Until when nothing is looked for, while running handlers do not stop."""

    def step(self, connection: Connection) -> float:
        if time.monotonic() < self._rests_until:
            return NEVER
        rows, after = Batches(connection), 0
        while not self._stopping.is_set():
            with connection.begin():
                found = rows.past_deadline(after=after, limit=CANDIDATES)
            for job_id in found:
                if self._stopping.is_set() or self._guard.rests(job_id):
                    continue
                words = f"job {job_id}, past the deadline of its workflow, cannot be cancelled"
                with self._guard.row(job_id, words), connection.begin():
                    Jobs(connection).cancel(job_id)
            if not found and not after:
                self._rests_until = time.monotonic() + REST
            if found:
                logger.info("cancelled %d jobs past the deadline of their workflow", len(found))
            if len(found) < CANDIDATES:
                break
            after = found[-1]
        return NEVER
