"""The claimer: keeps the job buffer supplied, in lease mode."""

import time
from collections.abc import Callable
from threading import Event

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.connections.settings import CLAIMING
from pgqueue.outcomes import Released
from pgqueue.repository import Attempts, Claim, Claimed, Workers
from pgqueue.statements.tables import notify
from pgqueue.worker.lease_mode.prefetch import STALE, Prefetch
from pgqueue.worker.poller import Ask, Poller
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

RECONCILE_EVERY = 30.0
QUICK = 0.020
"""Seconds for which jobs claimed ahead wait for a suspect to end, so that the next can start."""


class Claimer(WorkerThread):
    """The claiming thread.  Ends when the worker stops or, if asked to, when no job is left."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        *,
        poll_interval: float,
        until_empty: bool,
        pace: Callable[[], tuple[int, float]],
    ) -> None:
        super().__init__(name="claimer")
        self._runtime = runtime
        self._pace = pace
        self._poller = Poller(runtime, poll_interval=poll_interval)
        self._prefetch = Prefetch(slots=runtime.identity.slots)
        self._until_empty = until_empty
        self._reconnecting = ReconnectingConnection(
            runtime.engine, CLAIMING, runtime.outage, name="claimer", stopping=runtime.stopping
        )
        self._generation = 0
        self._reconciled_at = 0.0
        self._was_full = False
        self._passed = 0
        """How many jobs a claim ahead has left: the next claims take them for free slots."""
        self._ran = (0, 0.0)
        self.finished = Event()

    def cancel(self) -> None:
        """Cancel a claim that waits for a lock on a table."""
        self._reconnecting.cancel()

    def work(self) -> None:
        while not self._runtime.stopping.is_set() and not self.finished.is_set():
            self._reconnecting.attempt(self._step)
        self.finished.set()
        self._reconnecting.close()

    def _step(self, connection: Connection) -> None:
        """Claim as many jobs as there is room for; else wait for room; else sleep."""
        self._prepare(connection)
        if self._poller.sleeps_on(self._ask(connection)):
            return
        buffer = self._runtime.buffer
        buffer.room.clear()
        if not self._passed and not buffer.let_go():
            self._wait_for_room()
            return
        sweep = self._poller.is_sweep_due(connection)
        free, ahead = buffer.waiting - len(buffer.heap), self._prefetch.ahead
        if free > 0 and (self._passed or not self._was_full or not ahead):
            limit = min(free, self._passed or free)
            self._claim(connection, limit=limit, ahead=False, sweep=sweep)
        elif not self._passed and len(buffer.heap) <= ahead > 0:
            self._claim(connection, limit=ahead, ahead=True, sweep=sweep)
        else:
            self._wait_for_room()

    def _claim(self, connection: Connection, *, limit: int, ahead: bool, sweep: bool) -> None:
        runtime = self._runtime
        worker_id = runtime.identity.worker_id
        attempts = Attempts(connection, worker_id)
        self._poller.look_at_ages(attempts)
        limit = self._poller.limit(limit)
        self._follow_speed()
        was_quiet = not runtime.buffer.in_flight  # read first: the last suspect may end now
        admitted = runtime.admitter.admitted
        suspects = runtime.crash_isolation.are_welcome()
        claim = self._look(attempts, limit=limit, ahead=ahead, sweep=sweep, suspects=suspects)
        self._was_full = claim.taken + len(claim.passed) >= limit
        if runtime.identity.worker_id != worker_id:
            return  # declared dead meanwhile: the rescuer finds these leases as well
        self._tell_crashes(attempts, claim.rows)
        rows = self._admitted(connection, claim) if suspects and not ahead else claim.rows
        self._lay_out(rows, claim, limit=limit)
        if self._was_full and runtime.buffer.waiting:
            self._prefetch.ran_dry()
        if claim.taken > len(claim.rows):
            logger.info("dropped %d messages of ended jobs", claim.taken - len(claim.rows))
        if claim.taken or claim.passed:
            return
        if not sweep and (self._until_empty or runtime.cursors.is_sweep_cheap):
            self._claim(connection, limit=limit, ahead=ahead, sweep=True)
        else:
            self._find_nothing(connection, was_quiet=was_quiet, admitted=admitted)

    def _look(
        self, attempts: Attempts, *, limit: int, ahead: bool, sweep: bool, suspects: bool
    ) -> Claim[Claimed]:
        tasks, meta = self._runtime.open_tasks, self._runtime.reads_meta
        return self._poller.look(
            lambda pairs: attempts.claim(
                pairs, tasks=tasks, limit=limit, ahead=ahead, suspects=suspects, meta=meta
            ),
            limit=limit,
            sweep=sweep,
        )

    def _tell_crashes(self, attempts: Attempts, rows: list[Claimed]) -> None:
        """Tell the crashes of transaction mode that this claim has recorded, if anybody asks."""
        events = self._runtime.events
        if events is not None:
            for claimed in rows:
                if claimed.crashes and attempts.has_crashed_before(claimed):
                    events.crashed(claimed)

    def _admitted(self, connection: Connection, claim: Claim[Claimed]) -> list[Claimed]:
        """The claimed jobs that may start now; the other suspects are released before one starts.

        The settler releases those whose jobs others have locked: claims must not wait for them.
        """
        suspects = [claimed for claimed in claim.rows if claimed.crashes]
        found = [(claimed.message_id, claimed.crashes) for claimed in suspects]
        extra = suspects[self._runtime.crash_isolation.admit(found, are_all=not self._was_full) :]
        if not extra:
            return claim.rows
        attempts = Attempts(connection, self._runtime.identity.worker_id)
        free = attempts.free_among(extra)  # settling a locked one would wait for its lock
        attempts.settle([(claimed, Released()) for claimed in extra if claimed.job_id in free])
        for claimed in extra:
            if claimed.job_id not in free:
                self._runtime.buffer.give_back(claimed)
        connection.execute(select(notify("rewind")))
        left = {claimed.message_id for claimed in extra}
        return [claimed for claimed in claim.rows if claimed.message_id not in left]

    def _lay_out(self, rows: list[Claimed], claim: Claim[Claimed], *, limit: int) -> None:
        """Offer claimed jobs to the slots, or hold them while others must be claimed first."""
        buffer = self._runtime.buffer
        if claim.passed:
            buffer.put_behind(rows, priority=min(claim.passed))
        elif rows:
            buffer.put(rows)
        if rows and not self._passed:  # else they belong to the claim before
            first = min([rows[0].priority, *claim.passed])
            self._prefetch.brought(first=first, last=rows[-1].priority)
            buffer.low_water = self._prefetch.ahead
        self._passed = self._left_to_claim(rows, claim, limit=limit)
        if not self._passed:
            buffer.let_go()

    def _left_to_claim(self, rows: list[Claimed], claim: Claim[Claimed], *, limit: int) -> int:
        """How many jobs the next claims take for free slots, as they must not be claimed ahead.

        The number left, less those claimed since; 0 if a claim has returned none of these jobs:
        other workers have claimed them, or more urgent jobs have come.
        """
        if claim.passed:
            return len(claim.passed)
        if self._runtime.buffer.held and sum(claimed.crashes > 0 for claimed in rows) == 1:
            return int(self._does_suspect_end_soon())
        alone = sum(claimed.is_alone for claimed in claim.rows)
        if not alone or claim.taken < limit:
            return 0
        return max(self._passed - alone, 0)

    def _does_suspect_end_soon(self) -> bool:
        """Wait for the suspect that has just started: if it ends soon, the next can start."""
        room, deadline = self._runtime.buffer.room, time.monotonic() + QUICK
        while True:
            room.clear()
            left = deadline - time.monotonic()
            if left < 0 or not self._runtime.crash_isolation.seconds_left():
                return left > 0
            room.wait(left)

    def _find_nothing(self, connection: Connection, *, was_quiet: bool, admitted: int) -> None:
        runtime = self._runtime
        if runtime.buffer.heap or runtime.buffer.held:
            self._wait_for_room()  # releases jobs that have waited too long
        elif not self._until_empty:
            self._poller.sleep(self._ask(connection))
        elif was_quiet and runtime.leaves_nothing(admitted):
            # Messages that a job enqueues are there before it leaves in_flight: none is missed.
            self.finished.set()
        else:
            runtime.buffer.room.wait(0.05)

    def _ask(self, connection: Connection) -> Ask:
        runtime = self._runtime
        attempts = Attempts(connection, runtime.identity.worker_id)
        return lambda pairs: attempts.upcoming(pairs, tasks=runtime.open_tasks)

    def _wait_for_room(self) -> None:
        buffer = self._runtime.buffer
        self._poller.hear()
        buffer.room.wait(max(STALE - buffer.longest_wait(), 0.001))
        waited = buffer.longest_wait()
        self._prefetch.oldest_waits(waited)
        buffer.low_water = self._prefetch.ahead
        if waited > STALE:
            for claimed in buffer.drain():
                buffer.done(claimed, Released())

    def _follow_speed(self) -> None:
        jobs, busy = self._pace()
        if jobs - self._ran[0] >= self._runtime.identity.slots:
            self._prefetch.ran(jobs - self._ran[0], busy=busy - self._ran[1])
            self._ran = (jobs, busy)

    def _prepare(self, connection: Connection) -> None:
        if self._generation != self._reconnecting.generation:
            self._generation = self._reconnecting.generation
            self._runtime.listener.share(connection)
            self._poller.connected()
            self._reconcile(connection)
        elif time.monotonic() - self._reconciled_at > RECONCILE_EVERY:
            self._reconcile(connection)

    def _reconcile(self, connection: Connection) -> None:
        """Release leases this process does not know: the answer to their claim was lost."""
        runtime = self._runtime
        self._reconciled_at = time.monotonic()
        # Read first: attempts settled during the query are in its answer, but not in flight.
        known = {(one.message_id, one.attempt) for one in list(runtime.buffer.in_flight.values())}
        held = Workers(connection).leases_of(runtime.identity.worker_id)
        for job_id, message_id, attempt in held:
            if (message_id, attempt) not in known:
                logger.warning("job %s: giving back a lease whose claim was lost", job_id)
                lost = Claimed(0, "", message_id, job_id, "", "", "", 1, attempt, 0)
                runtime.buffer.give_back(lost)
