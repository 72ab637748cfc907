"""One attempt in this thread, in a transaction that is not the worker's.

A transactional handler gets a savepoint, where a worker would give it a transaction.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, NestedTransaction
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from pgqueue import execution
from pgqueue.context import Finishing as AnyFinishing
from pgqueue.context import Progress, nothing_around
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.unit_of_work import (
    TransactionEnded,
    release_savepoints,
    server_error,
    undo_savepoints,
)
from pgqueue.errors import ArgumentsError, AttemptFailed
from pgqueue.execution import CancelWins, Stale
from pgqueue.execution.ended import WORDS
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
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.settle import Attempts, Settled
from pgqueue.repository.tables import CRASHED
from pgqueue.repository.transactions import CHECK_CONSTRAINTS
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.finishing import Finishing
from pgqueue.worker.ledger import STALE
from pgqueue.worker.progress import row_of_progress
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.transactional_attempt import FAILURES, AttemptTransaction, run_in_transaction
from pgqueue.worker.until_empty import HandlerErrors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that has run; without an outcome if its lease had passed on."""

    claimed: Claimed
    outcome: Outcome | None
    error: BaseException | None

    @property
    def word(self) -> str:
        return STALE if self.outcome is None else WORDS[type(self.outcome)]


def raise_error(ended: Ended) -> None:
    """Raise the error of a handler as it is, and AttemptFailed if there is none to raise."""
    if ended.error is not None:
        raise ended.error
    match ended.outcome:
        case Failed(error, end) | Retried(_, error, end) if end is not AttemptEnd.DISCARDED:
            raise AttemptFailed(f"{_named(ended.claimed)}: {error.type}: {error.message}")
        case Unreadable(error):
            raise AttemptFailed(f"{_named(ended.claimed)} was not started: {error.message}")
        case Exhausted():
            raise AttemptFailed(f"{_named(ended.claimed)} was not started: {CRASHED}")


