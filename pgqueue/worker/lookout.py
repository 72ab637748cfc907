"""The lookout: what the next claim looks at, and how long to sleep when it found nothing.

Polling is the truth and notifications are hints.  Both modes claim through it, from one thread
at a time.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository import Claim, Claimed, Locked, Pair
from pgqueue.statements.tables import lock_key, pg
from pgqueue.worker.crew import Crew
from pgqueue.worker.frontiers import LATEST_SWEEP

logger = redaction.logger(__name__)

Kind = TypeVar("Kind", Claimed, Locked)

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
        return self._crew.frontiers.is_sweep_due(elected=self._is_elected)

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

    def sleep(self, due_in: Callable[[list[Pair]], float | None]) -> None:
        """Sleep after a claim that found nothing, until something may be there.

        ``due_in`` asks how many seconds are left until the next message of these pairs is due.
        """
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
        # An enqueuer may have found nobody asleep and commit only now: look again after as long
        # as the sleep has lasted, so that it waits at most as long again.
        nap = min(max(time.monotonic() - self._armed_at, FIRST_NAP), self._longest_nap)
        if nap > 4 * FIRST_NAP:
            pairs = crew.frontiers.pairs(paused=crew.presence.paused)
            left = due_in(pairs)
            nap = nap if left is None else min(nap, max(left, 0.0))
        alone_for = crew.suspects.seconds_left()
        self._heed(crew.listener.wait(min(nap, alone_for) if alone_for else nap))

    def _heed(self, words: set[str]) -> None:
        self._false_alarms += bool(words)
        if "rewind" in words:
            self._crew.frontiers.rewind()

    def _disarm(self) -> None:
        if self._armed_at is not None:
            self._crew.listener.disarm()
            self._armed_at = None
