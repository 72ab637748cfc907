"""The job buffer: the jobs that this process has claimed, that it runs, and that it must settle."""

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Event
from typing import NamedTuple

from pgqueue import redaction
from pgqueue.events import AttemptOutcome, attempt_outcome
from pgqueue.handler.ended import log_job_failure
from pgqueue.outcomes import (
    Outcome,
    Released,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Settled

logger = redaction.logger(__name__)

BATCH = 2000
FEW = 10
STALE = "stale"


class Ending(NamedTuple):
    """An outcome that is committed."""

    claimed: Claimed
    outcome: Outcome
    job_outcome: str | None
    """How the job has ended; None if it goes on."""
    times: tuple[float, float] | None
    """When the handler started and ended; None if it has not run."""


class JobBuffer:
    """Shared by the claimer, the slots and the settler.

    The heap and the deque are handed over without a lock: ``extend``, ``heapify``, ``heappop``,
    ``append`` and ``popleft`` on tuples of numbers and strings are atomic under the GIL.
    """

    def __init__(self) -> None:
        self.heap: list[Claimed] = []
        self.held: list[Claimed] = []
        """Jobs claimed ahead and held back until more urgent jobs have been claimed."""
        self.in_flight: dict[int, Claimed] = {}
        """Every job claimed and not yet settled: the leases that the worker knows of.

        Keyed by message, because a job that is retried at once is claimed again before its last
        attempt is forgotten.
        """
        self.counts: Counter[str] = Counter()
        self.waiting = 0
        """Number of slots that wait for a job."""
        self.room = Event()
        """Set when the claimer should look: the heap is low, or all jobs are settled."""
        self.low_water = 0
        self.on_end: Callable[[Ending], object] | None = None
        """Called for each outcome that is committed, if anybody wants to know."""
        self.times: dict[int, tuple[float, float]] = {}
        """When the handlers of unsettled attempts ran, by message; only for :attr:`on_end`."""
        self.wake: Callable[[], object] = lambda: None
        """Called when a suspect is settled: the claiming thread may sleep, the next may start."""
        self.on_settled: Callable[[Iterable[Claimed]], object] | None = None
        """Called with jobs whose settle is committed, if limits are in use."""
        self._put = 0
        self._fills: deque[tuple[float, int]] = deque()
        """When the jobs still here were put in, and how many had been put in by then."""
        self._done: deque[tuple[Claimed, Outcome]] = deque()
        self._has_done = Event()
        self._arrived = Condition()
        self._is_closed = False

    def put(self, jobs: Sequence[Claimed]) -> None:
        """Offer claimed jobs to the slots."""
        self._record(jobs)
        self._offer(jobs)

    def put_behind(self, jobs: Sequence[Claimed], *, priority: int) -> None:
        """Offer only jobs more urgent than ``priority``; hold back the others, also those that
        were offered before.

        Slots become free for jobs of this priority, which must be claimed for free slots.
        """
        self._record(jobs)
        lying = [*_emptied(self.heap), *jobs]
        self.held.extend(claimed for claimed in lying if claimed.priority >= priority)
        self._offer([claimed for claimed in lying if claimed.priority < priority])

    def let_go(self) -> bool:
        """Offer the jobs that were held back, once the slots have taken the others; False if they
        have not.

        A job claimed for a free slot that must not wait may come after those held back: offered
        together, they would start before it.
        """
        if self.held and self.heap:
            return False
        if self.held:
            self._offer(_emptied(self.held))
        return True

    def take(self) -> Claimed | None:
        """Take the most urgent job; waits for one.  None when the worker stops."""
        while True:
            claimed = self.take_now()
            if claimed is not None or not self._wait_for_job():
                return claimed

    def take_now(self) -> Claimed | None:
        """Take the most urgent job; None if there is none."""
        try:
            claimed = heapq.heappop(self.heap)
        except IndexError:
            return None
        if len(self.heap) <= self.low_water and not self.room.is_set():
            self.room.set()
        return claimed

    def longest_wait(self) -> float:
        """How long the oldest buffered job has waited, in seconds.

        Called by the thread that puts jobs in.  Assumes that jobs are taken in the order in which
        they were put in, as they mostly are.
        """
        self._forget_taken()
        return time.monotonic() - self._fills[0][0] if self._fills else 0.0

    def drain(self) -> list[Claimed]:
        """Take back all jobs that no slot has taken."""
        return _emptied(self.heap) + _emptied(self.held)

    def done(self, claimed: Claimed, outcome: Outcome) -> None:
        """Pass an outcome to the settler."""
        self._done.append((claimed, outcome))
        if not self._has_done.is_set():
            self._has_done.set()

    def give_back(self, claimed: Claimed) -> None:
        """Release a lease that no slot knows of; it stays in flight until it is settled."""
        self.in_flight[claimed.message_id] = claimed
        self.done(claimed, Released())

    def done_batch(self, *, wait: float) -> list[tuple[Claimed, Outcome]]:
        """Take a batch of outcomes to settle; waits up to ``wait`` seconds for the first."""
        self._has_done.wait(wait)
        self._has_done.clear()
        batch: list[tuple[Claimed, Outcome]] = []
        while len(batch) < BATCH:
            try:
                batch.append(self._done.popleft())
            except IndexError:
                return batch
        self._has_done.set()
        return batch

    def settled(
        self, batch: Sequence[tuple[Claimed, Outcome]], settled: list[Settled] | None
    ) -> None:
        """Forget and count attempts whose settle is committed; ``settled`` is None if all have
        succeeded.

        Every outcome of this worker that is accepted passes here.
        """
        if settled is None:
            self.counts["succeeded"] += len(batch)
            if self.on_end is not None:
                for claimed, outcome in batch:
                    self._emit(claimed, outcome, AttemptOutcome.SUCCEEDED)
        else:
            endings = dict(settled)
            for claimed, outcome in batch:
                if claimed.job_id in endings:
                    self._accept(claimed, outcome, endings[claimed.job_id])
                else:
                    self.counts[STALE] += 1
                    logger.warning("job %s: its result is not kept: too late", claimed.job_id)
        if self.on_settled is not None:
            self.on_settled(claimed for claimed, _ in batch)
        for claimed, _ in batch:
            self.in_flight.pop(claimed.message_id, None)
            if self.times:
                self.times.pop(claimed.message_id, None)
        self._forgotten(has_suspect=any(claimed.crashes for claimed, _ in batch))

    def discarded(self, claimed: Claimed, word: str) -> None:
        """Forget and count an attempt whose outcome is not accepted, or not known."""
        self.counts[word] += 1
        forgotten = self.in_flight.pop(claimed.message_id, None)
        self.times.pop(claimed.message_id, None)
        self._forgotten(has_suspect=forgotten is not None and forgotten.crashes > 0)

    def close(self) -> None:
        """End every slot that waits for a job."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()
        self.room.set()
        self._has_done.set()

    def _accept(self, claimed: Claimed, outcome: Outcome, job_outcome: str | None) -> None:
        self.counts[str(attempt_outcome(outcome, job_outcome))] += 1
        if job_outcome == AttemptOutcome.FAILED:
            log_job_failure(claimed, outcome)
        if self.on_end is not None:
            self._emit(claimed, outcome, job_outcome)

    def _emit(self, claimed: Claimed, outcome: Outcome, job_outcome: str | None) -> None:
        if self.on_end is not None:
            times = self.times.get(claimed.message_id)
            self.on_end(Ending(claimed, outcome, job_outcome, times))

    def _forgotten(self, *, has_suspect: bool) -> None:
        if has_suspect:
            self.wake()
        if has_suspect or not self.in_flight:
            self.room.set()

    def _record(self, jobs: Sequence[Claimed]) -> None:
        self._forget_taken()
        self.in_flight.update((claimed.message_id, claimed) for claimed in jobs)
        self._put += len(jobs)
        self._fills.append((time.monotonic(), self._put))

    def _offer(self, jobs: Sequence[Claimed]) -> None:
        count = len(jobs)
        self.heap.extend(jobs)
        heapq.heapify(self.heap)
        with self._arrived:
            self._arrived.notify(count)
        if count <= FEW:
            # Let the slots run first.  Not with many jobs: the claimer claims more meanwhile.
            time.sleep(0)

    def _forget_taken(self) -> None:
        taken = self._put - len(self.heap) - len(self.held)
        while self._fills and self._fills[0][1] <= taken:
            self._fills.popleft()

    def _wait_for_job(self) -> bool:
        with self._arrived:
            if self._is_closed:
                return False
            if self.heap:
                return True
            self.waiting += 1
            self.room.set()
            self._arrived.wait()
            self.waiting -= 1
            return True


def _emptied(jobs: list[Claimed]) -> list[Claimed]:
    """Empty a list that other threads take from: each job goes to one thread."""
    taken: list[Claimed] = []
    while True:
        try:
            taken.append(jobs.pop())  # the last one: the rest of a heap is still a heap
        except IndexError:
            return taken
