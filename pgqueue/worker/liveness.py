"""When a worker counts as dead.

A worker judges others only by time that it has observed itself: on one uninterrupted connection
it has seen the same heartbeat for the whole grace period.  After a restart of the server every
heartbeat is old and every lock is gone.  But each connection is new then, with a new
:class:`Witness`, so no worker is declared dead.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from pgqueue.repository.rescue import SeenWorker

FAST_GRACE = timedelta(seconds=1.25)
"""For a worker whose advisory lock is gone too: its connection has ended.

A dead worker's jobs must be claimable within 2 s.  Its last heartbeat may come just before it dies,
and is seen at the next look (each heartbeat is one, every 0.5 s).  That leaves 2 - 0.5 - 1.25 s for
the rescue."""


SLOW_GRACE = timedelta(seconds=30)
"""For a worker whose lock is still held: frozen, cut off, or behind a pooler."""


LONGEST_GAP = 1.0
"""Seconds between two looks that count as observed; of a longer gap, only so many count.  A witness
that was frozen, or waited for a lock, has seen nothing meanwhile; others frozen with it need a
moment for their heartbeat."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat, and the time since which it has been seen unchanged."""

    heartbeat_at: datetime
    since: float


class Witness:
    """What one worker has seen of the others on one connection.  Pure: time is an argument."""

    def __init__(self) -> None:
        self._sightings: dict[UUID, Sighting] = {}
        self._looked_at = float("inf")  # before the first look nothing was missed
        self.next_death_at = float("inf")
        """When the first of the others will be dead unless its heartbeat changes."""

    def dead_among(
        self, others: list[SeenWorker], *, asked_at: float, answered_at: float
    ) -> list[SeenWorker]:
        """The workers whose heartbeat this witness has seen unchanged for the whole grace period.

        Counted from the answer to the first look to the request of the last: between the request
        of a look and its answer, it is unknown when the server has read the heartbeat.
        """
        known, self._sightings = self._sightings, {}
        unseen = max(answered_at - self._looked_at - LONGEST_GAP, 0.0)
        self._looked_at = answered_at
        self.next_death_at = float("inf")
        dead: list[SeenWorker] = []
        for other in others:
            since, sighting = answered_at, known.get(other.id)
            if sighting is not None and sighting.heartbeat_at == other.heartbeat_at:
                # Time that was not observed does not count: it moves the beginning.
                since = sighting.since + unseen
            self._sightings[other.id] = Sighting(other.heartbeat_at, since)
            grace = SLOW_GRACE if other.is_locked else FAST_GRACE
            dies_at = since + grace.total_seconds()
            if asked_at >= dies_at:
                dead.append(other)
            else:
                self.next_death_at = min(self.next_death_at, dies_at)
        return dead
