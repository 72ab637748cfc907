"""Counts the jobs of open batches, so that their progress is one row to read."""

from threading import Event

from sqlalchemy import Connection

from pgqueue.repository.batches import Batches
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.loop import NEVER
from pgqueue.worker.rows import RowGuard

CANDIDATES = 100
"""Batches to count, in one read."""


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
