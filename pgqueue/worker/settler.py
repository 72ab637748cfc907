"""The settler: writes outcomes in batches, and repeats a batch until it is written."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from threading import Event

from psycopg.errors import InternalError_, ProgramLimitExceeded
from sqlalchemy import Connection, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from pgqueue import redaction
from pgqueue.database.settings import CLAIMING
from pgqueue.errors import PayloadError
from pgqueue.handler.error_reports import log_fields
from pgqueue.handler.outcome import after_error, unkept_result
from pgqueue.outcomes import (
    Cancelled,
    ErrorReport,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
    is_plain_success,
    may_be_deleted,
)
from pgqueue.repository.settle import Attempts, Settlement
from pgqueue.repository.tables import notify
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import REPEAT, words_of
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.rows import RowGuard, may_be_of_row
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)

Settle = Callable[[Connection, list[Settlement]], None]

SETTLING = {**CLAIMING, "lock_timeout": "500"}
"""Milliseconds to wait for a transaction that has locked the row of a job."""
LOOK_AGAIN = 0.5
"""Seconds between two looks at the jobs whose rows are locked."""
AT_REST = 5.0
"""Seconds to wait for an outcome when no job is locked; each outcome ends the wait."""
LINGER = 0.002
"""Seconds to wait for more outcomes after a large batch: a commit costs more than a row."""
LARGE_BATCH = 20
MAX_NAMED = 10
"""Jobs to name in one log message."""
MAX_WITH_DETAILS = 200
"""Outcomes with details in one statement.  Each may have megabytes, and the server closes the
connection at a gigabyte."""
GOES_ON = Retried | Snoozed | Unreadable | Failed
"""Outcomes after which there may be a new message: a failed job may have a follow-up."""
TOO_LARGE = (ProgramLimitExceeded, InternalError_)
"""Errors for a statement whose details exceed 256 megabytes in the server's own format."""


