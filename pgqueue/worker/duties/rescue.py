"""The rescuer: reads cancels and pauses, and rescues the jobs of dead workers.

It has its own connection, because an application may lock the tables for a long time.  If a table
is locked, the rescuer tries again later, and the worker uses what was read before.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from threading import Event

from sqlalchemy import Connection, Engine, select

from pgqueue import redaction
from pgqueue.database.settings import UPKEEP
from pgqueue.handler.outcome import log_final_failure
from pgqueue.repository.rescue import Rescued, SeenWorker
from pgqueue.repository.tables import CRASHED, lock_key, notify, pg
from pgqueue.repository.workers import Notices, Workers
from pgqueue.worker.duties.batches import BatchEnder
from pgqueue.worker.duties.depths import DepthCounter
from pgqueue.worker.duties.minutes import MinuteWriter
from pgqueue.worker.duties.ticks import Scheduler
from pgqueue.worker.heartbeat import WorkerIdentity
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import Outage

logger = redaction.logger(__name__)

HOUSEKEEPING = {**UPKEEP, "lock_timeout": "250"}
"""The timeout is in milliseconds.  It is short, because an application may lock tables for minutes,
and a statement that waits for the lock delays all statements that ask for it later."""

READ_EVERY = 0.5
"""Seconds between two reads while handlers run: a cancel reaches a handler within a second."""
SLOWER_WHEN_IDLE = 3
"""While no handler runs, the interval is this many times as long: a pause must be seen within two
seconds."""
FORGET_EVERY = 3600.0
"""Seconds between two deletions of the rows of workers that died long ago."""


class Rescuer(Loop):
    """The rescuing thread.  Every worker has one; there is no leader."""

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        outage: Outage,
        *,
        running: Callable[[], list[int]],
        on_cancel: Callable[[set[int], set[int]], None],
        on_rescued: Callable[[Sequence[Rescued]], object] = lambda _: None,
        ticking: Scheduler | None = None,
        ending: BatchEnder | None = None,
        minutes: MinuteWriter | None = None,
        counting: DepthCounter | None = None,
    ) -> None:
        """``on_cancel`` is told which running jobs were asked to cancel, and which of them to kill;
        at each read ``ticking`` when the next tick is due, and ``ending`` whether a batch may have
        ended.  ``minutes`` writes statistics on the rescuer's connection, and ``counting`` is woken
        if this worker is the one that counts."""
        super().__init__(engine, HOUSEKEEPING, outage, name="upkeep", repeat_after=READ_EVERY)
        self.informed = Event()
        """Set when the paused queues and tasks are known: a worker must not claim their jobs."""
        self._identity = identity
        self._running = running
        self._on_cancel = on_cancel
        self._ticking = ticking
        self._ending = ending
        self._minutes = minutes
        self._counting = counting
        self._dead: Sequence[SeenWorker] = ()
        self._rescue = Rescue(on_rescued=on_rescued)
        self._forgot_at = time.monotonic()

    def reap(self, dead: Sequence[SeenWorker]) -> None:
        """Take the list of workers that the heartbeat has found dead; it replaces the last list."""
        self._dead = dead
        if dead:
            self.wake()

    def wait_for_step(self) -> bool:
        """Wait until the next read, which comes sooner if a handler starts."""
        goes_on = super().wait_for_step()
        for _ in range(1, SLOWER_WHEN_IDLE):
            if not goes_on or self._dead or self._running() or not self.informed.is_set():
                break
            self.wake(READ_EVERY)
            goes_on = super().wait_for_step()
        return goes_on

    def step(self, connection: Connection) -> float:
        began = time.monotonic()
        # Forgotten even if a table is locked: the heartbeat then finds these workers dead again.
        dead, self._dead = self._dead, ()
        if dead:
            declare_dead(connection, dead)
        scheduled = None if self._ticking is None else self._ticking.task_names
        notices = self._rescue.read_notices(
            connection, running=self._running(), scheduled=scheduled
        )
        self._identity.paused = notices.paused
        self.informed.set()
        if self._ticking is not None and notices.seconds_to_tick is not None:
            self._ticking.wake(max(notices.seconds_to_tick, 0.0))
        if self._ending is not None and notices.has_batches:
            self._ending.wake()
        if notices.cancelled:
            self._on_cancel(notices.cancelled, notices.killed)
        self._rescue.rescue(connection, notices)
        if time.monotonic() - self._forgot_at > FORGET_EVERY:
            self._forgot_at = time.monotonic()
            forget_dead(connection)
        if self._minutes is not None:
            self._minutes.write_if_due(connection)
        if self._counting is not None:
            self._counting.wake_if_due(connection)
        return began + READ_EVERY - time.monotonic()

    def end(self) -> None:
        """Write the last statistics: all attempts are settled.  In an outage, do without."""
        if self._minutes is not None and self.reconnecting.is_open:
            self.reconnecting.run(self._minutes.write)


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
    ) -> Notices:
        """Read cancels, pauses and deaths; every ``SEARCH_EVERY``, search for orphaned leases."""
        is_due = time.monotonic() - self.searched_at >= SEARCH_EVERY.total_seconds()
        with connection.begin():
            return Workers(connection).notices(running=running, search=is_due, scheduled=scheduled)

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
