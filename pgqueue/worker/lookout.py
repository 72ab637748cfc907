"""The lookout: what the next claim looks at, and how long to sleep when it found nothing.

Polling is the truth and notifications are hints.  A worker that sleeps asks at each poll whether
anything is due, and claims only then: one read, where a claim and a sweep would be two writes.
Both modes claim through it, from one thread at a time.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository import Claim, Claimed, Locked, Pair, Upcoming
from pgqueue.statements.tables import lock_key, pg
from pgqueue.worker.crew import Crew
from pgqueue.worker.frontiers import LATEST_SWEEP

logger = redaction.logger(__name__)

Kind = TypeVar("Kind", Claimed, Locked)
Ask = Callable[[list[Pair]], Upcoming]

BRIEF = (0.001, 0.002)
"""Seconds to wait before a worker that was busy goes to sleep properly."""
FIRST_NAP = 0.005
NAP_SHARE = 0.98
"""Of the poll interval: what the last look has just missed is claimed, and starts, in the rest."""

FALSE_ALARMS = 10
"""So many wake-ups in a row may have been for nothing: other workers took what they were for."""
HUSH = 0.02
"""Seconds between two more of them.  Any role that can connect can notify, as often as it likes,
and must not have all workers claim as often."""


class Lookout:
    def __init__(self, crew: Crew, *, poll_interval: float) -> None:
        self._crew = crew
        self._longest_nap = NAP_SHARE * poll_interval
        self._election = lock_key("sweeper " + " ".join(sorted(crew.presence.queues)))
        self._is_elected = False
        self._election_at = float("-inf")
        self._idle = 0
        self._armed_at: float | None = None
        self._false_alarms = 0
        self._has_slept_through = False
        """Whether the last sleep lasted until the next poll: nothing says that there is a job."""
        self._has_heard_nothing = False
        """Whether the database has said nothing during the last sleep: is it still there?"""
        self.found_none = False
        """Whether the last claim came back empty."""

    def connected(self) -> None:
        """A new connection: nothing is known any more."""
        self._crew.frontiers.rewind()
        self._is_elected, self._election_at = False, float("-inf")

    def is_sweep_due(self, connection: Connection) -> bool:
        now = time.monotonic()
        if not self._is_elected and now - self._election_at >= LATEST_SWEEP:
            self._election_at = now
            # Held until the connection ends; it only spares the others the work.
            lock = select(pg.pg_try_advisory_lock(self._election))
            self._is_elected = bool(connection.scalar(lock))
        frontiers = self._crew.frontiers
        return frontiers.is_at_start or frontiers.is_sweep_due(elected=self._is_elected)

    def look(
        self,
        claim: Callable[[list[Pair]], Claim[Kind]],
        *,
        limit: int,
        sweep: bool,
    ) -> Claim[Kind]:
        """Claim once, behind the frontiers or, in a sweep, from the start."""
        frontiers = self._crew.frontiers
        if sweep:
            frontiers.rewind()
        pairs = frontiers.pairs(paused=self._crew.presence.paused)
        began = time.monotonic()
        found = claim(pairs)
        if sweep:
            frontiers.swept(began=began, ended=time.monotonic())
        if found.taken > limit:
            logger.critical("a claim of %d messages took %d", limit, found.taken)
        frontiers.advance(pairs, found, limit=limit)
        self.found_none = not found.taken
        if found.rows:
            self._idle = self._false_alarms = 0
        if found.taken >= limit:
            self._disarm()
        return found

    def hear(self) -> None:
        """Read the notifications that have come while the worker was busy."""
        self._heed(self._crew.listener.wait(0))

    def sleeps_on(self, ask: Ask) -> bool:
        """Sleep on after a sleep that nothing has ended; False when a claim is to be made.

        Looks from the start of each pair, for what was committed late.  Beside an old snapshot
        that may take too much of the time; then a claim looks behind the frontiers.
        """
        frontiers, slept_through = self._crew.frontiers, self._has_slept_through
        heard_nothing, self._has_heard_nothing = self._has_heard_nothing, False
        self._has_slept_through = False
        if heard_nothing and self._crew.listener.arm():
            return False
        may_sweep = frontiers.is_sweep_cheap or frontiers.is_sweep_due(elected=False)
        if not slept_through or not may_sweep:
            return False
        began = time.monotonic()
        upcoming = ask(frontiers.pairs(paused=self._crew.presence.paused, from_start=True))
        frontiers.swept(began=began, ended=time.monotonic())
        if upcoming.is_due:
            frontiers.rewind()
            return False
        self._nap(upcoming)
        return True

    def sleep(self, ask: Ask) -> None:
        """Sleep after a claim that found nothing, until something may be there."""
        crew = self._crew
        self._idle += 1
        if self._false_alarms > FALSE_ALARMS:
            crew.stopping.wait(HUSH)
        if self._armed_at is None and self._idle <= len(BRIEF):
            self._heed(crew.listener.wait(BRIEF[self._idle - 1]))
            return
        # Each time: the connection that held the lock may have been lost, and opened again.
        if crew.listener.arm() or self._armed_at is None:
            self._armed_at = time.monotonic()
            return  # claim once more: who committed before the lock was ours has not notified
        # What is due was not to be had: what comes next is looked for in its time all the same.
        self._nap(ask(crew.frontiers.pairs(paused=crew.presence.paused)))

    def _nap(self, upcoming: Upcoming) -> None:
        """Sleep until the next poll or, if that is sooner, until the next message is due or the
        next suspect may start."""
        now = time.monotonic()
        # An enqueuer may have found nobody asleep and commit only now: look again after as long
        # as the sleep has lasted, so that it waits at most as long again.
        lasted = now - (self._armed_at or now)
        poll = min(max(lasted, FIRST_NAP), self._longest_nap)
        nap = min(poll, self._crew.suspects.seconds_left() or poll)
        if upcoming.seconds is not None:
            nap = min(nap, upcoming.seconds)
        words = self._crew.listener.wait(nap)
        self._heed(words)
        self._has_heard_nothing = not words
        self._has_slept_through = not words and nap == poll and time.monotonic() - now >= nap

    def _heed(self, words: set[str]) -> None:
        self._false_alarms += bool(words)
        if "rewind" in words:
            self._crew.frontiers.rewind()

    def _disarm(self) -> None:
        if self._armed_at is not None:
            self._crew.listener.disarm()
            self._armed_at = None
