"""Rescue: every worker may, and none is the leader.

Death is judged by time a worker has *witnessed* itself: on one uninterrupted connection it has
seen the same heartbeat for the whole grace.  After a restart of the server every heartbeat is
old and every lock is gone, and still nobody is dead.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository import Fleet, Member, Notices
from pgqueue.statements.tables import lock_key, notify, pg

logger = redaction.logger(__name__)

FAST_GRACE = timedelta(seconds=1.25)
"""For a worker whose advisory lock is gone too: its connection has ended.

A dead worker's jobs have to be claimable within 2 s.  It may have beaten just before it died;
its beat is seen at the next look, half a second later at most.  The look after that comes when
the grace is over, so what is left of the 2 s is for the rescue."""

SLOW_GRACE = timedelta(seconds=30)
"""For a worker whose lock is still there: frozen, cut off, or behind a pooler."""

SEARCH_EVERY = timedelta(seconds=2)
"""How often a worker looks for leases of the dead although nobody has died lately: for those that
a rescuer left who died as well.  The search reads all leases, and what is left of those that were
deleted since the last vacuum: beside a drain it takes as long as two claims."""

LONGEST_STEP = 1.0
"""Seconds between two looks that count as seen.  A witness that has stood still, or waited for a
lock, has seen nothing meanwhile; others may have stood still with it, and need a moment to beat."""

RESCUE_LOCK = lock_key("rescue")
RESCUE_LOCK_WAIT = 3.0
"""Seconds after which a rescue goes on without its lock.  Whoever holds it may be stuck, or may be
no worker at all: any role that can connect can take it."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat, and since when it has been seen unchanged."""

    heartbeat_at: datetime
    since: float


class Witness:
    """What one worker has seen of the others on one connection.  Pure: takes the time given."""

    def __init__(self) -> None:
        self._sightings: dict[UUID, Sighting] = {}
        self._looked_at = float("inf")
        self.next_verdict_at = float("inf")
        """When the first of them will be dead unless it beats."""

    def dead_among(
        self, members: list[Member], *, asked_at: float, answered_at: float
    ) -> list[Member]:
        """Those who have not beaten for the whole grace while this witness looked on.

        From the end of the first look to the beginning of the last: one that a network held up
        may have been answered at any time between.
        """
        known, self._sightings = self._sightings, {}
        unseen = max(answered_at - self._looked_at - LONGEST_STEP, 0.0)
        self._looked_at = answered_at
        self.next_verdict_at = float("inf")
        dead: list[Member] = []
        for member in members:
            since, sighting = answered_at, known.get(member.id)
            if sighting is not None and sighting.heartbeat_at == member.heartbeat_at:
                since = sighting.since + unseen
            self._sightings[member.id] = Sighting(member.heartbeat_at, since)
            grace = SLOW_GRACE if member.is_locked else FAST_GRACE
            dies_at = since + grace.total_seconds()
            if asked_at >= dies_at:
                dead.append(member)
            else:
                self.next_verdict_at = min(self.next_verdict_at, dies_at)
        return dead


class Rescuer:
    """Gives back what the dead have left, whoever declared them dead."""

    def __init__(self, *, lock_wait: float = RESCUE_LOCK_WAIT) -> None:
        self.searched_at = float("-inf")
        self._lock_wait = lock_wait
        self._refused_since: float | None = None

    def read_notices(self, connection: Connection, *, running: Sequence[int] = ()) -> Notices:
        """What others have decided, and now and then also what the dead have left."""
        is_due = time.monotonic() - self.searched_at >= SEARCH_EVERY.total_seconds()
        with connection.begin():
            return Fleet(connection).notices(running=running, search=is_due)

    def rescue(self, connection: Connection, notices: Notices) -> int:
        """Rescue if the notices say that there is something; returns how many leases."""
        now = time.monotonic()
        rescued = 0
        # The first time in any case: statements are built and planned then, not when it is urgent.
        is_first = self.searched_at == float("-inf")
        if not (notices.has_died_lately or notices.has_orphans or is_first):
            self._refused_since = None
        else:
            with connection.begin():
                if not self._may(connection, now=now):
                    return 0
                rescued = _rescue(connection)
        if notices.has_orphans is not None:
            self.searched_at = now
        if rescued or notices.has_stamps:
            drop_left_stamps(connection)
        return rescued

    def _may(self, connection: Connection, *, now: float) -> bool:
        """Whether to rescue now: two at once pass each other's leases by, so the lock of the
        rescuers only saves work."""
        if connection.scalar(select(pg.pg_try_advisory_xact_lock(RESCUE_LOCK))):
            self._refused_since = None
            return True
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self._lock_wait


def _rescue(connection: Connection) -> int:
    fleet = Fleet(connection)
    rescued = 0
    while batch := fleet.rescue():
        rescued += len(batch)
    ended = fleet.end_transactions()
    if rescued or ended:
        # The jobs keep their time, so they stand behind the frontiers of all workers.
        connection.execute(select(notify("rewind")))
    if rescued:
        logger.warning("rescued %d attempts of dead workers", rescued)
    if ended:
        logger.warning("ended the transactions of dead workers that held jobs %s", ended)
    return rescued


def declare_dead(connection: Connection, members: Iterable[Member]) -> None:
    """Declare workers dead that have not beaten since they were seen.

    Committed before their leases are given back, so that they cannot claim meanwhile.
    """
    with connection.begin():
        for member in members:
            if Fleet(connection).declare_dead(member):
                logger.warning("worker %s is dead: no heartbeat since %s", *member[:2])


def drop_left_stamps(connection: Connection) -> None:
    """Clear away the stamps that their jobs have gone on without."""
    with connection.begin():
        Fleet(connection).drop_left_stamps()


def forget_dead(connection: Connection) -> None:
    """Delete the rows of workers that died long ago."""
    with connection.begin():
        Fleet(connection).forget_dead()
