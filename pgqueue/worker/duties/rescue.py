"""Rescues the jobs of dead workers.  Every worker does; there is no leader."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.handler.outcome import log_final_failure
from pgqueue.repository.rescue import Rescued, SeenWorker
from pgqueue.repository.tables import CRASHED, lock_key, notify, pg
from pgqueue.repository.workers import Notices, Workers

logger = redaction.logger(__name__)

SEARCH_EVERY = timedelta(seconds=2)
"""How often a worker searches for leases of dead workers although none has died lately: a rescuer
that died in the middle of a rescue may have left some.  The search reads all leases, and the dead
rows that no vacuum has removed: while workers drain a queue, it takes as long as two claims."""

RESCUE_LOCK = lock_key("rescue")
RESCUE_LOCK_WAIT = 3.0
"""Seconds after which a rescue goes on without the lock.  The session that holds the lock may be
stuck, or may not be a worker: any role that can connect can take the lock."""


class Rescue:
    """Releases the jobs of all workers that were declared dead, by this worker or another."""

    def __init__(
        self,
        *,
        lock_wait: float = RESCUE_LOCK_WAIT,
        on_rescued: Callable[[Sequence[Rescued]], object] = lambda _: None,
    ) -> None:
        """``on_rescued`` is called with the attempts of each rescue, once it is committed."""
        self.searched_at = float("-inf")
        self._on_rescued = on_rescued
        self._lock_wait = lock_wait
        self._refused_since: float | None = None

    def read_notices(
        self,
        connection: Connection,
        *,
        running: Sequence[int] = (),
        scheduled: str | None = None,
        sweeps: bool = False,
        swept_to: int | None = None,
    ) -> Notices:
        """Read cancels, pauses and deaths; every ``SEARCH_EVERY``, search for orphaned leases."""
        is_due = time.monotonic() - self.searched_at >= SEARCH_EVERY.total_seconds()
        with connection.begin():
            return Workers(connection).notices(
                running=running,
                search=is_due,
                scheduled=scheduled,
                sweeps=sweeps,
                swept_to=swept_to,
            )

    def rescue(self, connection: Connection, notices: Notices) -> int:
        """Rescue if the notices call for it; returns the number of leases."""
        now = time.monotonic()
        rescued: list[Rescued] = []
        # The first call always rescues, so that the statements are built before they are urgent.
        is_first = self.searched_at == float("-inf")
        if not (notices.has_died_lately or notices.has_orphans or is_first):
            self._refused_since = None
        else:
            with connection.begin():
                if not self._may_rescue(connection, now=now):
                    return 0
                rescued = _rescue(connection)
            for attempt in rescued:
                if attempt.outcome == "failed":
                    log_final_failure(attempt, CRASHED)
            if rescued:
                self._on_rescued(rescued)
        if notices.has_orphans is not None:
            self.searched_at = now
        return len(rescued)

    def _may_rescue(self, connection: Connection, *, now: float) -> bool:
        """Whether to rescue now.

        The lock only avoids double work: of two rescues at the same time, each skips the leases
        that the other has locked.
        """
        if connection.scalar(select(pg.pg_try_advisory_xact_lock(RESCUE_LOCK))):
            self._refused_since = None
            return True
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self._lock_wait


def _rescue(connection: Connection) -> list[Rescued]:
    workers = Workers(connection)
    rescued: list[Rescued] = []
    while batch := workers.rescue():
        rescued += batch
    if rescued:
        # The jobs keep their due times, which the cursors of all workers have passed.
        connection.execute(select(notify("rewind")))
        logger.warning("rescued %d attempts of dead workers", len(rescued))
    return rescued


def declare_dead(connection: Connection, dead: Iterable[SeenWorker]) -> None:
    """Declare workers dead whose heartbeat has not changed since they were seen.

    Commits before their leases are released, so that these workers cannot claim meanwhile.
    """
    with connection.begin():
        for seen in dead:
            if Workers(connection).declare_dead(seen):
                logger.warning("worker %s is dead: no heartbeat since %s", *seen[:2])


def forget_dead(connection: Connection) -> None:
    """Delete the rows of workers that died long ago."""
    with connection.begin():
        Workers(connection).forget_dead()
