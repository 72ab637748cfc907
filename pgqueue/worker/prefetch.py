"""Prefetch: how many jobs to claim ahead of a free slot.

More ahead means fewer round trips; less ahead means that an urgent job overtakes more, and that
a dying worker takes fewer innocent jobs along.
"""

MOST_AHEAD = 1000
HORIZON = 0.020
"""Seconds of work to claim ahead at once."""
TOO_OLD = 0.050
"""Seconds a claimed job may wait before less is claimed ahead."""
STALE = 0.250
"""Seconds after which a claimed job that waits is given back."""


class Prefetch:
    """Follows the speed of the handlers.  Pure: takes the times given."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._rate = 0.0
        self.ahead = 0
        """Jobs to hold that no slot is free for; none for handlers that take their time."""

    def ran(self, jobs: int, *, busy: float) -> None:
        """So many jobs have kept the slots busy for so many seconds, all slots together.

        Busy time, because a slot that has nothing to do says nothing about the handlers.
        """
        if busy > 0:
            self._rate = (self._rate + self._slots * jobs / busy) / 2

    def ran_dry(self) -> None:
        """A slot had nothing to take although there was more to claim."""
        most = min(MOST_AHEAD, int(self._rate * HORIZON))
        self.ahead = min(max(2 * self.ahead, self._slots), most)

    def oldest_waits(self, seconds: float) -> None:
        """The job that has waited longest of those claimed ahead has waited so long."""
        if seconds > STALE:
            self.ahead = 0
        elif seconds > TOO_OLD:
            self.ahead //= 2
