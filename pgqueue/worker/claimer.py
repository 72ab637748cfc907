"""The claimer: finds due jobs, claims them, and keeps the job buffer supplied.

Polls find every job; notifications are hints.  At each poll, a sleeping worker asks whether a job
is due, and claims only if one is: the question is one read, a claim and a sweep are two writes.
"""

import time
from collections.abc import Sequence
from functools import partial
from threading import Event
from uuid import UUID

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.database.notifications import Listener
from pgqueue.database.opening import READ_COMMITTED
from pgqueue.database.settings import CLAIMING, LOOKING
from pgqueue.options import OptionsOfWorker
from pgqueue.outcomes import Released
from pgqueue.repository.admit import ADMITTED
from pgqueue.repository.claim import Claim, Claimed, Upcoming
from pgqueue.repository.settle import Attempts
from pgqueue.repository.watches import WATCHES
from pgqueue.repository.workers import Workers
from pgqueue.rules.served_queues import is_pattern, served_queues
from pgqueue.worker.claiming.aging import Aging
from pgqueue.worker.claiming.crash_isolation import CrashIsolation
from pgqueue.worker.claiming.cursors import ClaimCursors
from pgqueue.worker.claiming.prefetch import LONGEST_BUFFERED, Prefetch
from pgqueue.worker.claiming.queue_discovery import QueueDiscovery
from pgqueue.worker.claiming.refused import RefusedJobs
from pgqueue.worker.claiming.shares import Shares
from pgqueue.worker.claiming.sleep import Sleep
from pgqueue.worker.claiming.sweeps import Sweeps
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.looks import Looker
from pgqueue.worker.loop import Loop
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.slots import Slots

logger = redaction.logger(__name__)

