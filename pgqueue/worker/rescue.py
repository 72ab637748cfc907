"""The steps of a rescue: declare workers dead, and release the jobs that they held.

Every worker rescues; there is no leader.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.execution import tell_final_failure
from pgqueue.repository import Notices, Rescued, SeenWorker, Workers
from pgqueue.statements.tables import CRASHED, lock_key, notify, pg

logger = redaction.logger(__name__)


SEARCH_EVERY = timedelta(seconds=2)
"""How often a worker searches for leases of dead workers although none has died lately: a rescuer
that died as well may have left some.  The search reads all leases, and the dead rows of those
deleted since the last vacuum: while a queue is drained it takes as long as two claims."""


RESCUE_LOCK = lock_key("rescue")
RESCUE_LOCK_WAIT = 3.0
"""Seconds after which a rescue goes on without its lock.  The holder may be stuck, or may not be
a worker: any role that can connect can take the lock."""


class Rescue:
    """Releases the jobs of dead workers, whichever worker declared them dead."""

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
    ) -> Notices:
        """Read what others have decided; every ``SEARCH_EVERY``, search for orphaned leases."""
        is_due = time.monotonic() - self.searched_at >= SEARCH_EVERY.total_seconds()
        with connection.begin():
            return Workers(connection).notices(running=running, search=is_due, scheduled=scheduled)

    def rescue(self, connection: Connection, notices: Notices) -> int:
        """Rescue if the notices call for it; returns the number of leases."""
        now = time.monotonic()
        rescued: list[Rescued] = []
        # The first call always rescues: the statements are built before a rescue is urgent.
        is_first = self.searched_at == float("-inf")
        if not (notices.has_died_lately or notices.has_orphans or is_first):
            self._refused_since = None
        else:
            with connection.begin():
                if not self._may(connection, now=now):
                    return 0
                rescued = _rescue(connection)
            self._tell(rescued)
        if notices.has_orphans is not None:
            self.searched_at = now
        if rescued or notices.has_stamps:
            drop_left_stamps(connection)
        return len(rescued)

    def _tell(self, rescued: Sequence[Rescued]) -> None:
        for each in rescued:
            if each.outcome == "failed":
                tell_final_failure(each.job_id, each.task, CRASHED)
        if rescued:
            self._on_rescued(rescued)

    def _may(self, connection: Connection, *, now: float) -> bool:
        """Whether to rescue now.  The lock only saves work: two rescues at once skip each other's
        leases."""
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
    ended = workers.end_transactions()
    if rescued or ended:
        # The jobs keep their due time, so they stand behind the cursors of all workers.
        connection.execute(select(notify("rewind")))
    if rescued:
        logger.warning("rescued %d attempts of dead workers", len(rescued))
    if ended:
        logger.warning("ended the transactions of dead workers that held jobs %s", ended)
    return rescued


def declare_dead(connection: Connection, members: Iterable[SeenWorker]) -> None:
    """Declare workers dead whose heartbeat has not changed since they were seen.

    Committed before their leases are released, so that these workers cannot claim meanwhile.
    """
    with connection.begin():
        for member in members:
            if Workers(connection).declare_dead(member):
                logger.warning("worker %s is dead: no heartbeat since %s", *member[:2])


def drop_left_stamps(connection: Connection) -> None:
    """Delete stamps whose jobs have gone on without them."""
    with connection.begin():
        Workers(connection).drop_left_stamps()


def forget_dead(connection: Connection) -> None:
    """Delete the rows of workers that died long ago."""
    with connection.begin():
        Workers(connection).forget_dead()
