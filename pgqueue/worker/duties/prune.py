"""Deletes ended jobs whose time is over, in rounds some minutes apart.

A round is two walks over the jobs from the oldest, in short transactions: the first over the failed
and cancelled jobs, the second over all jobs that are old enough.  At its end batches are deleted,
and then statistics and the log of operators.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from psycopg.errors import DeadlockDetected
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.models.base import SCHEMA
from pgqueue.repository.batches import Batches
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.operator_actions import OperatorActions
from pgqueue.repository.prune import Pruning
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.references import Reference
from pgqueue.repository.signals import Signals
from pgqueue.repository.task_minutes import TaskMinutes
from pgqueue.repository.transactions import PLAN_BY_KEY
from pgqueue.rules.retention import Retention
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.outage import is_away, words_of
from pgqueue.worker.reconnecting import GRANT_AGAIN, is_lock_timeout, lacks_right
from pgqueue.worker.rows import RowGuard, may_be_of_row

logger = redaction.logger(__name__)

FIRST_AFTER = 10.0
"""Seconds from the start of a worker to its first round."""
PAUSE = 300.0
"""Seconds between two rounds."""
REST = 50
"""A round rests so many times as long as it has read without finding a job to delete.  Jobs that
are kept are read again by each round: a worker spends 2 % of its time on them at most."""
NO_RIGHT = f"prune: no ended job is deleted, because the worker's role may not: %s; {GRANT_AGAIN}"


class Prune(Duty):
    """Prunes in rounds.  Every worker does; an advisory lock lets one prune at a time, because each
    application has its own retention.

    A step of the duty is one step of a round.  A round ends early if another worker prunes, or if
    the database fails a step.
    """

    def __init__(
        self, retention: Retention, *, first_after: float = FIRST_AFTER, pause: float = PAUSE
    ) -> None:
        super().__init__(first_in=_apart(first_after), repeat_after=_apart(pause))
        self._retention = retention
        self._pause = pause
        self._was_refused = False
        self._guard = RowGuard()
        self._round: PruneRound | None = None

    def step(self, connection: Connection) -> float:
        """Prune a little, and rest for as long as that took."""
        began, progress = time.monotonic(), RoundState.DONE
        current = self._round = self._round or PruneRound(self._retention, self._guard)
        try:
            progress = current.step(connection)
        except DBAPIError as error:
            if not lacks_right(error):
                raise
            if not self._was_refused:
                self._was_refused = True
                logger.warning(NO_RIGHT, words_of(error))
        finally:
            if progress is not RoundState.MORE:
                self.end()
        if progress is RoundState.MORE:
            return time.monotonic() - began
        return _apart(max(self._pause, REST * current.reading))

    def end(self) -> None:
        """End a round."""
        if self._round is not None:
            self._round.log()
            self._round = None


def _apart(seconds: float) -> float:
    """About so many seconds: workers that were started together do not prune together."""
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311  # no secret


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


TABLES: Mapping[str, Callable[[Connection], bool | None]] = {
    "error_groups": lambda connection: ErrorGroups(connection).prune(),
    "deploys": lambda connection: ErrorGroups(connection).prune_deploys(),
    "operator_actions": lambda connection: OperatorActions(connection).prune(),
    "signals": lambda connection: Signals(connection).prune(),
    "task_minutes": lambda connection: TaskMinutes(connection).prune(),
    "queue_minutes": lambda connection: QueueMinutes(connection).prune(),
}
"""What prunes a part of a table; true if there may be more."""


class RoundState(StrEnum):
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

    def __init__(self, retention: Retention, guard: RowGuard | None = None) -> None:
        """``guard``: of the batches, if it logs the same failure in several rounds once."""
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
        self._after_batch = 0
        self._guard = guard or RowGuard()
        self._tables = dict(TABLES)
        """Those that are left."""
        self._size = MOST
        self._locked_in_row = 0
        self._refusal: Exception | None = None

    def step(self, connection: Connection) -> RoundState:
        """Prune one stretch in a transaction of its own, or a part of a batch."""
        pruning = Pruning(connection)
        if self._references is None:
            with _begin(connection):
                self._references = pruning.references()
        if not self._walks:
            return self._prune_batches(connection, self._references)
        began = time.monotonic()
        try:
            with _begin(connection):
                if not pruning.try_lock():
                    return RoundState.BUSY
                stretch = pruning.prune(
                    self._retention,
                    self._references,
                    dead=self._walks[0],
                    after=self._after,
                    size=self._size,
                )
        except DBAPIError as error:
            if not may_be_of_row(error):
                raise
            return self._divide(connection, error)
        seconds = time.monotonic() - began
        self._locked_in_row = 0
        self.deleted += stretch.deleted
        if not stretch.deleted:
            self.reading += seconds
        if seconds > LONGEST:
            self._size = max(1, self._size // 2)
        elif seconds < LONGEST / 2:
            self._size = min(MOST, 2 * self._size)
        if stretch.up_to is None or stretch.are_young:
            return self._end_walk()
        self._after = stretch.up_to
        return RoundState.MORE

    def log(self) -> None:
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

    def _divide(self, connection: Connection, error: DBAPIError) -> RoundState:
        """Halve the stretch, or step over its only job."""
        if self._size > 1:
            self._size //= 2
            return RoundState.MORE
        self._refusal = self._refusal or error.orig
        self._locked_in_row = self._locked_in_row + 1 if _is_locked(error) else 0
        with _begin(connection):
            job_id = Pruning(connection).next_job(self._after, dead=self._walks[0])
        if self._locked_in_row >= MOST_LOCKED:
            return RoundState.DONE
        if job_id is None:
            return self._end_walk()
        if job_id not in self.kept:  # the walk over the dead jobs may have met it
            self.kept.append(job_id)
        self._after = job_id
        return RoundState.MORE

    def _end_walk(self) -> RoundState:
        del self._walks[0]
        self._after = 0
        return RoundState.MORE

    def _prune_batches(
        self, connection: Connection, references: tuple[Reference, ...]
    ) -> RoundState:
        """Delete a part of the next batch whose time is over, or step over it."""
        rows = Batches(connection)
        with _begin(connection):
            batch_id = rows.next_due(self._retention, references, after=self._after_batch)
        if batch_id is None:
            return self._prune_table(connection)
        deleted = 0
        words = f"batch {batch_id} stays although its time is over"
        with self._guard.row(batch_id, words), _begin(connection):
            deleted = rows.prune(batch_id, self._retention, MOST)
        if deleted < MOST:
            self._after_batch = batch_id
        return RoundState.MORE

    def _prune_table(self, connection: Connection) -> RoundState:
        """Prune a part of the next table of those that are about jobs.  One that cannot be pruned
        keeps its rows, and stops no other."""
        name = next(iter(self._tables), None)
        if name is None:
            return RoundState.DONE
        is_more: bool | None = False
        try:
            with _begin(connection):
                is_more = self._tables[name](connection)
        except DBAPIError as error:
            if is_away(error):
                raise
            self._guard.failed(name, f"{SCHEMA}.{name} cannot be pruned", error)
        else:
            self._guard.succeeded(name)
        if not is_more:
            del self._tables[name]
        return RoundState.MORE


@contextmanager
def _begin(connection: Connection) -> Iterator[None]:
    """A transaction whose statements are planned by keys, whatever else the connection is for."""
    with connection.begin():
        connection.exec_driver_sql(PLAN_BY_KEY)
        yield


def _is_locked(error: DBAPIError) -> bool:
    """Whether a row of a cascade is locked."""
    return is_lock_timeout(error) or isinstance(error.orig, DeadlockDetected)