RECONCILE_EVERY = 30.0
"""Seconds between two comparisons of the leases in the database with the jobs in this process."""
PAUSE = 0.02
"""Seconds of the pause after a false alarm.  Any role that can connect can notify without limit,
and must not make all workers claim as often."""
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
        slots: Slots,
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
        self._discovery = QueueDiscovery(has_patterns=any(map(is_pattern, config.names)))
        self._cursors = ClaimCursors(
            runtime.identity.queue_names,
            shares=None if config.weights is None else Shares(config.weights),
            aging=None if config.age_after is None else Aging(config.age_after),
        )
        self._is_rewind_wanted = False
        """Whether jobs may be due behind the cursors; set by any thread."""
        self._tasks = runtime.task_names
        """The names of the open tasks at the last claim."""
        self._isolation = CrashIsolation(runtime.ledger.in_flight, self._cursors)
        self._prefetch = Prefetch(slots=config.concurrency, most=config.ahead)
        self._generation = 0
        """The number of the connection that the last step used."""
        self._reconciled_at = float("-inf")
        self._sweeps = Sweeps(config.names)
        self._sleep = Sleep(poll_interval=config.poll_interval.total_seconds())
        self._refused = RefusedJobs(self._cursors, runtime.stopping)
        self._looker = Looker(notify=listens)
        self._listener = Listener(enabled=listens, aside={WATCHES: runtime.watched.heard})
        runtime.work_may_be_there.connect(self.notify)

    def notify(self, behind: bool = False) -> None:
        """Wake the claimer, from another thread: jobs may be due; ``behind``: behind its cursors
        too."""
        if behind:
            self._is_rewind_wanted = True
        self._listener.poke()
        self._runtime.buffer.look.set()

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
        if self._is_rewind_wanted:
            self._is_rewind_wanted = False
            self._cursors.rewind()
        if self._generation != self.reconnecting.generation:
            self._begin_on_new(connection)
        if time.monotonic() - self._reconciled_at > RECONCILE_EVERY:
            self._reconcile(connection)
        self._find_queues(attempts)
        self._find_pairs(attempts)
        if self._sleep.is_poll_due and (upcoming := self._poll(attempts)) is not None:
            self._sleep_until_due(upcoming)
            return 0.0
        buffer.look.clear()
        room, is_ahead = prefetch.room(free=buffer.free_slots, buffered=len(buffer.heap))
        if not room:
            self._wait_for_room()
            return 0.0

        self._learn_ages(attempts)
        # Both are read before the claim.  The claim skips suspects while one runs, and that one may
        # end meanwhile; and it does not see jobs that are admitted after it.
        was_idle, admitted = not runtime.ledger.in_flight, self._admitter.admitted
        is_sweep = self._is_sweep_due(connection)
        claim = self._claim(attempts, room, ahead=is_ahead, sweep=is_sweep)
        if (
            not claim.found
            and not is_sweep
            and (self._until_empty or self._sweeps.is_cheap(self.looked_at))
        ):
            claim = self._claim(attempts, room, ahead=is_ahead, sweep=True)
        prefetch.ran(*self._slots.work_done())
        if prefetch.was_full and buffer.free_slots > 0:
            prefetch.ran_dry()
        buffer.low_water = prefetch.low_water
        if claim.rows:
            prefetch.brought(first=claim.rows[0].priority, last=claim.rows[-1].priority)
            self._hand_over(claim.rows, worker_id)
        elif not claim.found:
            self._after_no_message(attempts, was_idle=was_idle, admitted=admitted)
        return 0.0

    def _hand_over(self, jobs: Sequence[Claimed], worker_id: UUID) -> None:
        """Pass claimed jobs to the slots, unless this worker was declared dead meanwhile.

        The heartbeat changes the id first, and then forgets all jobs: of those that are recorded
        later the id tells that a rescuer releases their leases.
        """
        ledger = self._runtime.ledger
        self._isolation.start(jobs)
        ledger.claimed(jobs)
        if self._runtime.identity.worker_id == worker_id:
            self._runtime.buffer.put(jobs)
        else:
            ledger.forget(jobs)

    def _find_queues(self, attempts: Attempts) -> bool:
        """Look from time to time which queues fit the patterns; returns whether others do now."""
        identity, began = self._runtime.identity, time.monotonic()
        if not self._discovery.is_due(began, is_busy=self._sleep.is_busy):
            return False
        names = served_queues(identity.queues, attempts.queues_with_messages)
        self._discovery.looked(began=began, ended=time.monotonic())
        if names == identity.queue_names:
            return False
        identity.queue_names = names
        self._cursors.serve(names)
        self._admitter.look()
        return True

    def _find_pairs(self, attempts: Attempts, *, at_once: bool = False) -> None:
        """Look from time to time which pairs have messages, if there are many."""
        waiting, began = self._cursors.waiting, time.monotonic()
        if waiting is None:
            return
        if at_once or waiting.is_look_due(began, paused=self._runtime.identity.closed_queues):
            found = attempts.pairs_with_messages()
            self._cursors.learn(found, began=began, ended=time.monotonic())

    def _claim(self, attempts: Attempts, room: int, *, ahead: bool, sweep: bool) -> Claim:
        """Claim up to ``room`` jobs, from the cursors on or, in a sweep, from the start."""
        cursors, tasks, began = self._cursors, self._runtime.open_tasks, time.monotonic()
        if sweep:
            self._find_pairs(attempts, at_once=True)
        if sweep or tasks != self._tasks:  # messages of a resumed task are behind the cursors
            cursors.rewind()
        self._tasks = tasks
        claim = self._claim_once(attempts, room, ahead=ahead)
        paused = self._runtime.identity.closed_queues
        # Due messages that nobody may claim must not hide others behind them.
        while not claim.found and cursors.have_more(paused=paused) and not self.stopping.is_set():
            claim = self._claim_once(attempts, room, ahead=ahead)
        if sweep:
            self._sweeps.swept(began=began, ended=self.looked_at)
        return claim

    def _claim_once(self, attempts: Attempts, room: int, *, ahead: bool) -> Claim:
        runtime, cursors = self._runtime, self._cursors
        suspects, began = self._isolation.are_welcome(), time.monotonic()
        paused = runtime.identity.closed_queues
        limit = cursors.limit(room, paused=paused)
        claim, pairs, limit = self._refused.claim(
            attempts,
            limit,
            paused=paused,
            tasks=self._tasks,
            ahead=ahead,
            suspects=suspects,
            limited=self._admitter.is_in_use,
        )
        self.looked_at = time.monotonic()
        cursors.advance(pairs, claim, limit=limit)
        self._prefetch.claimed(taken=claim.taken, left=claim.left, limit=limit, is_ahead=ahead)
        runtime.clock.read(claim.read_at, began)
        if claim.rows:
            self._sleep.found_jobs()
        if self._prefetch.was_full:  # the claim found as many messages as it asked for
            self._listener.disarm()
            self._sleep.stay_awake()
        if claim.taken > limit:
            logger.critical("a claim of %d messages took %d", limit, claim.taken)
        if claim.taken > len(claim.rows):
            logger.info("dropped %d messages of ended jobs", claim.taken - len(claim.rows))
        return claim

    def _learn_ages(self, attempts: Attempts) -> None:
        """Read from time to time how old the first jobs are, if jobs age."""
        aging = self._cursors.aging
        if aging is not None and aging.is_look_due:
            pairs = self._cursors.pairs(paused=self._runtime.identity.closed_queues)
            tasks = self._runtime.open_tasks
            aging.learn(attempts.ages(pairs, tasks=tasks, age_after=aging.age_after))

    def _is_sweep_due(self, connection: Connection) -> bool:
        now = time.monotonic()
        self._sweeps.try_election(connection, now)
        is_due = self._sweeps.is_due(now, elected=self._sweeps.is_elected)
        return self._cursors.is_at_start or is_due

    def _wait_for_room(self) -> None:
        """Wait until a slot may need a job; release the jobs that have waited here too long."""
        buffer, prefetch = self._runtime.buffer, self._prefetch
        # Takes the notifications that have come: one of them may wake the admitter.
        self._wait_for_notification(0)
        buffer.look.wait(max(LONGEST_BUFFERED - buffer.longest_wait(), 0.001))
        waited = buffer.longest_wait()
        prefetch.oldest_waits(waited)
        buffer.low_water = prefetch.low_water
        if waited > LONGEST_BUFFERED:
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
                runtime.buffer.look.wait(UNTIL_SETTLED)
            return
        brief = self._sleep.found_nothing()
        if self._sleep.has_many_false_alarms:
            self.stopping.wait(PAUSE)
        if brief is not None:
            self._wait_for_notification(brief)
        # To arm is to take the sleepers' lock: enqueuers notify only while it is held.  Taken
        # at each sleep, because the connection that held it may have been replaced.
        elif self._listener.arm() or self._sleep.is_busy:
            # Claim once more: transactions committed before the lock did not notify.
            self._sleep.armed(time.monotonic())
        else:
            # A job that is due now, if any, could not be claimed: only a later due time counts.
            pairs = self._cursors.pairs(paused=self._runtime.identity.closed_queues)
            self._sleep_until_due(attempts.upcoming(pairs, tasks=self._runtime.open_tasks))

    def _leaves_nothing(self, attempts: Attempts, admitted: int) -> bool:
        """Look for new queues, admitted jobs and ended batches; whether none has made a job due.

        ``admitted``: the value of ``admitter.admitted`` before the claim that found nothing.  The
        callbacks of batches are jobs too.
        """
        self._discovery.make_due()
        if self._find_queues(attempts) or self._admitter.has_admitted_since(admitted):
            return False
        connection = ReconnectingConnection(
            self._runtime.engine,
            LOOKING,
            self._runtime.outage,
            name="looks",
            stopping=self.stopping,
            isolation_level=READ_COMMITTED,
        )
        try:
            ended = connection.run(partial(self._looker.sweep, is_over=self.stopping.is_set))
        finally:
            connection.close()
        return ended == 0  # ``ended`` is None if the database is away

    def _poll(self, attempts: Attempts) -> Upcoming | None:
        """Read whether a job is due; None if a claim must find out.

        Reads from the start of each pair, to find messages that were committed late.  While a
        transaction holds an old snapshot, this takes long; then a claim looks from the cursors on.
        """
        cursors, self._sleep.is_poll_due = self._cursors, False
        began = time.monotonic()
        if not self._sweeps.is_cheap(began) and not self._sweeps.is_due(began, elected=False):
            return None
        self._find_pairs(attempts, at_once=True)
        pairs = cursors.pairs(paused=self._runtime.identity.closed_queues, from_start=True)
        upcoming = attempts.upcoming(pairs, tasks=self._runtime.open_tasks)
        self.looked_at = time.monotonic()
        self._sweeps.swept(began=began, ended=self.looked_at)
        if upcoming.is_due:
            cursors.rewind()
        return None if upcoming.is_due else upcoming

    def _sleep_until_due(self, upcoming: Upcoming) -> None:
        """Sleep until the next poll, the next due message or the next suspect that may start."""
        now, waiting = time.monotonic(), self._cursors.waiting
        paused = self._runtime.identity.closed_queues
        poll = self._sleep.seconds(now)
        sooner = (
            self._isolation.seconds_left() or poll,
            upcoming.seconds,
            self._discovery.seconds_left(now),
            None if waiting is None else waiting.seconds_left(now, paused=paused),
        )
        seconds = min(poll, *(each for each in sooner if each is not None))
        if self._wait_for_notification(seconds) or self.stopping.is_set():
            return
        # No notification came: the connection may be lost.  `arm` tests it if it is armed already.
        is_newly_armed = self._listener.arm()
        has_slept = seconds == poll and time.monotonic() - now >= seconds
        self._sleep.is_poll_due = has_slept and not is_newly_armed

    def _wait_for_notification(self, seconds: float) -> bool:
        """Wait for a notification or a wake-up; returns whether a notification came."""
        payloads = self._listener.wait(seconds)
        if payloads:
            self._sleep.notified()
        if payloads - {ADMITTED}:
            self._admitter.notified()
        if "signal" in payloads:
            self._runtime.signalled()
        if "rewind" in payloads:
            self._cursors.rewind()
        return bool(payloads)

    def _begin_on_new(self, connection: Connection) -> None:
        """Forget the state that belonged to the last connection, which has broken."""
        self._generation = self.reconnecting.generation
        self._listener.share(connection)
        self._cursors.rewind()
        self._sweeps.forget_election()
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
