"""The job buffer: claimed jobs that wait for a slot."""

import heapq
import time
from collections import deque
from collections.abc import Sequence
from threading import Condition, Event

from pgqueue.repository.claim import Claimed

FEW = 10
"""After so few jobs at once, the claimer lets the slots run first."""


class JobBuffer:
    """The claimer puts jobs in, the slots take them out, the most urgent first.

    The heap is shared without a lock: ``extend``, ``heapify``, ``heappop`` and ``pop`` on
    tuples of numbers and strings are atomic under the GIL.
    """

    def __init__(self) -> None:
        self.heap: list[Claimed] = []
        self.look = Event()
        """Set when the claimer should look: the heap is low, or all jobs are settled."""
        self.low_water = 0
        """The number of jobs in the heap at which the claimer should look; the claimer sets it."""
        self._waiting = 0
        """Number of slots that wait for a job."""
        self._put = 0
        """How many jobs have been put in so far."""
        self._fills: deque[tuple[float, int]] = deque()
        """When the jobs still here were put in, and how many had been put in by then."""
        self._arrived = Condition()
        self._is_closed = False

    @property
    def free_slots(self) -> int:
        """How many slots wait for a job, beyond those that find one here."""
        return self._waiting - len(self.heap)

    def put(self, jobs: Sequence[Claimed]) -> None:
        """Offer claimed jobs to the slots."""
        self._forget_taken()
        self._put += len(jobs)
        self._fills.append((time.monotonic(), self._put))
        self.heap.extend(jobs)
        heapq.heapify(self.heap)
        with self._arrived:
            self._arrived.notify(len(jobs))
        if len(jobs) <= FEW:
            # Let the slots run first.  Not with many jobs: the claimer claims more meanwhile.
            time.sleep(0)

    def take(self) -> Claimed | None:
        """Take the most urgent job; waits for one.  None when the worker stops."""
        while (claimed := self.take_now()) is None:
            with self._arrived:
                if self._is_closed:
                    return None
                if not self.heap:
                    self._waiting += 1
                    self.look.set()
                    self._arrived.wait()
                    self._waiting -= 1
        return claimed

    def take_now(self) -> Claimed | None:
        """Take the most urgent job; None if there is none, or the worker stops."""
        if self._is_closed:
            return None
        try:
            claimed = heapq.heappop(self.heap)
        except IndexError:
            return None
        if len(self.heap) <= self.low_water and not self.look.is_set():
            self.look.set()
        return claimed

    def longest_wait(self) -> float:
        """How long the oldest buffered job has waited, in seconds.

        Called by the thread that puts jobs in.  Assumes that jobs are taken in the order in which
        they were put in, as they mostly are.
        """
        self._forget_taken()
        return time.monotonic() - self._fills[0][0] if self._fills else 0.0

    def drain(self) -> list[Claimed]:
        """Remove and return all jobs that no slot has taken."""
        taken: list[Claimed] = []
        while True:
            try:
                taken.append(self.heap.pop())  # the last one: the rest of a heap is still a heap
            except IndexError:
                return taken

    def close(self) -> None:
        """Give out no more jobs; the slots end."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()
        self.look.set()

    def _forget_taken(self) -> None:
        taken = self._put - len(self.heap)
        while self._fills and self._fills[0][1] <= taken:
            self._fills.popleft()
