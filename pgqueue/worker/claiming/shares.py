"""Shares: which queue a claim serves first, and with how many jobs, if queues have weights.

Each job that is claimed adds to the credit of every queue its share of one job, and takes one from
the queue of the job.  A queue with jobs whose turn has come is first; the others fill what it
leaves.  A queue that has no more jobs loses its credit to the others: it cannot save up turns.
Deterministic, and without I/O.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

ROUNDING = 1e-9
"""Sums of shares such as a third are not exact."""


class Shares:
    """The credits of the queues that one worker serves."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._credits: dict[str, float] = {}

    def order(self, queues: Iterable[str]) -> list[str]:
        """The open queues: first the one whose turn it is, then those that fill its place.

        A turn is between the times at which a steady stream would begin and end the next job of
        the queue; of several, the one that ends first.  So no queue is a whole job ahead or behind
        while all have jobs.
        """
        share = self._open(queues)

        def place(queue: str) -> tuple[bool, float]:
            credit = self._credits[queue]
            return credit + share[queue] <= ROUNDING, (1 - credit) / share[queue]

        return sorted(share, key=place)

    def turn(self, queues: Iterable[str], room: int) -> int:
        """How many of the next ``room`` jobs are those of the first queue."""
        order, share = self.order(queues), self._open(queues)
        if not order:
            return room
        owed = self._credits[order[0]] + room * share[order[0]]
        return max(1, min(room, math.floor(owed + ROUNDING)))

    def took(self, order: Sequence[str], jobs: Counter[str], *, is_full: bool) -> None:
        """Record a claim that has read these queues in order; ``is_full``: up to its limit."""
        if not is_full:
            self._credits = dict.fromkeys(order, 0.0)  # no queue has more
            return
        total, share = jobs.total(), self._open(order)
        for queue in order:
            self._credits[queue] += total * share[queue] - jobs[queue]
        # The queues before the last one served are empty: the others get their credit.
        last = max((place for place, queue in enumerate(order) if jobs[queue]), default=0)
        empty, others = order[:last], order[last:]
        lost = sum(max(self._credits[queue], 0.0) for queue in empty)
        for queue in empty:
            self._credits[queue] = min(self._credits[queue], 0.0)
        for queue in others:
            self._credits[queue] += lost * share[queue] / sum(share[other] for other in others)

    def _open(self, queues: Iterable[str]) -> dict[str, float]:
        """The shares of the open queues; when a queue is paused or resumed, credits start anew."""
        weights = {queue: self._weights[queue] for queue in queues}
        if weights.keys() != self._credits.keys():
            self._credits = dict.fromkeys(weights, 0.0)
        total = sum(weights.values())
        return {queue: weight / total for queue, weight in weights.items()}