class Settler(Loop):
    """The settling thread.  Its statements are fenced, so repeating one changes nothing."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        super().__init__(
            runtime.engine,
            SETTLING,
            runtime.outage,
            name="settler",
            isolation_level="AUTOCOMMIT",
            patience=0.0,
            is_vital=True,
        )
        self._ledger = runtime.ledger
        self._identity = runtime.identity
        self._work_may_be_there = runtime.work_may_be_there
        self._tasks = runtime.tasks
        self._is_kept = runtime.is_kept if runtime.deletes_at_once else None
        """Whether a job stays if it has succeeded; None if all jobs do."""
        self._locked: list[Settlement] = []
        """Outcomes of jobs that another transaction has locked: they must not delay others."""
        self._refused: list[Settlement] = []
        """Outcomes that a trigger or a constraint refuses: they are tried again, one by one."""
        self._guard = RowGuard()
        self._left: list[tuple[Settle, list[Settlement]]] = [(self._settle_nothing, [])]
        """The rest of the batch that is being settled."""
        self._with_details: list[Settlement] = []
        """The outcomes of this batch that are not plain successes."""
        self._are_many = False
        """Whether the last batch was large."""
        self._waits = 0
        """Consecutive waits for a lock on something other than a job's row."""
        self._looked_at = self._logged_at = float("-inf")
        self._stop_when_done = Event()

    def wait_for_step(self) -> bool:
        """Wait for outcomes; False when all are written, or when this thread must end at once."""
        while not self.stopping.is_set() and not self._left:
            if self._are_many:
                time.sleep(LINGER)
            waits = bool(self._locked or self._refused)
            is_last = self._stop_when_done.is_set() and not waits
            is_near = waits or self.reconnecting.is_open
            wait = 0.0 if is_last else LOOK_AGAIN if is_near else AT_REST
            batch = self._ledger.done_batch(wait=wait)
            self._are_many = len(batch) >= LARGE_BATCH
            if batch:
                self._begin(batch)
            elif is_last:
                return False
            elif waits:
                break
            else:
                self.reconnecting.close_if_idle()
        return not self.stopping.is_set()

    def step(self, connection: Connection) -> float:
        """Settle a batch, and wake workers for jobs that go on.

        If the database fails, the next step settles the rest of the batch.
        """
        if self._locked and time.monotonic() - self._looked_at >= LOOK_AGAIN:
            self._looked_at = time.monotonic()
            free, self._locked = self._parted(self._locked, connection)
            for claimed, outcome in free:
                self._ledger.done(claimed, outcome)
        refused, self._refused = self._refused, []
        for item in refused:
            if self._guard.rests(item[0].message_id):
                self._refused.append(item)
            else:
                self._left.append((self._settle_others, [item]))
        while self._left and not self.stopping.is_set():
            settle, part = self._left[0]
            self._left[:1] = [(settle, each) for each in self._try(settle, part, connection)]
        # Once, after all settles: a settle may be repeated.
        with_details, self._with_details = self._with_details, []
        behind = any(_keeps_due_time(outcome) for _, outcome in with_details)
        if behind or any(isinstance(outcome, GOES_ON) for _, outcome in with_details):
            self._work_may_be_there(behind)
        if behind:
            connection.execute(select(notify("rewind")))
        return 0.0

    def end(self) -> None:
        unwritten = self._locked + self._refused + [item for _, part in self._left for item in part]
        while batch := self._ledger.done_batch(wait=0):
            unwritten += batch
        if unwritten:
            logger.warning("jobs %s: their outcomes are not recorded", _named(unwritten))

    def stop(self, *, seconds: float) -> None:
        """Settle the rest and end; after ``seconds``, leave it to the rescuers."""
        self._stop_when_done.set()
        self._ledger.stop_waiting()
        if self.is_alive():
            self.join(seconds)
        super().stop(seconds=LOOK_AGAIN)

    def _begin(self, batch: list[Settlement]) -> None:
        """Divide a batch by the statements that settle it."""
        deleted: list[Settlement] = []
        plain: list[Settlement] = []
        others: list[Settlement] = []
        is_kept = self._is_kept
        for item in batch:
            claimed, outcome = item
            if is_kept is not None and may_be_deleted(outcome) and not is_kept(claimed):
                deleted.append(item)
            elif is_plain_success(outcome):
                plain.append(item)
            else:
                others.append(item)
        self._with_details = others
        self._left += [(self._settle_deleted, deleted)] if deleted else []
        self._left += [(self._settle_plain, plain)] if plain else []
        self._left += [(self._settle_others, part) for part in _parts(others, MAX_WITH_DETAILS)]

    def _try(
        self, settle: Settle, batch: list[Settlement], connection: Connection
    ) -> list[list[Settlement]]:
        """Settle a batch.  Returns the batches to try instead, if one outcome makes the statement
        fail or the batch is too large."""
        try:
            settle(connection, batch)
        except DBAPIError as error:
            if is_lock_timeout(error):
                return self._without_locked(batch, connection)
            if isinstance(error.orig, TOO_LARGE) and len(batch) > 1:
                return _parts(batch, (len(batch) + 1) // 2)
            if not may_be_of_row(error):
                raise
            if len(batch) != 1:
                return [[item] for item in batch]
            [(claimed, outcome)] = batch
            has_details = not is_plain_success(outcome) and outcome != _bare(outcome)
            if has_details and isinstance(error, DataError | IntegrityError):
                words = "job %s: storing its outcome without details"
                logger.exception(words, claimed.job_id, extra=log_fields(claimed))
                task, bare = self._tasks[claimed.task], _bare(outcome)
                if isinstance(outcome, Succeeded) and task.settings.results == "required":
                    refused = PayloadError(f"the database refuses its result: {words_of(error)}")
                    bare = after_error(task, claimed, refused)
                return [[(claimed, bare)]]
            words = f"job {claimed.job_id}: the database refuses its outcome, and is asked again"
            self._guard.failed(claimed.message_id, words, error)
            self._refused += batch
            return []
        self._waits = 0
        if len(batch) == 1:
            self._guard.succeeded(batch[0][0].message_id)
        return []

    def _without_locked(
        self, batch: list[Settlement], connection: Connection
    ) -> list[list[Settlement]]:
        free, locked = self._parted(batch, connection)
        if locked:
            logger.warning(
                "jobs %s: other transactions have locked their rows; the outcomes of these jobs "
                "are recorded when these transactions have ended",
                _named(locked),
            )
        self._locked += locked
        # No warning the first time: the transaction that locked a row may have ended by now.
        self._waits = 0 if locked else self._waits + 1
        if self._waits > 1 and time.monotonic() - self._logged_at >= REPEAT:
            self._logged_at = time.monotonic()
            logger.warning("settler: waiting for a lock on the tables, or on a lease")
        return [free] if free else []

    def _parted(
        self, batch: list[Settlement], connection: Connection
    ) -> tuple[list[Settlement], list[Settlement]]:
        """The outcomes whose jobs are free, and those whose jobs another transaction has locked."""
        attempts = Attempts(connection, self._identity.worker_id)
        try:
            free = attempts.free_among([claimed for claimed, _ in batch])
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            return batch, []  # a whole table is locked, for example by a migration
        return (
            [item for item in batch if item[0].job_id in free],
            [item for item in batch if item[0].job_id not in free],
        )

    def _settle_nothing(self, connection: Connection, _: list[Settlement]) -> None:
        """Let the statements be built and planned before a first job waits for it."""
        attempts = Attempts(connection, self._identity.worker_id)
        attempts.settle_succeeded([])
        attempts.settle([])

    def _settle_plain(self, connection: Connection, batch: list[Settlement]) -> None:
        # Ascending ids everywhere: two settles in opposite orders would deadlock.
        successes = sorted((claimed for claimed, _ in batch), key=attrgetter("job_id"))
        job_outcomes = Attempts(connection, self._identity.worker_id).settle_succeeded(successes)
        if job_outcomes is None:
            self._ledger.succeeded(batch)
        else:
            self._ledger.settled(batch, job_outcomes)

    def _settle_deleted(self, connection: Connection, batch: list[Settlement]) -> None:
        """Delete jobs that are not kept, and settle those that cannot be deleted.

        A job cannot be deleted if its cancel was requested, or if a row of the application refers
        to it.  If the database refuses a batch, its jobs are tried one by one.
        """
        successes = sorted((claimed for claimed, _ in batch), key=attrgetter("job_id"))
        attempts = Attempts(connection, self._identity.worker_id)
        deleted: set[int] = set()
        refused = (IntegrityError,) if len(batch) == 1 else ()
        with suppress(*refused):
            deleted = set(attempts.delete_succeeded(successes))
        if gone := [item for item in batch if item[0].job_id in deleted]:
            self._ledger.succeeded(gone)
        if left := [item for item in batch if item[0].job_id not in deleted]:
            self._settle_others(connection, left)

    def _settle_others(self, connection: Connection, batch: list[Settlement]) -> None:
        settled = Attempts(connection, self._identity.worker_id).settle(batch)
        self._ledger.settled(batch, settled)


def _parts(batch: list[Settlement], size: int) -> list[list[Settlement]]:
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _keeps_due_time(outcome: Outcome) -> bool:
    """Whether the next message keeps the time of the last, and so is behind the cursors."""
    if isinstance(outcome, Retried):
        return outcome.delay is None
    return isinstance(outcome, Released | Interrupted)


def _named(batch: list[Settlement]) -> str:
    """The ids of the first few jobs."""
    more = len(batch) - MAX_NAMED
    ids = ", ".join(str(claimed.job_id) for claimed, _ in batch[:MAX_NAMED])
    return f"{ids} and {more} more" if more > 0 else ids


def _bare(outcome: Outcome) -> Outcome:
    """The outcome without its details, such as the result or the error's text."""
    if isinstance(outcome, Succeeded):
        return replace(outcome, result=unkept_result("the database refused it"))
    if isinstance(outcome, Retried | Failed | Unreadable):
        return replace(outcome, error=ErrorReport(outcome.error.type, "not storable", ""))
    return Cancelled("") if isinstance(outcome, Cancelled) else outcome
