"""The claimer: finds due jobs, claims them, and keeps the job buffer supplied.

Polls find every job; notifications are hints.  At each poll, a sleeping worker asks whether a job
is due, and claims only if one is: the question is one read, a claim and a sweep are two writes.
"""

import time
from collections.abc import Sequence
from functools import partial
from threading import Event

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.opening import READ_COMMITTED
from pgqueue.database.settings import CLAIMING, SCHEDULING
from pgqueue.options import OptionsOfWorker
from pgqueue.outcomes import Released
from pgqueue.repository.claim import Claim, ClaimCursor, Claimed, Upcoming
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import lock_key, pg
from pgqueue.repository.workers import Workers
from pgqueue.rules.served_queues import is_pattern, served_queues
from pgqueue.worker.claiming.aging import Aging
from pgqueue.worker.claiming.crash_isolation import CrashIsolation
from pgqueue.worker.claiming.cursors import LATEST_SWEEP, ClaimCursors
from pgqueue.worker.claiming.notifications import Listener
from pgqueue.worker.claiming.prefetch import STALE, Prefetch
from pgqueue.worker.claiming.shares import Shares
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.duties.batches import BatchEnds
from pgqueue.worker.loop import Loop
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.rows import RowGuard, is_refusal_of_row
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.slot import Slot

logger = redaction.logger(__name__)

RECONCILE_EVERY = 30.0
"""Seconds between two comparisons of the leases in the database with the jobs in this process."""
BRIEF = (0.001, 0.002)
"""Seconds of the short waits after which a worker that was busy goes to sleep."""
FIRST_SLEEP = 0.005
SLEEP_SHARE = 0.98
"""Share of the poll interval to sleep.  The rest of the interval is for the claim and the start of
a job that became due right after the last poll."""
FALSE_ALARMS = 10
"""How many wake-ups in a row may find no job before the worker pauses after each further one.  A
few are normal: other workers have claimed the job."""
PAUSE = 0.02
"""Seconds of this pause.  Any role that can connect can notify without limit, and must not make all
workers claim as often."""
NEW_QUEUES_EVERY = 2.0
"""Seconds after which a busy worker that serves a pattern looks for queues with jobs; an idle one
looks at each poll and notification."""
NEW_QUEUES_SHARE = 50
"""These looks may take a fiftieth of the time: each steps over dead index entries."""
REFUSED_TRIES = 10
"""How many jobs whose claim was refused before are tried again in one claim."""
UNTIL_SETTLED = 0.05
"""Seconds between two looks for the last job of a worker that ends when no job is left."""


