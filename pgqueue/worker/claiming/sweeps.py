"""Sweeps: claims from the start of every pair, which find rows that became visible behind the
cursors.

One of the workers of the same queues is elected to sweep often.  The others sweep rarely, in case
the elected one is stuck.
"""

from collections.abc import Iterable

from sqlalchemy import Connection, select

from pgqueue.repository.tables import lock_key, pg
from pgqueue.worker.pace import Pace

SOONEST_SWEEP = 1.0
"""Seconds after a sweep before the elected worker sweeps again; more if sweeps take long."""
LATEST_SWEEP = 5.0
"""Seconds after a sweep when every worker sweeps again."""


class Sweeps:
    """When the next sweep is due.  Times are arguments."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: of the queues and patterns of the worker."""
        self._lock = lock_key("sweeper " + " ".join(sorted(names)))
        self._swept_at, self._pace = float("-inf"), Pace()
        self._asked_at = float("-inf")
        self.is_elected = False

    def is_due(self, now: float, *, elected: bool) -> bool:
        often = min(max(SOONEST_SWEEP, self._pace.rest), LATEST_SWEEP)
        return now - self._swept_at >= (often if elected else LATEST_SWEEP)

    def is_cheap(self, now: float) -> bool:
        """Whether an idle worker may look behind the cursors at once."""
        return now - self._swept_at >= self._pace.rest

    def swept(self, *, began: float, ended: float) -> None:
        """Record a claim that began at the head of every pair."""
        self._swept_at = ended
        self._pace.took(ended - began)

    def try_election(self, connection: Connection, now: float) -> None:
        """Ask from time to time whether this worker is elected, as long as it is not.

        The lock is held until the connection ends; it only spares other workers the sweeps.
        """
        if not self.is_elected and now - self._asked_at >= LATEST_SWEEP:
            self._asked_at = now
            self.is_elected = bool(connection.scalar(select(pg.pg_try_advisory_lock(self._lock))))

    def forget_election(self) -> None:
        """The connection that held the lock has ended."""
        self.is_elected, self._asked_at = False, float("-inf")
