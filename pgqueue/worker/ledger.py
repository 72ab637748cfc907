"""The ledger: the attempts of this worker that are not settled, and the outcomes to settle.

Each attempt that begins or ends comes through here, so the statistics are counted and the events
are told here, and nowhere else.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock

from pgqueue import redaction
from pgqueue.events import AttemptOutcome, attempt_outcome
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.ended import log_job_failure
from pgqueue.handler.error_reports import log_fields
from pgqueue.meta import OF_BATCH, OF_WORKFLOW, batches_in
from pgqueue.outcomes import Outcome, Released
from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued
from pgqueue.repository.settle import JobOutcomes, Settlement
from pgqueue.worker.attempt_counts import AttemptCounts
from pgqueue.worker.attempt_events import AttemptEvents
from pgqueue.worker.wake_up import WakeUp
from pgqueue.worker.watched import WatchedJobs

logger = redaction.logger(__name__)

MAX_BATCH = 2000
"""Outcomes that the settler takes at once."""
STALE = "stale"
"""Counts attempts whose lease had passed to another worker before they were settled."""


class Ledger:
    """Shared by the threads of a worker, of which each calls its own methods::

        claimer     claimed, forget, release_unknown
        slots       knows, ran, done, stale; note_times and settled of an attempt that is committed
                    with what its handler wrote
        settler     done_batch, succeeded, settled
        heartbeat   ended, forget_all
        upkeep      rescued
        supervisor  ran, done: of attempts whose threads do not return, or that never began

    The outcomes and the jobs in flight are shared without a lock: operations of a deque and a dict
    are atomic under the GIL.  A Counter's are not, so counts have a lock.
    """

    def __init__(
        self,
        *,
        watched: WatchedJobs | None = None,
        statistics: AttemptCounts | None = None,
        events: AttemptEvents | None = None,
        work_may_be_there: WakeUp | None = None,
        all_settled: Event | None = None,
    ) -> None:
        """
        Args:
            watched: The jobs for which other processes wait.
            events: Tells the application how attempts end, if it has callbacks.
            work_may_be_there: Called when the next suspect may start.
            all_settled: Set when no attempt is in flight any more.
        """
        self._watched = watched or WatchedJobs()
        self._statistics = statistics
        self._events = events
        self._work_may_be_there = work_may_be_there or WakeUp()
        self._all_settled = all_settled or Event()
        self.in_flight: dict[int, Claimed] = {}
        """Every job claimed and not yet settled: the leases that the worker knows of.

        Keyed by message, because a job that is retried at once is claimed again before its last
        attempt is forgotten.
        """
        self.counts: Counter[str] = Counter()
        self.on_settled: Callable[[Iterable[Claimed]], object] | None = None
        """Called with the jobs of forgotten attempts, if limits are in use.  Set before the
        first claim: the admitter, which is called, is made after the ledger."""
        self.on_ended: Callable[[Iterable[int]], object] | None = None
        """Called when a settle is committed, with its jobs of workflows, and with the batches of
        its jobs, as nodes.  Set before the first claim."""
        self.on_watched_ended: Callable[[Sequence[int]], object] | None = None
        """Called when a settle is committed, with its jobs for which other processes wait."""
        self._counting = Lock()
        self._times: dict[int, tuple[float, float]] = {}
        """When the handlers of unsettled attempts ran, by message; empty if there are no events."""
        self._done: deque[Settlement] = deque()
        self._has_done = Event()

    def ended(self) -> int:
        """The number of attempts that have ended, without those that were released or too late."""
        counts = dict(self.counts)  # at once: other threads count meanwhile
        return sum(counts.values()) - counts.get(STALE, 0) - counts.get(AttemptOutcome.RELEASED, 0)

    def claimed(self, jobs: Sequence[Claimed]) -> None:
        """Record jobs before a slot can take them."""
        self.in_flight.update((job.message_id, job) for job in jobs)
        if self._statistics is not None:
            self._statistics.claimed(jobs)

    def knows(self, claimed: Claimed) -> bool:
        """Whether an attempt is still this worker's.

        A worker that was declared dead has forgotten all its attempts.
        """
        return self.in_flight.get(claimed.message_id) is claimed

    def ran(self, run: RunningAttempt, outcome: Outcome | None) -> None:
        """Pass the outcome of an attempt that has run to the settler; None if it is settled.

        Every attempt comes through here: the calls that most attempts do not need are left out.
        """
        statistics = self._statistics
        if statistics is not None:
            if statistics.to_skip > 0:
                statistics.to_skip -= 1  # without a lock: two threads at once may skip one too few
            else:
                statistics.ran(run, outcome)
        if outcome is not None and not run.is_settled:
            if self._events is not None:
                self.note_times(run)
            self.done(run.claimed, outcome)

    def note_times(self, run: RunningAttempt) -> None:
        """Keep for its event when an attempt ran; call it before the attempt is settled."""
        if self._events is not None:
            self._times[run.claimed.message_id] = run.times

    def done(self, claimed: Claimed, outcome: Outcome) -> None:
        """Pass an outcome to the settler."""
        self._done.append((claimed, outcome))
        if not self._has_done.is_set():
            self._has_done.set()

    def release_unknown(self, claimed: Claimed) -> None:
        """Release a lease of this worker that is in the database and not in flight."""
        self.in_flight[claimed.message_id] = claimed
        self.done(claimed, Released())

    def done_batch(self, *, wait: float) -> list[Settlement]:
        """Take a batch of outcomes to settle; waits up to ``wait`` seconds for the first."""
        self._has_done.wait(wait)
        self._has_done.clear()
        batch: list[Settlement] = []
        while len(batch) < MAX_BATCH:
            try:
                batch.append(self._done.popleft())
            except IndexError:
                return batch
        self._has_done.set()
        return batch

    def succeeded(self, batch: Sequence[Settlement]) -> None:
        """Count and forget attempts that have all succeeded and are committed."""
        self._count("succeeded", len(batch))
        if self._statistics is not None:
            self._statistics.succeeded([claimed.task for claimed, _ in batch])
        if self._events is not None:
            for claimed, outcome in batch:
                times = self._times.get(claimed.message_id)
                self._events.ended(claimed, outcome, "succeeded", times)
        self._forget([claimed for claimed, _ in batch])

    def settled(self, batch: Sequence[Settlement], job_outcomes: JobOutcomes) -> None:
        """Count and forget attempts whose settle is committed.

        An attempt whose job is not in ``job_outcomes`` was too late.
        """
        for claimed, outcome in batch:
            if claimed.job_id not in job_outcomes:
                self._count(STALE)
                words = "job %s: its result is not kept: too late"
                logger.warning(words, claimed.job_id, extra=log_fields(claimed))
                continue
            job_outcome = job_outcomes[claimed.job_id]
            recorded = attempt_outcome(outcome, job_outcome)
            self._count(str(recorded))
            if self._statistics is not None:
                self._statistics.ended(claimed, outcome, recorded)
            if job_outcome == AttemptOutcome.FAILED:
                log_job_failure(claimed, outcome)
            if self._events is not None:
                times = self._times.get(claimed.message_id)
                self._events.ended(claimed, outcome, job_outcome, times)
        self._forget([claimed for claimed, _ in batch])

    def stale(self, claimed: Claimed) -> None:
        """Count and forget an attempt whose lease had passed to another worker."""
        self._count(STALE)
        self._forget([claimed])

    def rescued(self, attempts: Sequence[Rescued]) -> None:
        """Record the crashes of other workers that this worker has settled."""
        if self._statistics is not None:
            self._statistics.rescued(attempts)
        if self._events is not None:
            self._events.rescued(attempts)
        self._tell_of_ends(attempts)

    def forget(self, jobs: Iterable[Claimed]) -> None:
        """Forget jobs that were just claimed: other workers rescue them."""
        for job in jobs:
            self.in_flight.pop(job.message_id, None)

    def forget_all(self) -> None:
        """Forget all attempts: other workers rescue them."""
        self.in_flight.clear()
        self._times.clear()

    def stop_waiting(self) -> None:
        """End the settler's wait for an outcome."""
        self._has_done.set()

    def _count(self, outcome: str, number: int = 1) -> None:
        with self._counting:  # slots and the settler count at once
            self.counts[outcome] += number

    def _tell_of_ends(self, jobs: Sequence[Claimed | Rescued]) -> None:
        """Name the batches of these jobs, and the jobs of workflows, to those that look at them,
        and the jobs for which other processes wait.

        A job that is retried has not ended, and costs a read.
        """
        if self._watched.are_some and self.on_watched_ended is not None:
            watched = self._watched.among(jobs)
            if watched:
                self.on_watched_ended(watched)
        if self.on_ended is None:
            return
        metas, job_ids = set[str](), []
        for job in jobs:
            if job.meta is not None and (OF_BATCH in job.meta or OF_WORKFLOW in job.meta):
                metas.add(job.meta)
                if OF_WORKFLOW in job.meta:
                    job_ids.append(job.job_id)
        if metas:
            self.on_ended([*job_ids, *(-batch_id for batch_id in batches_in(metas))])

    def _forget(self, jobs: Sequence[Claimed]) -> None:
        if self.on_settled is not None:
            self.on_settled(jobs)
        self._tell_of_ends(jobs)
        has_suspect = False
        for job in jobs:
            self.in_flight.pop(job.message_id, None)
            self._times.pop(job.message_id, None)
            has_suspect = has_suspect or job.crashes > 0
        if has_suspect:
            self._work_may_be_there()
        if not self.in_flight:
            self._all_settled.set()