class SavepointTransaction(AttemptTransaction):
    """A savepoint of the test's transaction."""

    is_lost = False
    error: Exception | None = None
    """What has failed at the settle."""
    outcome: Outcome | None = None
    """How the attempt was settled in this transaction."""

    def __init__(self, connection: Connection, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connection = connection
        self._outer: NestedTransaction | None = None

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        self._outer = self._connection.get_nested_transaction()
        try:
            yield self._connection
        finally:
            self.run.forget_session()
            undo_savepoints(self._connection, outer=self._outer)

    def begin(self, connection: Connection) -> None:
        connection.begin_nested()

    def end_handler(self, connection: Connection) -> None:
        if connection.get_nested_transaction() is self._outer:
            raise TransactionEnded("by the handler")
        connection.exec_driver_sql(CHECK_CONSTRAINTS)

    def commit_writes(self, connection: Connection) -> None:
        release_savepoints(connection, outer=self._outer)

    def settled(self, outcome: Outcome, settled: Settled) -> None:
        self.outcome = outcome

    def failed(self, error: Exception) -> Outcome:
        self.error = server_error(error)
        return super().failed(error)

    def call_listeners(self) -> None:
        session = self.run.session
        if session is not None and (listeners := listeners_to_commit(session)):
            with self.around(self.run.context(session)):
                for listener in listeners:
                    listener(session)

    def wait_for(self, running: Coroutine[Any, Any, T]) -> T:
        if self._connection.dialect.is_async:
            return await_only(running)  # in the greenlet of ``run_sync``, on the test's own loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_alone(running)
        running.close()
        raise ArgumentsError(
            f"{_named(self.run.claimed)} is async and cannot run here, inside of an event loop: "
            "with an AsyncSession, `await session.run_sync(run_jobs)`; or make the test a plain "
            "function"
        )


class InlineAttempt(RunningAttempt):
    """One attempt: its handler, its settle, its progress.

    What the handler writes through its injected Session is in a savepoint.  What it commits through
    other Sessions stays if the handler fails, as in a worker.
    """

    def __init__(
        self,
        connection: Connection,
        claimed: Claimed,
        task: Task[..., Any],
        *,
        worker_id: UUID,
        sessions: sessionmaker[Session],
        layers: Sequence[Any],
        is_kept: bool,
    ) -> None:
        super().__init__(claimed, task, worker_id=worker_id, stopping=Event())
        self._connection = connection
        self._outer = connection.get_nested_transaction()
        self._errors = HandlerErrors()
        layers = [self._errors.around(nothing_around), *layers]
        self._new_transaction = partial(
            SavepointTransaction,
            connection,
            self,
            sessions,
            around=around_handlers(layers),
            around_async=around_async_handlers(layers),
            is_kept=is_kept,
        )
        self._transaction = self._new_transaction()
        self._obstacle: Outcome | None = None
        self._progress: Progress | None = None

    def ask_before_start(self, attempts: Attempts) -> None:
        """Ask the database whether the handler may start, as the options of its task demand.

        Call it outside of the savepoint: as in a worker, a failed attempt does not take its key
        back.
        """
        if self.claimed.attempt <= self.claimed.max_attempts:
            self._obstacle = execution.obstacle(
                self.task, attempts, self.claimed, in_own_transaction=False
            )

    def run(self, *, is_lost: bool = False) -> Ended:
        """Run the handler and settle.

        ``is_lost``: the outcome is dropped, and the writes of a transactional handler are undone.
        """
        self._transaction.is_lost = is_lost
        try:
            outcome = self._run_handler()
            if self.is_settled:
                outcome = Succeeded()
            elif outcome is None:
                outcome = self._transaction.outcome
            elif not is_lost:
                outcome = self.settle(outcome)
        except Stale:
            outcome = None
        finally:
            running_job.set(None)  # this thread goes on with the code of the test
            undo_savepoints(self._connection, outer=self._outer)
        if self._progress is not None:  # whatever has become of the handler's writes
            row = row_of_progress(self.task, self.claimed, self.worker_id, self._progress)
            Jobs(self._connection).write_progress([row])
        return Ended(self.claimed, outcome, self._transaction.error or self._errors.take_first())

    def _run_handler(self) -> Outcome | None:
        """Run the handler, if it may start; None if nothing is left to settle."""
        task, claimed, transaction = self.task, self.claimed, self._transaction
        if claimed.attempt > claimed.max_attempts:
            return Exhausted()
        if self._obstacle is not None:
            return self._obstacle
        if task.is_transactional:
            try:
                return run_in_transaction(transaction)
            except CancelWins:
                return Cancelled("")
        context = self.context(finishing=self._own_finishing)
        if task.is_async:
            around = transaction.around_async
            outcome = transaction.wait_for(
                execution.run_async(task, claimed, context, around=around)
            )
        else:
            outcome = execution.run(task, claimed, context, around=transaction.around)
        if not outcome.keeps_writes:
            undo_savepoints(self._connection, outer=self._outer)
        return outcome

    def settle(self, outcome: Outcome) -> Outcome:
        """Settle the attempt, as a settler does; raises Stale.  Returns how it was settled."""
        try:
            with self._connection.begin_nested():  # the result may be impossible to store
                self._transaction.complete(self._connection, outcome)
            release_savepoints(self._connection, outer=self._outer)
            return outcome
        except CancelWins:
            outcome = Cancelled("")
        except FAILURES as error:
            outcome = self._transaction.failed(error)
        undo_savepoints(self._connection, outer=self._outer)
        self._transaction.complete(self._connection, outcome)
        return outcome

    def report(self, progress: Progress) -> None:
        self._progress = progress

    def _own_finishing(self) -> AnyFinishing:
        if self.finishing is None:
            self.finishing = Finishing(self._new_transaction())
        return self.finishing


def _named(claimed: Claimed) -> str:
    return f"job {claimed.job_id} {claimed.task}: attempt {claimed.attempt}"
