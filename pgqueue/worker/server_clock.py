"""The clock of PostgreSQL, as a worker knows it from its last claim."""

import time
from contextlib import suppress
from datetime import datetime

from pgqueue.repository.claim import Claimed


class ServerClock:
    """Measures with PostgreSQL's clock, with which this machine's need not agree."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()
        """Seconds since 1970, less those of this process's own clock.  Until the first claim, by
        this machine's clock."""

    def read(self, read_at: str, began: float) -> None:
        """Note what PostgreSQL's clock showed at a moment of this process's own clock."""
        with suppress(ValueError):  # a pooler has set another datestyle
            self._ahead = datetime.fromisoformat(read_at).timestamp() - began

    def now(self) -> float:
        """Seconds since 1970."""
        return self._ahead + time.monotonic()

    def waited(self, claimed: Claimed, started_at: float) -> float | None:
        """Seconds for which a job was due when its handler started; None if its time cannot be
        read."""
        try:
            run_at = datetime.fromisoformat(claimed.run_at).timestamp()
        except ValueError:  # before the year 1, or another datestyle
            return None
        return max(self._ahead + started_at - run_at, 0.0)
