"""The jobs for which other processes wait, as far as this worker was told."""

import time
from collections.abc import Sequence

from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued
from pgqueue.repository.watches import ids_in

FORGET_AFTER = 60.0
"""Seconds after which a job is forgotten, unless it is announced again."""
MOST = 100_000
"""Any role that can connect can announce jobs without limit."""


class WatchedJobs:
    """The claimer hears of them, and the threads that settle ask.  No lock: a set is replaced, and
    one too few is a hint that is lost."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._since = time.monotonic()

    @property
    def are_some(self) -> bool:
        return bool(self._new or self._old)

    def heard(self, payload: str) -> None:
        """Take the ids of a notification."""
        self._new.update(ids_in(payload))
        if len(self._new) > MOST:
            self._turn()

    def among(self, jobs: Sequence[Claimed | Rescued]) -> list[int]:
        """Those of these jobs for which somebody waits."""
        if time.monotonic() - self._since > FORGET_AFTER:
            self._turn()
        old, new = self._old, self._new
        return [job.job_id for job in jobs if job.job_id in new or job.job_id in old]

    def _turn(self) -> None:
        """Forget what was not announced since the last turn."""
        self._old, self._new, self._since = self._new, set(), time.monotonic()
