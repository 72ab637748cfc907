"""When a worker that serves a pattern, such as ``mail.*``, looks for queues that fit it."""

from pgqueue.worker.pace import Pace

NEW_QUEUES_EVERY = 2.0
"""Seconds after which a busy worker that serves a pattern looks for queues with jobs; an idle one
looks at each poll and notification."""


class QueueDiscovery:
    """When the next look for queues is due.  Pure: times are arguments."""

    def __init__(self, *, has_patterns: bool) -> None:
        self._has_patterns = has_patterns
        self._next_at = float("-inf")
        """When an idle worker looks again."""
        self._pace = Pace()
        self._has_skipped = False
        """Whether a look was wanted since the last one, and came too soon after it."""

    def is_due(self, now: float, *, is_busy: bool) -> bool:
        """Whether to look now."""
        if not self._has_patterns:
            return False
        self._has_skipped = now < self._next_at + (NEW_QUEUES_EVERY if is_busy else 0.0)
        return not self._has_skipped

    def looked(self, *, began: float, ended: float) -> None:
        """Learn how long a look took."""
        self._pace.took(ended - began)
        self._next_at = began + self._pace.rest

    def make_due(self) -> None:
        """Make the next look due at once."""
        self._next_at = float("-inf")

    def seconds_left(self, now: float) -> float | None:
        """The seconds until the look that was skipped: a notification may have been of a job in a
        new queue.  None if none was skipped."""
        return max(self._next_at - now, 0.0) if self._has_skipped else None
