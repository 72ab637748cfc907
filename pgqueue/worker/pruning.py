"""One round of pruning: two walks over the jobs from the oldest, in short transactions.

The first is over the failed and cancelled jobs, the second over all jobs that are old enough.  At
the end batches are deleted.
"""

import time
from enum import StrEnum

from psycopg.errors import DeadlockDetected
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from pgqueue import redaction
from pgqueue.repository import Batches, Pruning, Stretch
from pgqueue.retention import Retention
from pgqueue.statements.pruning import Reference
from pgqueue.worker.reconnecting import is_lock_timeout

logger = redaction.logger(__name__)

MOST = 1000
"""Jobs in one transaction."""
LONGEST = 0.1
"""Seconds that a transaction should take.  Cascades to the rows of an application may take longer
for each job: then there are fewer jobs in the next one."""
REFUSED = (
    "%d jobs stay although their time is over, job %d first: rows of the application refuse it, "
    "or are locked: %s"
)
MOST_LOCKED = 3
"""Jobs in a row that are locked, one by one, after which a round ends: a whole table is locked."""


class Progress(StrEnum):
    """What one step of a round has found."""

    MORE = "more"
    DONE = "done"
    BUSY = "busy"
    """Another connection prunes."""


class PruneRound:
    """Call :meth:`step` until it does not return MORE.

    A job that cannot be deleted stays, and stops no other: the stretch around it is divided until
    the job stands alone, and is stepped over.
    """

    def __init__(self, retention: Retention) -> None:
        self.deleted = 0
        self.kept: list[int] = []
        """Jobs whose time is over and which could not be deleted."""
        self.reading = 0.0
        """Seconds spent on stretches without a job to delete."""
        self._retention = retention
        self._walks: list[bool] = []
        """Whether the walks that are left, the current one first, are over the dead jobs."""
        if retention.ever_prunes_dead:
            self._walks.append(True)
        if retention.shortest is not None:
            self._walks.append(False)
        self._references: tuple[Reference, ...] | None = None
        self._after = 0
        self._size = MOST
        self._locked_in_row = 0
        self._refusal: Exception | None = None

    def step(self, connection: Connection) -> Progress:
        """Prune one stretch in a transaction of its own."""
        if not self._walks:
            return self._prune_batches(connection)
        began = time.monotonic()
        try:
            with connection.begin():
                if not Pruning(connection).try_lock():
                    return Progress.BUSY
                stretch = self._prune(connection)
        except DBAPIError as error:
            if not _is_refusal(error):
                raise
            return self._divide(connection, error)
        self.deleted += stretch.deleted
        self._locked_in_row = 0
        self._resize(time.monotonic() - began, stretch.deleted)
        if stretch.up_to is None or stretch.are_young:
            return self._end_walk()
        self._after = stretch.up_to
        return Progress.MORE

    def tell(self) -> None:
        """Log what the round has done."""
        if self.deleted:
            logger.info("pruned %d jobs", self.deleted)
        if self.kept:
            logger.warning(REFUSED, *self._refused())

    @property
    def refusal(self) -> str:
        """Why jobs stay, in one line."""
        return REFUSED % self._refused()

    def _refused(self) -> tuple[int, int, str]:
        return len(self.kept), self.kept[0], str(self._refusal).strip().partition("\n")[0]

    def _end_walk(self) -> Progress:
        del self._walks[0]
        self._after = 0
        return Progress.MORE

    def _prune_batches(self, connection: Connection) -> Progress:
        with connection.begin():
            deleted = Batches(connection).prune(self._retention, MOST)
        return Progress.MORE if deleted else Progress.DONE

    def _prune(self, connection: Connection) -> Stretch:
        pruning = Pruning(connection)
        if self._references is None:
            self._references = pruning.references()
        return pruning.prune(
            self._retention,
            self._references,
            dead=self._walks[0],
            after=self._after,
            size=self._size,
        )

    def _divide(self, connection: Connection, error: DBAPIError) -> Progress:
        """Halve the stretch, or step over its only job."""
        if self._size > 1:
            self._size //= 2
            return Progress.MORE
        self._refusal = self._refusal or error.orig
        self._locked_in_row = 0 if isinstance(error, IntegrityError) else self._locked_in_row + 1
        with connection.begin():
            job_id = Pruning(connection).next_job(self._after, dead=self._walks[0])
        if self._locked_in_row >= MOST_LOCKED:
            return Progress.DONE
        if job_id is None:
            return self._end_walk()
        if job_id not in self.kept:  # the walk over the dead jobs may have met it
            self.kept.append(job_id)
        self._after = job_id
        return Progress.MORE

    def _resize(self, seconds: float, deleted: int) -> None:
        if not deleted:
            self.reading += seconds
        if seconds > LONGEST:
            self._size = max(1, self._size // 2)
        elif seconds < LONGEST / 2:
            self._size = min(MOST, 2 * self._size)


def _is_refusal(error: DBAPIError) -> bool:
    """Whether one of the jobs may be the reason: a foreign key, or a locked row of a cascade."""
    is_locked = is_lock_timeout(error) or isinstance(error.orig, DeadlockDetected)
    return is_locked or isinstance(error, IntegrityError)
