"""The claimer: keeps the job buffer supplied."""

import time
from collections.abc import Callable
from threading import Event

from sqlalchemy import Connection, select

from pgqueue import redaction
from pgqueue.database.settings import CLAIMING
from pgqueue.outcomes import Released
from pgqueue.repository.claim import Claim, Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import notify
from pgqueue.repository.workers import Workers
from pgqueue.worker.claiming.prefetch import STALE, Prefetch
from pgqueue.worker.poller import Ask, Poller
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

RECONCILE_EVERY = 30.0
"""Seconds between two comparisons of the leases in the database with the jobs in this process."""
QUICK = 0.020
"""Seconds that the claimer waits for a running suspect to end before it claims another."""


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
        """Whether the last claim found as many messages as it asked for."""
        self._not_taken = 0
        """How many messages a claim ahead did not take; later claims take them for free slots."""
        self._last_pace = (0, 0.0)
        """The pace that was read last: jobs run, and the seconds for which slots were busy."""
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
        """Claim as many jobs as there is room for; without room, wait; without jobs, sleep."""
        self._prepare(connection)
        if self._poller.sleeps_on(self._upcoming_on(connection)):
            return
        buffer = self._runtime.buffer
        buffer.room.clear()
        if not self._not_taken and not buffer.let_go():
            self._wait_for_room()
            return
        sweep = self._poller.is_sweep_due(connection)
        free, ahead = buffer.waiting - len(buffer.heap), self._prefetch.ahead
        if free > 0 and (self._not_taken or not self._was_full or not ahead):
            room = min(free, self._not_taken or free)
            self._claim(connection, room=room, ahead=False, sweep=sweep)
        elif not self._not_taken and len(buffer.heap) <= ahead > 0:
            self._claim(connection, room=ahead, ahead=True, sweep=sweep)
        else:
            self._wait_for_room()

    def _claim(self, connection: Connection, *, room: int, ahead: bool, sweep: bool) -> None:
        runtime = self._runtime
        worker_id = runtime.identity.worker_id
        attempts = Attempts(connection, worker_id)
        self._poller.look_at_ages(attempts)
        limit = self._poller.limit(room)
        self._adapt_prefetch()
        # Read before the claim, which leaves out suspects while one runs: the running one may end.
        was_idle = not runtime.buffer.in_flight
        admitted = runtime.admitter.admitted
        suspects = runtime.crash_isolation.are_welcome()
        claim = self._claim_once(attempts, limit=limit, ahead=ahead, sweep=sweep, suspects=suspects)
        self._was_full = claim.taken + len(claim.passed) >= limit
        if runtime.identity.worker_id != worker_id:
            return  # declared dead meanwhile: a rescuer releases these leases too
        rows = self._startable(connection, claim) if suspects and not ahead else claim.rows
        self._fill_buffer(rows, claim, limit=limit)
        if self._was_full and runtime.buffer.waiting:
            self._prefetch.ran_dry()
        if claim.taken > len(claim.rows):
            logger.info("dropped %d messages of ended jobs", claim.taken - len(claim.rows))
        if claim.taken or claim.passed:
            return
        if not sweep and (self._until_empty or runtime.cursors.is_sweep_cheap):
            self._claim(connection, room=room, ahead=ahead, sweep=True)
        else:
            self._after_no_message(connection, was_idle=was_idle, admitted=admitted)

    def _claim_once(
        self, attempts: Attempts, *, limit: int, ahead: bool, sweep: bool, suspects: bool
    ) -> Claim:
        tasks, meta = self._runtime.open_tasks, self._runtime.reads_meta
        return self._poller.look(
            lambda pairs: attempts.claim(
                pairs, tasks=tasks, limit=limit, ahead=ahead, suspects=suspects, meta=meta
            ),
            limit=limit,
            sweep=sweep,
        )

    def _startable(self, connection: Connection, claim: Claim) -> list[Claimed]:
        """Return the claimed jobs that may start now, and release the other suspects first.

        The settler releases suspects whose jobs are locked: a claim must not wait for a lock.
        """
        suspects = [claimed for claimed in claim.rows if claimed.crashes]
        crashes = [(claimed.message_id, claimed.crashes) for claimed in suspects]
        extra = suspects[self._runtime.crash_isolation.admit(crashes, are_all=not self._was_full) :]
        if not extra:
            return claim.rows
        attempts = Attempts(connection, self._runtime.identity.worker_id)
        free = attempts.free_among(extra)  # to settle a locked job would wait for its lock
        attempts.settle([(claimed, Released()) for claimed in extra if claimed.job_id in free])
        for claimed in extra:
            if claimed.job_id not in free:
                self._runtime.buffer.give_back(claimed)
        connection.execute(select(notify("rewind")))
        released = {claimed.message_id for claimed in extra}
        return [claimed for claimed in claim.rows if claimed.message_id not in released]

    def _fill_buffer(self, rows: list[Claimed], claim: Claim, *, limit: int) -> None:
        """Put claimed jobs into the buffer, and hold them while others must be claimed first."""
        buffer = self._runtime.buffer
        if claim.passed:
            buffer.put_behind(rows, priority=min(claim.passed))
        elif rows:
            buffer.put(rows)
        if rows and not self._not_taken:  # otherwise they complete an earlier claim
            first = min([rows[0].priority, *claim.passed])
            self._prefetch.brought(first=first, last=rows[-1].priority)
            buffer.low_water = self._prefetch.ahead
        self._not_taken = self._still_to_claim(rows, claim, limit=limit)
        if not self._not_taken:
            buffer.let_go()

    def _still_to_claim(self, rows: list[Claimed], claim: Claim, *, limit: int) -> int:
        """How many jobs the next claims must still take for free slots.

        Counts the jobs that a claim ahead has left, less those claimed since.  It is 0 if a claim
        has returned none of these jobs: other workers have claimed them, or more urgent jobs have
        come.
        """
        if claim.passed:
            return len(claim.passed)
        if self._runtime.buffer.held and sum(claimed.crashes > 0 for claimed in rows) == 1:
            return int(self._does_suspect_end_soon())
        alone = sum(claimed.is_alone for claimed in claim.rows)
        if not alone or claim.taken < limit:
            return 0
        return max(self._not_taken - alone, 0)

    def _does_suspect_end_soon(self) -> bool:
        """Wait up to ``QUICK`` for the suspect that has just started; returns whether it ended."""
        room, deadline = self._runtime.buffer.room, time.monotonic() + QUICK
        while True:
            room.clear()
            left = deadline - time.monotonic()
            if left < 0 or not self._runtime.crash_isolation.seconds_left():
                return left > 0
            room.wait(left)

    def _after_no_message(self, connection: Connection, *, was_idle: bool, admitted: int) -> None:
        runtime = self._runtime
        if runtime.buffer.heap or runtime.buffer.held:
            self._wait_for_room()  # releases jobs that have waited too long
        elif not self._until_empty:
            self._poller.sleep(self._upcoming_on(connection))
        elif was_idle and runtime.leaves_nothing(admitted):
            # A job leaves in_flight after its enqueues are committed, so none of them is missed.
            self.finished.set()
        else:
            runtime.buffer.room.wait(0.05)

    def _upcoming_on(self, connection: Connection) -> Ask:
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

    def _adapt_prefetch(self) -> None:
        jobs, busy = self._pace()
        if jobs - self._last_pace[0] >= self._runtime.identity.slots:
            self._prefetch.ran(jobs - self._last_pace[0], busy=busy - self._last_pace[1])
            self._last_pace = (jobs, busy)

    def _prepare(self, connection: Connection) -> None:
        if self._generation != self._reconnecting.generation:
            self._generation = self._reconnecting.generation
            self._runtime.listener.share(connection)
            self._poller.connected()
            self._reconcile(connection)
        elif time.monotonic() - self._reconciled_at > RECONCILE_EVERY:
            self._reconcile(connection)

    def _reconcile(self, connection: Connection) -> None:
        """Release leases that this process does not know: the answer to their claim was lost."""
        runtime = self._runtime
        self._reconciled_at = time.monotonic()
        # Read before the query.  An attempt that is settled during the query may be in its answer,
        # but is no longer in flight afterwards.
        in_flight = list(runtime.buffer.in_flight.values())
        known = {(claimed.message_id, claimed.attempt) for claimed in in_flight}
        leases = Workers(connection).leases_of(runtime.identity.worker_id)
        for job_id, message_id, attempt in leases:
            if (message_id, attempt) not in known:
                logger.warning("job %s: giving back a lease whose claim was lost", job_id)
                lost = Claimed(0, "", message_id, job_id, "", "", "", 1, attempt, 0)
                runtime.buffer.give_back(lost)
