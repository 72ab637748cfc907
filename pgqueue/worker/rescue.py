"""The steps of a rescue: declare workers dead, and give back the jobs that they held.

Every worker does it; there is no leader.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository import Notices, SeenWorker, Workers
from pgqueue.statements.tables import lock_key, notify, pg

logger = redaction.logger(__name__)


SEARCH_EVERY = timedelta(seconds=2)
"""How often a worker looks for leases of the dead although nobody has died lately: for those that
a rescuer left who died as well.  The search reads all leases, and what is left of those that were
deleted since the last vacuum: beside a drain it takes as long as two claims."""


RESCUE_LOCK = lock_key("rescue")
RESCUE_LOCK_WAIT = 3.0
"""Seconds after which a rescue goes on without its lock.  Whoever holds it may be stuck, or may be
no worker at all: any role that can connect can take it."""


class Rescue:
    """Gives back what the dead have left, whoever declared them dead."""

    def __init__(self, *, lock_wait: float = RESCUE_LOCK_WAIT) -> None:
        self.searched_at = float("-inf")
        self._lock_wait = lock_wait
        self._refused_since: float | None = None

    def read_notices(self, connection: Connection, *, running: Sequence[int] = ()) -> Notices:
        """What others have decided, and now and then also what the dead have left."""
        is_due = time.monotonic() - self.searched_at >= SEARCH_EVERY.total_seconds()
        with connection.begin():
            return Workers(connection).notices(running=running, search=is_due)

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
    workers = Workers(connection)
    rescued = 0
    while batch := workers.rescue():
        rescued += len(batch)
    ended = workers.end_transactions()
    if rescued or ended:
        # The jobs keep their time, so they stand behind the cursors of all workers.
        connection.execute(select(notify("rewind")))
    if rescued:
        logger.warning("rescued %d attempts of dead workers", rescued)
    if ended:
        logger.warning("ended the transactions of dead workers that held jobs %s", ended)
    return rescued


def declare_dead(connection: Connection, members: Iterable[SeenWorker]) -> None:
    """Declare workers dead that have not beaten since they were seen.

    Committed before their leases are given back, so that they cannot claim meanwhile.
    """
    with connection.begin():
        for member in members:
            if Workers(connection).declare_dead(member):
                logger.warning("worker %s is dead: no heartbeat since %s", *member[:2])


def drop_left_stamps(connection: Connection) -> None:
    """Clear away the stamps that their jobs have gone on without."""
    with connection.begin():
        Workers(connection).drop_left_stamps()


def forget_dead(connection: Connection) -> None:
    """Delete the rows of workers that died long ago."""
    with connection.begin():
        Workers(connection).forget_dead()
