"""Counts the jobs of the queues, for the statistics.

It has its own thread and connection, so that the count of a million jobs holds up no rescue.  One
worker at a time counts: the one whose rescuer holds a lock.  The rescuers ask for it on the
connections they have, because a connection of each worker, only to ask, would be one too many.
"""

import time

from sqlalchemy import Connection, Engine

from pgqueue.database.settings import COUNTING
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.worker.loop import NEVER, Loop
from pgqueue.worker.outage import Outage

EVERY = 10.0
"""Seconds between two counts."""
REST = 50
"""A count is followed by a rest of so many times as long."""
MOMENT = 0.2
"""Seconds that a worker which ends waits for a count before it cancels the statement."""


class DepthCounter(Loop):
    """The counting thread.  A step is a count; if it fails, the next one is tried in time."""

    def __init__(self, engine: Engine, outage: Outage) -> None:
        # The rescuer wakes it.
        super().__init__(
            engine,
            COUNTING,
            outage,
            name="depths",
            first_in=NEVER,
            repeat_after=NEVER,
            patience=MOMENT,
        )
        self._next_at = time.monotonic() + EVERY

    def wake_if_due(self, connection: Connection) -> None:
        """Begin a count if one is due and this worker holds the lock.

        ``connection``: of the rescuer, which has the lock until it ends.
        """
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + EVERY
        with connection.begin():
            is_elected = QueueMinutes(connection).try_lock()
        if is_elected:
            self.wake()

    def step(self, connection: Connection) -> float:
        began = time.monotonic()
        with connection.begin():
            QueueMinutes(connection).count()
        ended = time.monotonic()
        self._next_at = max(self._next_at, ended + REST * (ended - began))
        return NEVER
