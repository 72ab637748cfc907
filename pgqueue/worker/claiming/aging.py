"""Aging: jobs that have waited long count as more urgent, in the order in which claims look.

The oldest job of a (queue, priority) pair is the first that a claim takes from it.  So it is
enough to order the pairs by the age of their first jobs; no row is changed.
"""

import time
from collections.abc import Iterable
from datetime import timedelta

from pgqueue.repository.claim import Ages, ClaimCursor, Claimed

LOOK_EVERY = 1.0
"""Seconds between two looks at the ages.  Between them, the claims show how far a pair has come."""


class Aging:
    """What one worker knows of the ages.  Times are compared as the database wrote them."""

    def __init__(self, age_after: timedelta) -> None:
        self.age_after = age_after
        self._ages = Ages({}, ())
        self._looked_at = float("-inf")
        self._served: dict[tuple[str, int], int] = {}
        """The last claim that has taken jobs of a pair."""
        self._claims = 0

    @property
    def is_look_due(self) -> bool:
        return time.monotonic() - self._looked_at >= LOOK_EVERY

    def learn(self, ages: Ages) -> None:
        self._ages, self._looked_at = ages, time.monotonic()

    def in_order(self, pairs: Iterable[ClaimCursor]) -> list[ClaimCursor]:
        """The most urgent first; of pairs that count as equal, the one served longest ago.

        Not the oldest: a large backlog that has aged must not hold up the urgent jobs.
        """
        return sorted(pairs, key=self._place)

    def took(self, rows: Iterable[Claimed]) -> None:
        """Record the jobs of a claim."""
        self._claims += 1
        self._served.update(((row.queue, row.priority), self._claims) for row in rows)

    def _place(self, pair: ClaimCursor) -> tuple[int, int]:
        name = (pair.queue, pair.priority)
        first = self._ages.oldest.get(name)
        periods = 0
        if first is not None:
            first = max(first, pair.run_at)  # what came before has been claimed meanwhile
            periods = sum(first <= time for time in self._ages.periods_ago)
        return max(pair.priority - periods, 0), self._served.get(name, 0)
