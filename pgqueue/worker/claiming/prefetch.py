"""Prefetch: how many jobs to claim ahead of a free slot.

More jobs ahead mean fewer round trips; fewer mean that an urgent job overtakes more, and that the
crash of a worker affects fewer other jobs.
"""

HORIZON = 0.020
"""Seconds of work to claim ahead at once."""
URGENT_SHARE = 3
"""While claims bring urgent jobs, a third of this: urgent jobs wait for the claim under way."""
CALM_AFTER = 500
"""Claims in a row without an urgent job, after which the full number is claimed ahead again."""
TOO_OLD = 0.050
"""Seconds a claimed job may wait before fewer jobs are claimed ahead."""
LONGEST_BUFFERED = 0.250
"""Seconds after which a claimed job that waits is released."""


class Prefetch:
    """Doubles when a slot has run dry, halves when a job waits too long.  Pure: times are
    arguments."""

    def __init__(self, *, slots: int, most: int) -> None:
        self._slots = slots
        self._most = most
        self._rate = 0.0
        """Jobs a second that the handlers run while all slots are busy."""
        self._jobs, self._busy = 0, 0.0
        self._calm_claims = CALM_AFTER
        self._last_priority = 0
        self.ahead = 0
        """How many jobs to claim beyond the free slots; none if handlers are slow."""
        self.was_full = False
        """Whether the last claim found as many messages as it asked for."""
        self._left = 0
        """Messages that the last claim ahead has left and free slots have not claimed yet."""

    def room(self, *, free: int, buffered: int) -> tuple[int, bool]:
        """How many jobs to claim, and whether to claim them ahead of the slots.

        A claim ahead also serves free slots: one large claim replaces two.  It leaves jobs that
        must not wait in a worker; free slots claim as many jobs before the next claim ahead.
        """
        if free > 0 and (self._left or not self.was_full or not self.ahead):
            return free, False
        if not self._left and buffered <= self.ahead:
            return self.ahead, True
        return 0, False

    def claimed(self, *, taken: int, left: int, limit: int, is_ahead: bool) -> None:
        """Learn how many messages a claim has taken and left, of ``limit`` it asked for."""
        self.was_full = taken + left >= limit
        if is_ahead:
            self._left = left
        else:
            self._left = max(self._left - taken, 0) if self.was_full else 0

    @property
    def low_water(self) -> int:
        """How few buffered jobs call for the next claim ahead."""
        return 0 if self._left else self.ahead

    def ran(self, jobs: int, busy: float) -> None:
        """Learn how many jobs have run so far, and for how many seconds they kept slots busy.

        Only busy time counts: idle slots say nothing about the speed of the handlers.
        """
        if jobs - self._jobs >= self._slots and busy > self._busy:
            rate = self._slots * (jobs - self._jobs) / (busy - self._busy)
            self._rate = (self._rate + rate) / 2
            self._jobs, self._busy = jobs, busy
            self.ahead = min(self.ahead, int(self._rate * HORIZON))

    def brought(self, *, first: int, last: int) -> None:
        """Learn the priorities of a claim's first and last job, the most urgent first."""
        overtakes = first < self._last_priority
        self._calm_claims = 0 if overtakes else self._calm_claims + 1
        self._last_priority = last

    def ran_dry(self) -> None:
        """Learn that a slot found no job although there were more to claim."""
        share = 1 if self._calm_claims >= CALM_AFTER else URGENT_SHARE
        most = min(self._most, int(self._rate * HORIZON)) // share
        self.ahead = min(max(2 * self.ahead, self._slots), most)

    def oldest_waits(self, seconds: float) -> None:
        """Learn how long the oldest job claimed ahead has waited."""
        if seconds > LONGEST_BUFFERED:
            self.ahead = 0
        elif seconds > TOO_OLD:
            self.ahead //= 2
