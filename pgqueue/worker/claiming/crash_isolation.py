"""Crash isolation.  Suspects are the jobs that a worker held when its process died.

One of the suspects may have crashed it; which one is not known.  A worker claims one at a time,
and only for a free slot, so that a second crash affects no other suspect.
"""

import time
from collections.abc import Container, Iterable

from pgqueue.repository.claim import Claimed
from pgqueue.worker.claiming.cursors import ClaimCursors

ALONE_FOR = 2.0
"""Seconds after which the next suspect may start beside one that still runs; four times as many
for each further crash of the running one.  Poison jobs usually crash the worker immediately, and
after the crash of a host its long jobs must not wait for each other's end."""
LONGER = 4


class CrashIsolation:
    """Decides when suspects may start.  Used by one thread, the claimer."""

    def __init__(self, in_flight: Container[int], cursors: ClaimCursors) -> None:
        self._in_flight = in_flight
        self._cursors = cursors
        self._message: int | None = None
        """The message of the suspect that runs alone."""
        self._alone_until = 0.0

    def are_welcome(self) -> bool:
        """Whether the next claim may take a suspect."""
        if self.seconds_left() > 0:
            return False
        if self._message is not None:
            self._message = None
            self._cursors.rewind()  # claims have skipped the other suspects meanwhile
        return True

    def seconds_left(self) -> float:
        """Seconds until the next suspect may start, if the current one does not end before."""
        if self._message is None or self._message not in self._in_flight:
            return 0.0
        return max(self._alone_until - time.monotonic(), 0.0)

    def start(self, claimed: Iterable[Claimed]) -> None:
        """Isolate the suspect among these jobs, if there is one."""
        for job in claimed:
            if job.crashes:
                self._message = job.message_id
                alone_for = ALONE_FOR * LONGER ** min(job.crashes - 1, 8)
                self._alone_until = time.monotonic() + alone_for
