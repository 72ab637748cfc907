"""Prefetch: how many jobs to claim ahead of a free slot.

More jobs ahead mean fewer round trips; fewer mean that an urgent job overtakes more, and that the
crash of a worker affects fewer other jobs.
"""

MOST_AHEAD = 1000
HORIZON = 0.020
"""Seconds of work to claim ahead at once."""
URGENT_SHARE = 3
"""While claims bring urgent jobs, a third of this: urgent jobs wait for the claim under way."""
CALM_AFTER = 500
"""Claims in a row without an urgent job, after which the full number is claimed ahead again."""
TOO_OLD = 0.050
"""Seconds a claimed job may wait before fewer jobs are claimed ahead."""
STALE = 0.250
"""Seconds after which a claimed job that waits is released."""


class Prefetch:
    """Follows the speed of the handlers.  Pure: times are arguments."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._rate = 0.0
        self._calm_claims = CALM_AFTER
        self._last_priority = 0
        self.ahead = 0
        """How many jobs to claim beyond the free slots; none if handlers are slow."""

    def ran(self, jobs: int, *, busy: float) -> None:
        """Record that ``jobs`` jobs have kept the slots busy for ``busy`` seconds in all.

        Only busy time counts: idle slots say nothing about the speed of the handlers.
        """
        if busy > 0:
            self._rate = (self._rate + self._slots * jobs / busy) / 2

    def brought(self, *, first: int, last: int) -> None:
        """Record the priorities of a claim's first and last job, the most urgent first."""
        overtakes = first < self._last_priority
        self._calm_claims = 0 if overtakes else self._calm_claims + 1
        self._last_priority = last
        self.ahead = min(self.ahead, self._most)

    def ran_dry(self) -> None:
        """Record that a slot found no job although there were more to claim."""
        self.ahead = min(max(2 * self.ahead, self._slots), self._most)

    @property
    def _most(self) -> int:
        most = min(MOST_AHEAD, int(self._rate * HORIZON))
        return most if self._calm_claims >= CALM_AFTER else most // URGENT_SHARE

    def oldest_waits(self, seconds: float) -> None:
        """Record how long the oldest job claimed ahead has waited."""
        if seconds > STALE:
            self.ahead = 0
        elif seconds > TOO_OLD:
            self.ahead //= 2
