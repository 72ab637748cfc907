"""Crash isolation.  Suspects are the jobs that a worker held when its process died.

One of the suspects may have crashed it; which one is not known.  A worker starts one at a time,
so that a second crash affects no other suspect.
"""

import time
from collections.abc import Container, Sequence

from pgqueue.worker.claiming.cursors import ClaimCursors

ALONE_FOR = 2.0
"""Seconds after which the next suspect may start beside one that still runs; four times as many
for each further crash of the running one.  Poison jobs usually crash the worker immediately, and
after the crash of a host its long jobs must not wait for each other's end."""
LONGER = 4
MANY = 100
"""After so many suspects in a row without a crash, the others start at once: the poison job was
among those that ran, which mostly come first.  The rest, perhaps thousands, was only prefetched."""


class CrashIsolation:
    """Decides when suspects may start.  Used by one thread at a time: the one that claims."""

    def __init__(self, in_flight: Container[int], cursors: ClaimCursors) -> None:
        self._in_flight = in_flight
        self._cursors = cursors
        self._message: int | None = None
        """The message of the suspect that runs alone."""
        self._alone_until = 0.0
        self._harmless = 0

    def are_welcome(self) -> bool:
        """Whether the next claim may take suspects."""
        if self._message is None:
            return True
        if self.seconds_left() > 0:
            return False
        self._message = None
        self._harmless += 1
        self._cursors.rewind()  # claims have skipped the other suspects meanwhile
        return True

    def seconds_left(self) -> float:
        """Seconds until the next suspect may start, if the current one does not end before."""
        if self._message is None or self._message not in self._in_flight:
            return 0.0
        return max(self._alone_until - time.monotonic(), 0.0)

    def admit(self, found: Sequence[tuple[int, int]], *, are_all: bool) -> int:
        """How many of the suspects found by a claim may start, counted from the first.

        Release the others before the first one starts.  ``found`` has the message and the number of
        crashes of each; ``are_all`` is true if the claim had room for more.
        """
        if not found:
            self._harmless = 0 if are_all else self._harmless
            return 0
        if self._harmless >= MANY:
            return len(found)
        self._message, crashes = found[0]
        self._alone_until = time.monotonic() + ALONE_FOR * LONGER ** min(crashes - 1, 8)
        return 1
