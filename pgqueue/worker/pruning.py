"""One round of pruning: a walk over the jobs from the oldest, in short transactions."""

import time
from enum import StrEnum

from psycopg.errors import DeadlockDetected
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from pgqueue import redaction
from pgqueue.repository import Pruning, Stretch
from pgqueue.retention import Retention
from pgqueue.statements.pruning import Reference
from pgqueue.worker.reconnecting import is_lock_timeout

logger = redaction.logger(__name__)

MOST = 1000
"""Jobs in one transaction."""
LONGEST = 0.1
"""Seconds that a transaction should take.  Cascades to the rows of an application may take longer
for each job: then there are fewer jobs in the next one."""
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
        self._shortest = retention.shortest
        self._references: tuple[Reference, ...] | None = None
        self._after = 0
        self._size = MOST
        self._locked_in_row = 0
        self._refusal: Exception | None = None

    def step(self, connection: Connection) -> Progress:
        """Prune one stretch in a transaction of its own."""
        if self._shortest is None:
            return Progress.DONE
        began = time.monotonic()
        try:
            with connection.begin():
                if not Pruning(connection).try_lock():
                    return Progress.BUSY
                stretch = self._prune(connection, self._shortest)
        except DBAPIError as error:
            if not _is_refusal(error):
                raise
            return self._divide(connection, error)
        self.deleted += stretch.deleted
        self._locked_in_row = 0
        self._resize(time.monotonic() - began, stretch.deleted)
        if stretch.up_to is None or stretch.are_young:
            return Progress.DONE
        self._after = stretch.up_to
        return Progress.MORE

    def tell(self) -> None:
        """Log what the round has done."""
        if self.deleted:
            logger.info("pruned %d jobs", self.deleted)
        if self.kept:
            logger.warning(self.refusal)

    @property
    def refusal(self) -> str:
        """Why jobs stay, in one line."""
        return (
            f"{len(self.kept)} jobs stay although their time is over, job {self.kept[0]} first: "
            f"rows of the application refuse it, or are locked: {_first_line(self._refusal)}"
        )

    def _prune(self, connection: Connection, shortest: float) -> Stretch:
        pruning = Pruning(connection)
        if self._references is None:
            self._references = pruning.references()
        return pruning.prune(
            self._retention,
            self._references,
            shortest=shortest,
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
            job_id = Pruning(connection).next_job(self._after)
        if job_id is None or self._locked_in_row >= MOST_LOCKED:
            return Progress.DONE
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


def _first_line(error: Exception | None) -> str:
    return str(error).strip().partition("\n")[0]
