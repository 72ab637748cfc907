"""The poller: where the next claim looks, and how long to sleep after a claim found nothing.

Polls find every job; notifications are hints.  At each poll, a sleeping worker asks whether a job
is due, and claims only if one is: the question is one read, a claim and a sweep are two writes.
Used by one thread, the claimer.
"""

import time
from collections.abc import Callable

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.repository.claim import Claim, ClaimCursor, Upcoming
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import lock_key, pg
from pgqueue.worker.claiming.cursors import LATEST_SWEEP
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)

Ask = Callable[[list[ClaimCursor]], Upcoming]

BRIEF = (0.001, 0.002)
"""Seconds of the short waits after which a worker that was busy goes to sleep."""
FIRST_NAP = 0.005
NAP_SHARE = 0.98
"""Share of the poll interval to sleep: a job the last poll just missed starts in the rest."""

FALSE_ALARMS = 10
"""How many wake-ups in a row may find no job, because other workers have claimed it."""
HUSH = 0.02
"""Seconds between further such wake-ups.  Any role that can connect can notify without limit, and
must not make all workers claim as often."""


class Poller:
    def __init__(self, runtime: WorkerRuntime, *, poll_interval: float) -> None:
        self._runtime = runtime
        self._longest_nap = NAP_SHARE * poll_interval
        self._election_lock = lock_key("sweeper " + " ".join(sorted(runtime.identity.queues)))
        self._is_elected = False
        self._election_at = float("-inf")
        self._empty_claims = 0
        self._armed_at: float | None = None
        self._false_alarms = 0
        self._has_slept_through = False
        """Whether the last sleep lasted until the next poll, without a sign of a job."""
        self._has_heard_nothing = False
        """Whether no notification came during the last sleep: the connection may be lost."""
        self._tasks = runtime.task_names
        """The tasks whose messages the last claim took."""

    def connected(self) -> None:
        """Reset the cursors and the election on a new connection."""
        self._runtime.cursors.rewind()
        self._is_elected, self._election_at = False, float("-inf")

    def is_sweep_due(self, connection: Connection) -> bool:
        now = time.monotonic()
        if not self._is_elected and now - self._election_at >= LATEST_SWEEP:
            self._election_at = now
            # Held until the connection ends; the lock only spares other workers the sweeps.
            lock = select(pg.pg_try_advisory_lock(self._election_lock))
            self._is_elected = bool(connection.scalar(lock))
        cursors = self._runtime.cursors
        return cursors.is_at_start or cursors.is_sweep_due(elected=self._is_elected)

    def limit(self, room: int) -> int:
        """How many jobs the next claim takes, if there is room for so many."""
        return self._runtime.cursors.limit(room, paused=self._runtime.identity.closed)

    def look_at_ages(self, attempts: Attempts) -> None:
        """Read from time to time how old the first jobs are, if jobs age."""
        cursors = self._runtime.cursors
        if cursors.aging is not None and cursors.aging.is_look_due:
            pairs = cursors.pairs(paused=self._runtime.identity.closed)
            tasks, age_after = self._runtime.open_tasks, cursors.aging.age_after
            cursors.aging.learn(attempts.ages(pairs, tasks=tasks, age_after=age_after))

    def look(
        self,
        claim: Callable[[list[ClaimCursor]], Claim],
        *,
        limit: int,
        sweep: bool,
    ) -> Claim:
        """Claim once, from the cursors on or, in a sweep, from the start."""
        cursors = self._runtime.cursors
        tasks = self._runtime.open_tasks
        if sweep or tasks != self._tasks:  # messages of a resumed task are behind the cursors
            cursors.rewind()
        self._tasks = tasks
        pairs = cursors.pairs(paused=self._runtime.identity.closed)
        began = time.monotonic()
        claimed = claim(pairs)
        if sweep:
            cursors.swept(began=began, ended=time.monotonic())
        if self._runtime.events is not None:
            self._runtime.events.read_clock(claimed.read_at, began)
        if claimed.taken > limit:
            logger.critical("a claim of %d messages took %d", limit, claimed.taken)
        cursors.advance(pairs, claimed, limit=limit)
        self._runtime.looked_at = time.monotonic()
        if claimed.rows:
            self._empty_claims = self._false_alarms = 0
        if claimed.taken >= limit:
            self._disarm()
        return claimed

    def hear(self) -> None:
        """Read the notifications that have come while the worker was busy."""
        self._react_to(self._runtime.listener.wait(0))

    def sleeps_on(self, ask: Ask) -> bool:
        """Sleep again after a sleep that no event has ended; False if a claim must be made.

        Asks from the start of each pair, to find messages that were committed late.  While a
        transaction holds an old snapshot, this takes long; then a claim looks from the cursors on.
        """
        cursors, slept_through = self._runtime.cursors, self._has_slept_through
        heard_nothing, self._has_heard_nothing = self._has_heard_nothing, False
        self._has_slept_through = False
        if heard_nothing and self._runtime.listener.arm():
            return False
        may_sweep = cursors.is_sweep_cheap or cursors.is_sweep_due(elected=False)
        if not slept_through or not may_sweep:
            return False
        began = time.monotonic()
        upcoming = ask(cursors.pairs(paused=self._runtime.identity.closed, from_start=True))
        self._runtime.looked_at = ended = time.monotonic()
        cursors.swept(began=began, ended=ended)
        if upcoming.is_due:
            cursors.rewind()
            return False
        self._nap(upcoming)
        return True

    def sleep(self, ask: Ask) -> None:
        """Sleep after a claim that found nothing, until a job may be due."""
        runtime = self._runtime
        self._empty_claims += 1
        if self._false_alarms > FALSE_ALARMS:
            runtime.stopping.wait(HUSH)
        if self._armed_at is None and self._empty_claims <= len(BRIEF):
            self._react_to(runtime.listener.wait(BRIEF[self._empty_claims - 1]))
            return
        # At each sleep: the connection that held the sleepers' lock may have been replaced.
        if runtime.listener.arm() or self._armed_at is None:
            self._armed_at = time.monotonic()
            return  # claim once more: transactions committed before the lock did not notify
        # Jobs that are due could not be claimed: sleep only until the next one is due.
        self._nap(ask(runtime.cursors.pairs(paused=runtime.identity.closed)))

    def _nap(self, upcoming: Upcoming) -> None:
        """Sleep until the next poll, the next due message or the next suspect that may start."""
        now = time.monotonic()
        # An enqueuer that found no sleeper may commit only now.  A nap is as long as the worker has
        # slept so far, so the job waits no longer than its transaction took to commit.
        lasted = now - (self._armed_at or now)
        poll = min(max(lasted, FIRST_NAP), self._longest_nap)
        nap = min(poll, self._runtime.crash_isolation.seconds_left() or poll)
        if upcoming.seconds is not None:
            nap = min(nap, upcoming.seconds)
        payloads = self._runtime.listener.wait(nap)
        self._react_to(payloads)
        self._has_heard_nothing = not payloads
        self._has_slept_through = not payloads and nap == poll and time.monotonic() - now >= nap

    def _react_to(self, payloads: set[str]) -> None:
        self._false_alarms += bool(payloads)
        if payloads:
            self._runtime.admitter.wake()
        if "rewind" in payloads:
            self._runtime.cursors.rewind()

    def _disarm(self) -> None:
        if self._armed_at is not None:
            self._runtime.listener.disarm()
            self._armed_at = None
