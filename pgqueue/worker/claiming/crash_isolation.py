"""Suspects: jobs that were in a process that died.

One of them may be why, and which of them nobody knows.  A worker starts one at a time, so that the
one that kills takes none of the others along a second time.
"""

import time
from collections.abc import Container, Sequence

from pgqueue.worker.claiming.cursors import ClaimCursors

ALONE_FOR = 2.0
"""Seconds after which the next may start beside one that still runs, and four times as many for
each further crash of that.  What kills its worker mostly does so at once; and when a host has
crashed, its long jobs must not wait for each other's end."""
LONGER = 4
MANY = 100
"""So many have started in a row, and done no harm: what killed was among those that ran, which
mostly come first.  The others had only been claimed ahead, thousands perhaps, and go on at once."""


class CrashIsolation:
    """Asked by one thread at a time: the one that claims."""

    def __init__(self, in_flight: Container[int], cursors: ClaimCursors) -> None:
        self._in_flight = in_flight
        self._cursors = cursors
        self._message: int | None = None
        """Of the one that is alone."""
        self._alone_until = 0.0
        self._harmless = 0

    def are_welcome(self) -> bool:
        """Whether the next claim may bring any."""
        if self._message is None:
            return True
        if self.seconds_left() > 0:
            return False
        self._message = None
        self._harmless += 1
        self._cursors.rewind()  # claims have passed the others by meanwhile
        return True

    def seconds_left(self) -> float:
        """Until the next may come, if the one that is alone does not end before."""
        if self._message is None or self._message not in self._in_flight:
            return 0.0
        return max(self._alone_until - time.monotonic(), 0.0)

    def admit(self, found: Sequence[tuple[int, int]], *, are_all: bool) -> int:
        """How many of those that a claim has brought may start, the first ones.

        The others are to be given back before that.  Each by its message and its crashes;
        ``are_all``, if the claim had room for more.
        """
        if not found:
            self._harmless = 0 if are_all else self._harmless
            return 0
        if self._harmless >= MANY:
            return len(found)
        self._message, crashes = found[0]
        self._alone_until = time.monotonic() + ALONE_FOR * LONGER ** min(crashes - 1, 8)
        return 1
