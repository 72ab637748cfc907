"""Counts the jobs of the queues, for the statistics.  One worker at a time counts."""

import time

from sqlalchemy import Connection

from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.loop import NEVER

EVERY = 10.0
"""Seconds between two counts."""
REST = 50
"""A count is followed by a rest of so many times as long."""


class CountQueues(Duty):
    """Counts when it is told to.  If a count fails, the next one is tried in time."""

    def __init__(self) -> None:
        super().__init__(first_in=NEVER, repeat_after=NEVER)
        self._rests_until = float("-inf")

    def may_count(self, connection: Connection) -> bool:
        """Whether this worker is the one that counts, and has rested since its last count.

        ``connection``: has the lock of the worker that counts until it ends.
        """
        if time.monotonic() < self._rests_until:
            return False
        with connection.begin():
            return QueueMinutes(connection).try_lock()

    def step(self, connection: Connection) -> float:
        began = time.monotonic()
        if began < self._rests_until:
            return NEVER  # it was asked for while the last count ran
        with connection.begin():
            QueueMinutes(connection).count()
        ended = time.monotonic()
        self._rests_until = ended + REST * (ended - began)
        return NEVER
