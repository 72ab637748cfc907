"""The ledger: the attempts of this worker that are not settled, and the outcomes to settle."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event

from pgqueue import redaction
from pgqueue.events import AttemptOutcome, attempt_outcome
from pgqueue.handler.ended import log_job_failure
from pgqueue.handler.error_reports import log_fields
from pgqueue.outcomes import Outcome, Released
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import JobOutcomes, Settlement
from pgqueue.worker.attempt_counts import AttemptCounts

logger = redaction.logger(__name__)

MAX_BATCH = 2000
"""Outcomes that the settler takes at once."""
STALE = "stale"
"""Counts attempts whose lease had passed to another worker before they were settled."""


class Ledger:
    """Shared by the claimer, the slots and the settler.

    The outcomes are shared without a lock: ``append`` and ``popleft`` are atomic under the
    GIL.
    """

    def __init__(self, statistics: AttemptCounts | None = None) -> None:
        self._statistics = statistics
        self.in_flight: dict[int, Claimed] = {}
        """Every job claimed and not yet settled: the leases that the worker knows of.

        Keyed by message, because a job that is retried at once is claimed again before its last
        attempt is forgotten.
        """
        self.counts: Counter[str] = Counter()
        self.times: dict[int, tuple[float, float]] = {}
        """When the handlers of unsettled attempts ran, by message; only for :attr:`on_end`."""
        self.on_end: (
            Callable[[Claimed, Outcome, str | None, tuple[float, float] | None], object] | None
        ) = None
        """Called for each outcome that is committed, if the application has callbacks: with the
        outcome of the job, if it has ended, and when the handler ran, if it has."""
        self.on_settled: Callable[[Iterable[Claimed]], object] | None = None
        """Called with the jobs of attempts that are forgotten, if limits are in use."""
        self.on_suspect_settled: Callable[[], object] = lambda: None
        """Called when the next suspect may start: the claimer may be asleep."""
        self.on_all_settled: Callable[[], object] = lambda: None
        """Called when no attempt is in flight any more."""
        self._done: deque[Settlement] = deque()
        self._has_done = Event()

    def ended(self) -> int:
        """How many attempts were ended here, those apart that were given back or came too late."""
        counts = dict(self.counts)  # at once: other threads count meanwhile
        return sum(counts.values()) - counts.get(STALE, 0) - counts.get(AttemptOutcome.RELEASED, 0)

    def claimed(self, jobs: Iterable[Claimed]) -> None:
        """Record jobs before a slot can take them."""
        self.in_flight.update((job.message_id, job) for job in jobs)

    def knows(self, claimed: Claimed) -> bool:
        """Whether an attempt is still this worker's.

        A worker that was declared dead has forgotten all its attempts.
        """
        return self.in_flight.get(claimed.message_id) is claimed

    def done(self, claimed: Claimed, outcome: Outcome) -> None:
        """Pass an outcome to the settler."""
        self._done.append((claimed, outcome))
        if not self._has_done.is_set():
            self._has_done.set()

    def release_unknown(self, claimed: Claimed) -> None:
        """Release a lease that was not in flight; it is in flight until it is settled."""
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
        self.counts["succeeded"] += len(batch)
        if self._statistics is not None:
            self._statistics.succeeded([claimed.task for claimed, _ in batch])
        if self.on_end is not None:
            for claimed, outcome in batch:
                self.on_end(claimed, outcome, "succeeded", self.times.get(claimed.message_id))
        self._forget([claimed for claimed, _ in batch])

    def settled(self, batch: Sequence[Settlement], job_outcomes: JobOutcomes) -> None:
        """Count and forget attempts whose settle is committed.

        An attempt whose job is not in ``job_outcomes`` was too late.
        """
        for claimed, outcome in batch:
            if claimed.job_id not in job_outcomes:
                self.counts[STALE] += 1
                words = "job %s: its result is not kept: too late"
                logger.warning(words, claimed.job_id, extra=log_fields(claimed))
                continue
            job_outcome = job_outcomes[claimed.job_id]
            recorded = attempt_outcome(outcome, job_outcome)
            self.counts[str(recorded)] += 1
            if self._statistics is not None:
                self._statistics.ended(claimed, outcome, recorded)
            if job_outcome == AttemptOutcome.FAILED:
                log_job_failure(claimed, outcome)
            if self.on_end is not None:
                times = self.times.get(claimed.message_id)
                self.on_end(claimed, outcome, job_outcome, times)
        self._forget([claimed for claimed, _ in batch])

    def stale(self, claimed: Claimed) -> None:
        """Count and forget an attempt whose lease had passed to another worker."""
        self.counts[STALE] += 1
        self._forget([claimed])

    def forget_all(self) -> None:
        """Forget all attempts: other workers rescue them."""
        self.in_flight.clear()
        self.times.clear()

    def stop_waiting(self) -> None:
        """End the settler's wait for an outcome."""
        self._has_done.set()

    def _forget(self, jobs: Sequence[Claimed]) -> None:
        if self.on_settled is not None:
            self.on_settled(jobs)
        has_suspect = False
        for job in jobs:
            self.in_flight.pop(job.message_id, None)
            self.times.pop(job.message_id, None)
            has_suspect = has_suspect or job.crashes > 0
        if has_suspect:
            self.on_suspect_settled()
        if not self.in_flight:
            self.on_all_settled()