class Claimer(Loop):
    """The claiming thread.  Ends when the worker stops or, if asked to, when no job is left.

    It waits within its steps: for a slot, or for a notification on its connection.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        config: OptionsOfWorker,
        slots: Sequence[Slot],
        admitter: Admitter,
        *,
        listens: bool,
        until_empty: bool,
    ) -> None:
        super().__init__(
            runtime.engine,
            CLAIMING,
            runtime.outage,
            name="claimer",
            isolation_level="AUTOCOMMIT",
            stopping=runtime.stopping,
            patience=0.5,
            is_vital=True,
        )
        self.finished = Event()
        self.looked_at = time.monotonic()
        """When this worker last looked for jobs."""
        self._runtime = runtime
        self._admitter = admitter
        self._until_empty = until_empty
        self._slots = slots
        self._has_patterns = any(map(is_pattern, config.names))
        self._next_queues_at = float("-inf")
        """When an idle worker looks again for queues that fit a pattern."""
        self._has_skipped_look = False
        """Whether a look for queues was wanted since the last one, and came too soon after it."""
        self._cursors = ClaimCursors(
            runtime.identity.queue_names,
            shares=None if config.weights is None else Shares(config.weights),
            aging=None if config.age_after is None else Aging(config.age_after),
        )
        self._tasks = runtime.task_names
        """The tasks whose messages the last claim was to take."""
        self._isolation = CrashIsolation(runtime.ledger.in_flight, self._cursors)
        self._prefetch = Prefetch(slots=config.concurrency, most=config.ahead)
        self._generation = 0
        """The number of the connection that the last step used."""
        self._reconciled_at = float("-inf")
        self._election_lock = lock_key("sweeper " + " ".join(sorted(config.names)))
        self._is_elected, self._election_at = False, float("-inf")
        """Whether this worker sweeps for all workers of its queues, and when it last asked."""
        self._batches = BatchEnds(notify=listens)
        self._listener = Listener(enabled=listens)
        self._longest_sleep = SLEEP_SHARE * config.poll_interval.total_seconds()
        self._empty_claims = 0
        self._false_alarms = 0
        self._armed_at: float | None = None
        """Since when enqueuers notify this worker; None while it is busy."""
        self._refused = RowGuard()
        """Of the jobs whose claim was refused."""
        self._slept_through = False
        """Whether the last sleep lasted until the next poll, without a sign of a job."""

    def notify(self, behind: bool = False) -> None:
        """Wake the claimer, from another thread: jobs may be due; ``behind``: behind its cursors
        too."""
        if behind:
            self._cursors.rewind()
        self._listener.poke()
        self._runtime.buffer.room.set()

    def wait_for_step(self) -> bool:
        """Whether there is another step; the waiting is done within the steps."""
        return not self.stopping.is_set() and not self.finished.is_set()

    def end(self) -> None:
        self.finished.set()

    def stop(self, *, seconds: float) -> None:
        self.stopping.set()
        self.notify()
        super().stop(seconds=seconds)

    def close(self) -> None:
        """Free what :meth:`notify` uses, when no thread calls it any more."""
        self._listener.close()

    def step(self, connection: Connection) -> float:
        """Poll, claim, and pass the jobs to the slots; wait if no slot is free or no job is due."""
        runtime, buffer, prefetch = self._runtime, self._runtime.buffer, self._prefetch
        worker_id = runtime.identity.worker_id
        attempts = Attempts(connection, worker_id)
        if self._generation != self.reconnecting.generation:
            self._begin_on_new(connection)
        if time.monotonic() - self._reconciled_at > RECONCILE_EVERY:
            self._reconcile(connection)
        self._find_queues(attempts)
        if self._slept_through and (upcoming := self._poll(attempts)) is not None:
            self._sleep_until_due(upcoming)
            return 0.0
        buffer.room.clear()
        room, is_ahead = prefetch.room(free=buffer.free_slots, buffered=len(buffer.heap))
        if not room:
            self._wait_for_room()
            return 0.0

        self._learn_ages(attempts)
        # Both are read before the claim: it skips suspects while one runs, which may end meanwhile,
        # and does not see jobs that are admitted after it.
        was_idle, admitted = not runtime.ledger.in_flight, self._admitter.admitted
        is_sweep = self._is_sweep_due(connection)
        claim = self._claim(attempts, room, ahead=is_ahead, sweep=is_sweep)
        if not claim.found and not is_sweep and (self._until_empty or self._cursors.is_sweep_cheap):
            claim = self._claim(attempts, room, ahead=is_ahead, sweep=True)
        if runtime.identity.worker_id != worker_id:
            return 0.0  # this worker was declared dead: a rescuer releases these leases too

        prefetch.ran(sum(slot.ran for slot in self._slots), sum(slot.busy for slot in self._slots))
        if prefetch.was_full and buffer.free_slots > 0:
            prefetch.ran_dry()
        buffer.low_water = prefetch.low_water
        if claim.rows:
            prefetch.brought(first=claim.rows[0].priority, last=claim.rows[-1].priority)
            self._isolation.start(claim.rows)
            runtime.ledger.claimed(claim.rows)
            buffer.put(claim.rows)
        elif not claim.found:
            self._after_no_message(attempts, was_idle=was_idle, admitted=admitted)
        return 0.0

    def _find_queues(self, attempts: Attempts) -> bool:
        """Look from time to time which queues fit the patterns; returns whether others do now."""
        if not self._has_patterns:
            return False
        identity, is_busy = self._runtime.identity, self._armed_at is None
        pause, began = NEW_QUEUES_EVERY if is_busy else 0.0, time.monotonic()
        self._has_skipped_look = began < self._next_queues_at + pause
        if self._has_skipped_look:
            return False
        names = served_queues(identity.queues, attempts.queues_with_messages)
        self._next_queues_at = began + NEW_QUEUES_SHARE * (time.monotonic() - began)
        if names == identity.queue_names:
            return False
        identity.queue_names = names
        self._cursors.serve(names)
        self._admitter.wake()
        return True

    def _claim(self, attempts: Attempts, room: int, *, ahead: bool, sweep: bool) -> Claim:
        """Claim up to ``room`` jobs, from the cursors on or, in a sweep, from the start."""
        runtime, cursors = self._runtime, self._cursors
        tasks, suspects = runtime.open_tasks, self._isolation.are_welcome()
        if sweep or tasks != self._tasks:  # messages of a resumed task are behind the cursors
            cursors.rewind()
        self._tasks = tasks
        began = time.monotonic()
        limit = cursors.limit(room, paused=runtime.identity.closed_queues)
        claim, pairs, limit = self._claim_around_refused(
            attempts, limit, tasks=tasks, ahead=ahead, suspects=suspects
        )
        self.looked_at = time.monotonic()
        if sweep:
            cursors.swept(began=began, ended=self.looked_at)
        cursors.advance(pairs, claim, limit=limit)
        self._prefetch.claimed(taken=claim.taken, left=claim.left, limit=limit, is_ahead=ahead)
        runtime.clock.read(claim.read_at, began)
        if claim.rows and runtime.statistics is not None:
            runtime.statistics.claimed(claim.rows)
        if claim.rows:
            self._empty_claims = self._false_alarms = 0
        if self._prefetch.was_full:  # the claim found as many messages as it asked for
            self._listener.disarm()
            self._armed_at = None
        if claim.taken > limit:
            logger.critical("a claim of %d messages took %d", limit, claim.taken)
        if claim.taken > len(claim.rows):
            logger.info("dropped %d messages of ended jobs", claim.taken - len(claim.rows))
        return claim

    def _claim_around_refused(
        self, attempts: Attempts, most: int, *, tasks: str, ahead: bool, suspects: bool
    ) -> tuple[Claim, list[ClaimCursor], int]:
        """Claim up to ``most`` jobs; returns the claim, and its pairs and limit.

        If the database refuses a job, by a trigger or a constraint of the application, halves the
        limit until the job is the first or the claim succeeds.  Then passes over the job: it rests,
        and later claims pass over it untried.  Few jobs are tried again in one call, so that a
        thousand refused jobs hold up the jobs behind them once.
        """
        cursors, guard = self._cursors, self._refused
        limit, tries_left = most, REFUSED_TRIES
        while True:
            began = time.monotonic()
            pairs = cursors.pairs(paused=self._runtime.identity.closed_queues)
            try:
                claim = attempts.claim(
                    pairs, tasks=tasks, limit=limit, ahead=ahead, suspects=suspects
                )
                if guard.have_failed:
                    for row in claim.rows:
                        guard.succeeded(row.job_id)
                return claim, pairs, limit
            except DBAPIError as error:
                if not is_refusal_of_row(error) or self.stopping.is_set():
                    raise
                due = attempts.first_due(pairs, tasks=tasks, suspects=suspects)
                if not due:
                    raise
                if self._pass_over_resting(due, all_failed=not tries_left):
                    continue
                if limit > 1:
                    limit //= 2
                    continue
                message, job_id = due[0]
                cursors.pass_over(message)
                tries_left -= guard.has_failed(job_id)
                guard.failed(job_id, f"job {job_id}: its claim is refused and tried again", error)
            # A trigger may refuse every job: the claims take half of the time.
            self.stopping.wait(time.monotonic() - began)

    def _pass_over_resting(
        self, due: Sequence[tuple[ClaimCursor, int]], *, all_failed: bool
    ) -> bool:
        """Pass over the messages at the front whose jobs were refused lately.

        With ``all_failed``, over those that were ever refused.  Returns whether there were any.
        """
        is_left_out = self._refused.has_failed if all_failed else self._refused.rests
        for count, (message, job_id) in enumerate(due):
            if not is_left_out(job_id):
                return count > 0
            self._cursors.pass_over(message)
        return True

    def _learn_ages(self, attempts: Attempts) -> None:
        """Read from time to time how old the first jobs are, if jobs age."""
        aging = self._cursors.aging
        if aging is not None and aging.is_look_due:
            pairs = self._cursors.pairs(paused=self._runtime.identity.closed_queues)
            tasks = self._runtime.open_tasks
            aging.learn(attempts.ages(pairs, tasks=tasks, age_after=aging.age_after))

    def _is_sweep_due(self, connection: Connection) -> bool:
        now = time.monotonic()
        if not self._is_elected and now - self._election_at >= LATEST_SWEEP:
            self._election_at = now
            # Held until the connection ends; the lock only spares other workers the sweeps.
            lock = select(pg.pg_try_advisory_lock(self._election_lock))
            self._is_elected = bool(connection.scalar(lock))
        cursors = self._cursors
        return cursors.is_at_start or cursors.is_sweep_due(elected=self._is_elected)

    def _wait_for_room(self) -> None:
        """Wait until a slot may need a job; release the jobs that have waited here too long."""
        buffer, prefetch = self._runtime.buffer, self._prefetch
        self._wait_for_notification(0)  # takes those that have come: one may wake the admitter
        buffer.room.wait(max(STALE - buffer.longest_wait(), 0.001))
        waited = buffer.longest_wait()
        prefetch.oldest_waits(waited)
        buffer.low_water = prefetch.low_water
        if waited > STALE:
            for claimed in buffer.drain():
                self._runtime.ledger.done(claimed, Released())

    def _after_no_message(self, attempts: Attempts, *, was_idle: bool, admitted: int) -> None:
        """Sleep until a job may be due, or end if no job is left."""
        runtime = self._runtime
        if runtime.buffer.heap:
            self._wait_for_room()
            return
        if self._until_empty:
            # A job leaves in_flight after its enqueues are committed, so none of them is missed.
            if was_idle and self._leaves_nothing(attempts, admitted):
                self.finished.set()
            else:
                runtime.buffer.room.wait(UNTIL_SETTLED)
            return
        self._empty_claims += 1
        if self._false_alarms > FALSE_ALARMS:
            self.stopping.wait(PAUSE)
        if self._armed_at is None and self._empty_claims <= len(BRIEF):
            self._wait_for_notification(BRIEF[self._empty_claims - 1])
        # To arm is to take the sleepers' lock: enqueuers notify only while somebody holds it.  At
        # each sleep, because the connection that held it may have been replaced.
        elif self._listener.arm() or self._armed_at is None:
            # Claim once more: transactions committed before the lock did not notify.
            self._armed_at = time.monotonic()
        else:
            # A job that is due now, if any, could not be claimed: only a later due time counts.
            pairs = self._cursors.pairs(paused=self._runtime.identity.closed_queues)
            self._sleep_until_due(attempts.upcoming(pairs, tasks=self._runtime.open_tasks))

    def _leaves_nothing(self, attempts: Attempts, admitted: int) -> bool:
        """Look for new queues, admit waiting jobs and end batches; whether none has made a job.

        ``admitted``: the value of ``admitter.admitted`` before the claim that found nothing.  The
        callbacks of batches are jobs too.
        """
        self._next_queues_at = float("-inf")
        if self._find_queues(attempts) or self._admitter.has_admitted_since(admitted):
            return False
        connection = ReconnectingConnection(
            self._runtime.engine,
            SCHEDULING,
            self._runtime.outage,
            name="batches",
            stopping=self.stopping,
            isolation_level=READ_COMMITTED,
        )
        try:
            ended = connection.run(partial(self._batches.end, is_over=self.stopping.is_set))
        finally:
            connection.close()
        return ended == 0  # ``ended`` is None if the database is away

    def _poll(self, attempts: Attempts) -> Upcoming | None:
        """Read whether a job is due; None if a claim must find out.

        Reads from the start of each pair, to find messages that were committed late.  While a
        transaction holds an old snapshot, this takes long; then a claim looks from the cursors on.
        """
        cursors, self._slept_through = self._cursors, False
        if not cursors.is_sweep_cheap and not cursors.is_sweep_due(elected=False):
            return None
        began = time.monotonic()
        pairs = cursors.pairs(paused=self._runtime.identity.closed_queues, from_start=True)
        upcoming = attempts.upcoming(pairs, tasks=self._runtime.open_tasks)
        self.looked_at = time.monotonic()
        cursors.swept(began=began, ended=self.looked_at)
        if upcoming.is_due:
            cursors.rewind()
        return None if upcoming.is_due else upcoming

    def _sleep_until_due(self, upcoming: Upcoming) -> None:
        """Sleep until the next poll, the next due message or the next suspect that may start."""
        now = time.monotonic()
        # An enqueuer that found no sleeper may commit only now.  Each sleep is as long as all
        # sleeps before it, so the job waits no longer than its transaction took to commit.
        lasted = now - (self._armed_at or now)
        poll = min(max(lasted, FIRST_SLEEP), self._longest_sleep)
        seconds = min(poll, self._isolation.seconds_left() or poll)
        if upcoming.seconds is not None:
            seconds = min(seconds, upcoming.seconds)
        if self._has_skipped_look:  # the notification may have been of a job in a new queue
            seconds = min(seconds, max(self._next_queues_at - now, 0.0))
        if self._wait_for_notification(seconds) or self.stopping.is_set():
            return
        # No notification came: the connection may be lost.  `arm` tests it if it is armed already.
        is_newly_armed = self._listener.arm()
        has_slept = seconds == poll and time.monotonic() - now >= seconds
        self._slept_through = has_slept and not is_newly_armed

    def _wait_for_notification(self, seconds: float) -> bool:
        """Wait for a notification or a wake-up; returns whether a notification came."""
        payloads = self._listener.wait(seconds)
        if payloads:
            self._false_alarms += 1
            self._admitter.wake()
        if "rewind" in payloads:
            self._cursors.rewind()
        return bool(payloads)

    def _begin_on_new(self, connection: Connection) -> None:
        """Forget the state that belonged to the last connection, which has broken."""
        self._generation = self.reconnecting.generation
        self._listener.share(connection)
        self._cursors.rewind()
        self._is_elected, self._election_at = False, float("-inf")
        self._reconciled_at = float("-inf")

    def _reconcile(self, connection: Connection) -> None:
        """Release leases that this process does not know: the answer to their claim was lost."""
        runtime = self._runtime
        self._reconciled_at = time.monotonic()
        # Read before the query.  An attempt that is settled during the query may be in the answer,
        # but is no longer in flight afterwards.
        in_flight = list(runtime.ledger.in_flight.values())
        known = {(claimed.message_id, claimed.attempt) for claimed in in_flight}
        leases = Workers(connection).leases_of(runtime.identity.worker_id)
        for job_id, message_id, attempt in leases:
            if (message_id, attempt) not in known:
                logger.warning("job %s: releasing a lease whose claim was lost", job_id)
                lost = Claimed(
                    priority=0,
                    run_at="",
                    message_id=message_id,
                    job_id=job_id,
                    queue="",
                    task="",
                    args="",
                    max_attempts=1,
                    attempt=attempt,
                    crashes=0,
                )
                runtime.ledger.release_unknown(lost)
