"""One attempt in the thread of a test, in a transaction that is not the worker's.

A transactional handler gets a savepoint, where a worker would give it a transaction.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.context import Around, Progress, nothing_around
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.unit_of_work import (
    TransactionEnded,
    release_savepoints,
    server_error,
    undo_savepoints,
)
from pgqueue.errors import ArgumentsError, AttemptFailed
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call
from pgqueue.handler.outcome import after_error, obstacle
from pgqueue.handler.run import run_async_attempt, run_attempt
from pgqueue.handler.transaction import (
    FAILURES,
    AttemptTransaction,
    CancelWins,
    LeasePassedOn,
    settle_in_transaction,
)
from pgqueue.middleware import around_async_handlers, around_handlers
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    Exhausted,
    Failed,
    Outcome,
    Retried,
    Succeeded,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.progress import ProgressReports
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import CRASHED
from pgqueue.repository.transactions import CHECK_CONSTRAINTS
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.progress import row_of_progress
from pgqueue.worker.until_empty import HandlerErrors


class InlineAttempt(RunningAttempt):
    """One attempt, and the slot that runs it: its handler, its settle, its progress.

    What the handler writes through its injected Session is in a savepoint.  What it commits through
    other Sessions stays if the handler fails, as in a worker.
    """

    outcome: Outcome | None = None
    """How it was settled; None if its lease had passed on."""
    is_dropped = False
    """Whether its outcome is dropped, and what a transactional handler writes."""

    def __init__(
        self,
        connection: Connection,
        claimed: Claimed,
        task: Task[..., Any],
        *,
        worker_id: UUID,
        resources: Mapping[Any, Any],
        sessions: sessionmaker[Session],
        layers: Sequence[Any],
        around_finish: Around,
        application: str,
        is_kept: bool,
    ) -> None:
        super().__init__(claimed, task, worker_id=worker_id, stopping=Event(), resources=resources)
        self.connection = connection
        self.outer = connection.get_nested_transaction()
        self._sessions = sessions
        self._is_kept = is_kept
        self._errors = HandlerErrors()
        self._error: Exception | None = None
        """What has failed at the settle."""
        layers = [self._errors.around(nothing_around), *layers]
        self.around = around_handlers(layers)
        self.around_async = around_async_handlers(layers)
        self.around_finish = around_finish
        self.application = application
        self._attempts = Attempts(connection, worker_id)
        self._progress: Progress | None = None
        # Asked outside of the savepoint: as in a worker, a failed attempt does not take its key
        # back.
        self._obstacle = obstacle(task, self._attempts, claimed, in_own_transaction=False)

    def run(self, *, is_dropped: bool = False) -> None:
        """Run the handler and settle, unless the outcome ``is_dropped``."""
        self.is_dropped = is_dropped
        try:
            outcome = self._run_handler()
            if outcome is not None and not outcome.keeps_writes:
                undo_savepoints(self.connection, outer=self.outer)
            if self.is_settled:
                self.outcome = Succeeded()
            elif outcome is not None and not is_dropped:
                self.settle(outcome)
        except LeasePassedOn:
            pass
        finally:
            running_job.set(None)  # this thread goes on with the code of the test
            undo_savepoints(self.connection, outer=self.outer)
        if self._progress is not None:  # whatever has become of the handler's writes
            row = row_of_progress(self.task, self.claimed, self.worker_id, self._progress)
            ProgressReports(self.connection).write([row])

    def settle(self, outcome: Outcome) -> None:
        """Settle the attempt, as a settler does; raises LeasePassedOn."""
        try:
            with self.connection.begin_nested():  # the result may be impossible to store
                self._write(outcome)
            release_savepoints(self.connection, outer=self.outer)
            return
        except CancelWins:
            outcome = Cancelled("")
        except FAILURES as error:
            outcome = self._after_failure(error)
        undo_savepoints(self.connection, outer=self.outer)
        self._write(outcome)

    def raise_error(self) -> None:
        """Raise the error of the handler as it is, and AttemptFailed if there is none to raise."""
        error = self._error or self._errors.take_first()
        if error is not None:
            raise error
        match self.outcome:
            case Failed(report, end) | Retried(_, report, end) if end is not AttemptEnd.DISCARDED:
                raise AttemptFailed(f"{self._name}: {report.type}: {report.message}")
            case Unreadable(report):
                raise AttemptFailed(f"{self._name} was not started: {report.message}")
            case Exhausted():
                raise AttemptFailed(f"{self._name} was not started: {CRASHED}")

    def report(self, progress: Progress) -> None:
        self._progress = progress

    def ask_before_start(self, _attempt: RunningAttempt) -> Outcome | None:
        return self._obstacle

    def run_in_child(self, _attempt: RunningAttempt) -> Outcome:
        """In this thread: a child process would not see the transaction of the test."""
        return call(self.task, self.claimed, self.context(), around=self.around)

    def transaction(self, _attempt: RunningAttempt) -> AttemptTransaction:
        return SavepointTransaction(self, self._sessions, is_kept=self._is_kept)

    def _run_handler(self) -> Outcome | None:
        """Run the handler, if it may start; None if nothing is left to settle."""
        # With an async connection, in the greenlet of ``run_sync``, on the test's own loop.
        needs_loop = self.task.is_async and not self.connection.dialect.is_async
        if needs_loop and asyncio._get_running_loop() is not None:
            raise ArgumentsError(
                f"{self._name} is async and cannot run here, inside of an event loop: with an "
                "AsyncSession, `await session.run_sync(run_jobs)`; or make the test a plain "
                "function"
            )
        try:
            if needs_loop:
                return run_alone(run_async_attempt(self, self))
            return run_attempt(self, self)
        except FAILURES as error:
            if not self.has_begun:
                raise
            return self._after_failure(error)

    def _after_failure(self, error: Exception) -> Outcome:
        """The outcome after an error at the settle."""
        self._error = server_error(error)
        return after_error(self.task, self.claimed, self._error)

    def _write(self, outcome: Outcome) -> None:
        settle_in_transaction(self._attempts, self.claimed, outcome, is_kept=self._is_kept)
        self.outcome = outcome

    @property
    def _name(self) -> str:
        claimed = self.claimed
        return f"job {claimed.job_id} {claimed.task}: attempt {claimed.attempt}"


class SavepointTransaction(AttemptTransaction):
    """A savepoint of the test's transaction."""

    attempt: InlineAttempt

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        connection = self.attempt.connection
        self._outer = connection.get_nested_transaction()
        try:
            yield connection
        finally:
            self.attempt.forget_session()
            undo_savepoints(connection, outer=self._outer)

    def begin(self, connection: Connection) -> None:
        connection.begin_nested()

    def end_handler(self, connection: Connection, *, is_plain_success: bool = False) -> None:
        if self.attempt.is_dropped and self.attempt.task.is_transactional:
            raise LeasePassedOn  # but what ctx.finish() has committed stays
        if connection.get_nested_transaction() is self._outer:
            raise TransactionEnded("by the handler")
        connection.exec_driver_sql(CHECK_CONSTRAINTS)

    def commit_writes(self, connection: Connection) -> None:
        release_savepoints(connection, outer=self._outer)

    def note_settled(self, outcome: Outcome, job_outcome: str | None) -> None:
        self.attempt.outcome = outcome

    def call_listeners(self, session: Session) -> None:
        """Call them inside what is around the handler; their errors are those of the test."""
        if listeners := listeners_to_commit(session):
            with self.attempt.around(self.attempt.context(session)):
                for listener in listeners:
                    listener(session)
