"""Rescue: every worker may, and none is the leader.

Death is judged by time a worker has *witnessed* itself: on one uninterrupted connection it has
seen the same heartbeat for the whole grace.  After a restart of the server every heartbeat is
old and every lock is gone, and still nobody is dead.
"""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository import Fleet, Member
from pgqueue.statements.tables import lock_key, notify, pg

logger = redaction.logger(__name__)

FAST_GRACE = timedelta(seconds=1.25)
"""For a worker whose advisory lock is gone too: its connection has ended.

A dead worker's jobs have to be claimable within 2 s.  It may have beaten just before it died;
its beat is seen at the next look, and the end of the grace at the one after: twice
:data:`LOOK_EVERY` more, and what the rescue takes."""

LOOK_EVERY = timedelta(seconds=0.25)
"""How often a worker looks at the others."""

SLOW_GRACE = timedelta(seconds=30)
"""For a worker whose lock is still there: frozen, cut off, or behind a pooler."""

SEARCH_EVERY = timedelta(seconds=2)
"""How often a worker looks for leases of the dead although nobody has died lately: for those that
a rescuer left who died as well.  The search reads all leases, and what is left of those that were
deleted since the last vacuum: beside a drain it takes as long as two claims."""

RESCUE_LOCK = lock_key("rescue")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat, and since when it has been seen unchanged."""

    heartbeat_at: datetime
    since: float


class Witness:
    """What one worker has seen of the others on one connection.  Pure: takes the time given."""

    def __init__(self) -> None:
        self._sightings: dict[UUID, Sighting] = {}
        self._searched_at = float("-inf")

    def dead_among(
        self, members: list[Member], *, asked_at: float, answered_at: float
    ) -> list[Member]:
        """Those who have not beaten for the whole grace while this witness looked on.

        From the end of the first look to the beginning of the last: one that a network held up
        may have been answered at any time between.
        """
        known, self._sightings = self._sightings, {}
        dead: list[Member] = []
        for member in members:
            sighting = known.get(member.id)
            if sighting is None or sighting.heartbeat_at != member.heartbeat_at:
                sighting = Sighting(member.heartbeat_at, since=answered_at)
            self._sightings[member.id] = sighting
            grace = SLOW_GRACE if member.is_locked else FAST_GRACE
            if asked_at - sighting.since >= grace.total_seconds():
                dead.append(member)
        return dead

    def is_search_due(self, *, now: float) -> bool:
        return now - self._searched_at >= SEARCH_EVERY.total_seconds()

    def searched(self, *, now: float) -> None:
        """What the dead have left was searched for, and given back unless another was at it."""
        self._searched_at = now


def rescue_dead(connection: Connection, witness: Witness) -> int:
    """Look at the fleet once, and rescue what the dead have left; returns how many leases.

    ``connection`` must be the one the witness has looked through from the start.  Who is dead
    is committed first, so that it cannot claim while its leases are given back.
    """
    now = time.monotonic()
    with connection.begin():
        fleet = Fleet(connection)
        members = fleet.members()
        answered_at = time.monotonic()
        for member in witness.dead_among(members, asked_at=now, answered_at=answered_at):
            if fleet.declare_dead(member):
                logger.warning("worker %s is dead: no heartbeat since %s", *member[:2])
        if not fleet.has_died_lately() and not witness.is_search_due(now=now):
            return 0
    rescued = 0
    with connection.begin():
        # Only to save work: two rescuers at once pass each other's leases by.
        if not connection.scalar(select(pg.pg_try_advisory_xact_lock(RESCUE_LOCK))):
            return 0
        while batch := fleet.rescue():
            rescued += len(batch)
        ended = fleet.end_transactions()
        if rescued or ended:
            # The jobs keep their time, so they stand behind the frontiers of all workers.
            connection.execute(select(notify("rewind")))
    witness.searched(now=now)
    if rescued:
        logger.warning("rescued %d attempts of dead workers", rescued)
    if ended:
        logger.warning("ended the transactions of dead workers that held jobs %s", ended)
    drop_left_stamps(connection)
    return rescued


def drop_left_stamps(connection: Connection) -> None:
    """Clear away the stamps that their jobs have gone on without."""
    with connection.begin():
        Fleet(connection).drop_left_stamps()


def forget_dead(connection: Connection) -> None:
    """Delete the rows of workers that died long ago."""
    with connection.begin():
        Fleet(connection).forget_dead()
