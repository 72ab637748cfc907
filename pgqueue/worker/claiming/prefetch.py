"""Prefetch: how many jobs to claim ahead of a free slot.

More ahead means fewer round trips; less ahead means that an urgent job overtakes more, and that
a dying worker takes fewer innocent jobs along.
"""

MOST_AHEAD = 1000
HORIZON = 0.020
"""Seconds of work to claim ahead at once."""
URGENT_SHARE = 3
"""While urgent jobs come beside others, a third of that: they wait for the claim under way."""
CALM_AFTER = 500
"""Claims in a row that brought none of them."""
TOO_OLD = 0.050
"""Seconds a claimed job may wait before less is claimed ahead."""
STALE = 0.250
"""Seconds after which a claimed job that waits is given back."""


class Prefetch:
    """Follows the speed of the handlers.  Pure: takes the times given."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._rate = 0.0
        self._calm_claims = CALM_AFTER
        self._last_priority = 0
        self.ahead = 0
        """Jobs to hold that no slot is free for; none for handlers that take their time."""

    def ran(self, jobs: int, *, busy: float) -> None:
        """So many jobs have kept the slots busy for so many seconds, all slots together.

        Busy time, because a slot that has nothing to do says nothing about the handlers.
        """
        if busy > 0:
            self._rate = (self._rate + self._slots * jobs / busy) / 2

    def brought(self, *, first: int, last: int) -> None:
        """A claim has brought jobs of these priorities, the most urgent first."""
        overtakes = first < self._last_priority
        self._calm_claims = 0 if overtakes else self._calm_claims + 1
        self._last_priority = last
        self.ahead = min(self.ahead, self._most)

    def ran_dry(self) -> None:
        """A slot had nothing to take although there was more to claim."""
        self.ahead = min(max(2 * self.ahead, self._slots), self._most)

    @property
    def _most(self) -> int:
        most = min(MOST_AHEAD, int(self._rate * HORIZON))
        return most if self._calm_claims >= CALM_AFTER else most // URGENT_SHARE

    def oldest_waits(self, seconds: float) -> None:
        """The job that has waited longest of those claimed ahead has waited so long."""
        if seconds > STALE:
            self.ahead = 0
        elif seconds > TOO_OLD:
            self.ahead //= 2
