"""The rescuer: reads cancels and pauses, and rescues the jobs of dead workers.

It has its own connection, because an application may lock the tables for a long time.  If a table
is locked, the rescuer tries again later, and the worker uses what was read before.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from threading import Event

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.connections.settings import UPKEEP
from pgqueue.execution import log_final_failure
from pgqueue.repository.rescue import Rescued, SeenWorker
from pgqueue.repository.tables import CRASHED, lock_key, notify, pg
from pgqueue.repository.workers import Notices, Workers
from pgqueue.worker.batch_ender import BatchEnder
from pgqueue.worker.heartbeat import WorkerIdentity
from pgqueue.worker.outage import Outage
from pgqueue.worker.reconnecting import ReconnectingConnection, is_lock_timeout
from pgqueue.worker.scheduler import Scheduler
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

HOUSEKEEPING = {**UPKEEP, "lock_timeout": "250"}
"""The timeout is in milliseconds.  It is short, because an application may lock tables for minutes,
and a statement that waits for the lock delays all statements that ask for it later."""

LOOK_EVERY = 0.5
"""Seconds between two looks while handlers run: a cancel reaches a handler within a second."""
LOOKS_WHEN_IDLE = 3
"""While no handler runs, the interval is this many times as long: a pause must be seen within two
seconds."""
FORGET_EVERY = 3600.0
"""Seconds between two deletions of the rows of workers that died long ago."""


class Rescuer(WorkerThread):
    """The rescuing thread.  Every worker has one; there is no leader."""

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        outage: Outage,
        *,
        running: Callable[[], list[int]],
        on_cancel: Callable[[set[int]], None],
        on_rescued: Callable[[Sequence[Rescued]], object] = lambda _: None,
        ticking: Scheduler | None = None,
        ending: BatchEnder | None = None,
    ) -> None:
        """At each look, ``ticking`` is told when the next tick is due, and ``ending`` whether a
        batch may have ended."""
        super().__init__(name="upkeep")
        self.informed = Event()
        """Set when the paused queues and tasks are known: a worker must not claim their jobs."""
        self._identity = identity
        self._running = running
        self._on_cancel = on_cancel
        self._ticking = ticking
        self._ending = ending
        self._stopping, self._awake = Event(), Event()
        self._dead: Sequence[SeenWorker] = ()
        self._reconnecting = ReconnectingConnection(
            engine,
            HOUSEKEEPING,
            outage,
            name="upkeep",
            stopping=self._stopping,
            isolation_level="READ COMMITTED",
        )
        self._rescue = Rescue(on_rescued=on_rescued)
        self._forgot_at = time.monotonic()

    def work(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._reconnecting.attempt(_unless_locked(self._look))
            self._wait_for_next_look(began)
        self._reconnecting.close()

    def stop(self, *, seconds: float) -> None:
        """End; after ``seconds``, cancel the last look."""
        self._stopping.set()
        self._awake.set()
        self.join(seconds)
        if self.is_alive():
            self._reconnecting.cancel()

    def reap(self, dead: Sequence[SeenWorker]) -> None:
        """Take the list of workers that the heartbeat has found dead; it replaces the last list."""
        self._dead = dead
        if dead:
            self._awake.set()

    def _wait_for_next_look(self, began: float) -> None:
        """Wait for the next look, which comes sooner if a handler starts."""
        for number in range(1, LOOKS_WHEN_IDLE + 1):
            left = began + number * LOOK_EVERY - time.monotonic()
            if self._awake.wait(max(left, 0.0)) or self._running():
                break
        self._awake.clear()

    def _look(self, connection: Connection) -> None:
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
        if self._ticking is not None:
            self._ticking.expect(notices.seconds_to_tick)
        if self._ending is not None and notices.has_batches:
            self._ending.expect()
        if notices.cancelled:
            self._on_cancel(notices.cancelled)
        self._rescue.rescue(connection, notices)
        if time.monotonic() - self._forgot_at > FORGET_EVERY:
            self._forgot_at = time.monotonic()
            forget_dead(connection)


def _unless_locked(step: Callable[[Connection], None]) -> Callable[[Connection], None]:
    """Skip a step if a table is locked: a later look repeats it."""

    def attempt(connection: Connection) -> None:
        try:
            step(connection)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            logger.info("upkeep: a table is locked; looking again")

    return attempt


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
            self._report(rescued)
        if notices.has_orphans is not None:
            self.searched_at = now
        return len(rescued)

    def _report(self, rescued: Sequence[Rescued]) -> None:
        for attempt in rescued:
            if attempt.outcome == "failed":
                log_final_failure(attempt.job_id, attempt.task, CRASHED)
        if rescued:
            self._on_rescued(rescued)

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
