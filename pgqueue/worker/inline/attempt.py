"""One attempt in this thread, in a transaction that is not the worker's.

A transactional handler gets a savepoint, where a worker would give it a transaction.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from pgqueue import execution
from pgqueue.context import JobContext, Progress, nothing_around
from pgqueue.errors import ArgumentsError, AttemptFailed
from pgqueue.execution import AttemptResult, CancelWins, Stale
from pgqueue.execution.ended import WORDS
from pgqueue.meta import read_meta
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
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import CRASHED
from pgqueue.repository.transactions import CHECK_CONSTRAINTS
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session, listeners_to_commit
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job
from pgqueue.unit_of_work import (
    TransactionEnded,
    begin_now,
    release_savepoints,
    server_error,
    undo_savepoints,
    write_pending,
)
from pgqueue.worker.buffer import STALE
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.handler_sessions import session_for_handler
from pgqueue.worker.inline.finishing import InlineFinishing
from pgqueue.worker.progress import row_of_progress
from pgqueue.worker.until_empty import HandlerErrors

T = TypeVar("T")
Joined = TypeVar("Joined")

FAILURES = (TransactionEnded, DBAPIError, InvalidRequestError)
"""Raised at the settle for what a handler has left: a deferred constraint, an ended savepoint."""


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


class InlineAttempt:
    """One attempt: its savepoint, its handler, its settle.

    What the handler writes through its injected Session is in the savepoint.  What it commits
    through other Sessions stays if the handler fails, as in a worker.
    """

    def __init__(
        self,
        connection: Connection,
        task: Task[..., Any],
        claimed: Claimed,
        *,
        worker_id: UUID,
        sessions: sessionmaker[Session],
        layers: Sequence[Any],
        is_kept: bool,
    ) -> None:
        self.task = task
        self.claimed = claimed
        self._connection = connection
        self._worker_id = worker_id
        self._sessions = sessions
        self._is_kept = is_kept
        self._errors = HandlerErrors()
        layers = [self._errors.around(nothing_around), *layers]
        self._around = around_handlers(layers)
        self._around_async = around_async_handlers(layers)
        self._outer = connection.get_nested_transaction()
        self._session: Session | None = None
        self._progress: Progress | None = None
        self._finishing = InlineFinishing(
            connection, task, claimed, worker_id=worker_id, sessions=sessions, is_kept=is_kept
        )
        self._obstacle: Outcome | None = None

    def begin(self, attempts: Attempts) -> None:
        """Ask the database whether the handler may start, as the options of its task demand.

        Call it outside of the savepoint: as in a worker, a failed attempt does not take its key
        back.
        """
        claimed = self.claimed
        if claimed.attempt <= claimed.max_attempts:
            self._obstacle = execution.obstacle(
                self.task, attempts, claimed, in_own_transaction=False
            )

    def run(
        self,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        instead: Callable[[Outcome], Outcome] | None = None,
    ) -> Ended:
        """Run the handler and settle; ``instead`` replaces the outcome and undoes the writes."""
        with self.savepoint():
            verdict = self.verdict(is_cancelled)
            if self._finishing.is_done:
                return Ended(self.claimed, Succeeded(), self._errors.take_first())
            if instead is not None:
                verdict = AttemptResult(instead(verdict.outcome), keeps_writes=False)
            return self._settle(verdict)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """The savepoint that a transactional handler's Session joins; undone if not released."""
        if self.task.is_transactional:
            self._connection.begin_nested()
        try:
            yield
        finally:
            running_job.set(None)  # this thread goes on with the code of the test
            self._undo()
        self._write_progress()

    def verdict(self, is_cancelled: Callable[[], bool]) -> AttemptResult:
        """Run the handler, if it may start."""
        if self.claimed.attempt > self.claimed.max_attempts:
            return AttemptResult(Exhausted(), keeps_writes=False)
        if self._obstacle is not None:
            return AttemptResult(self._obstacle, keeps_writes=False)
        if self.task.is_async:
            return self._wait_for(self._verdict_async(is_cancelled))
        if not self.task.is_transactional:
            return self._run(self._context(None, is_cancelled))
        with self._joined(joined_session) as session:
            self._session = session
            context = self._context(session, is_cancelled)
            return self._run(context, write_pending=partial(write_pending, session))

    async def _verdict_async(self, is_cancelled: Callable[[], bool]) -> AttemptResult:
        if not self.task.is_transactional:
            return await self._run_async(self._context(None, is_cancelled))
        with self._joined(async_sessions.joined_session) as session:
            self._session = session.sync_session
            context = self._context(session, is_cancelled)
            write = partial(session.run_sync, write_pending)
            return await self._run_async(context, write_pending=write)

    def _joined(self, join: Callable[..., Joined]) -> AbstractContextManager[Joined]:
        return session_for_handler(join, self._sessions, self._connection, begin_again=begin_now)

    def _run(self, context: JobContext, **options: Any) -> AttemptResult:
        return execution.run(self.task, self.claimed, context, around=self._around, **options)

    async def _run_async(self, context: JobContext, **options: Any) -> AttemptResult:
        around = self._around_async
        return await execution.run_async(self.task, self.claimed, context, around=around, **options)

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._connection.dialect.is_async:
            return await_only(coroutine)  # in the greenlet of ``run_sync``, on the test's own loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_alone(coroutine)
        coroutine.close()
        raise ArgumentsError(
            f"{_named(self.claimed)} is async and cannot run here, inside of an event loop: with "
            "an AsyncSession, `await session.run_sync(run_jobs)`; or make the test a plain function"
        )

    def _context(self, session: Any, is_cancelled: Callable[[], bool]) -> JobContext:
        claimed = self.claimed
        return JobContext(
            job_id=claimed.job_id,
            attempt=claimed.attempt,
            max_attempts=claimed.max_attempts,
            queue=claimed.queue,
            task=claimed.task,
            session=session,
            meta=read_meta(claimed.meta),
            cancelled=is_cancelled,
            reporting=self._keep_progress,
            finishing=lambda: self._finishing,
        )

    def _keep_progress(self, progress: Progress) -> None:
        self._progress = progress

    def _write_progress(self) -> None:
        """Write the last progress, whatever has become of the handler's writes."""
        progress, self._progress = self._progress, None
        if progress is not None:
            row = row_of_progress(self.task, self.claimed, self._worker_id, progress)
            Jobs(self._connection).write_progress([row])

    def _settle(self, verdict: AttemptResult) -> Ended:
        """Settle; undo the handler's writes if the attempt failed, was cancelled or is stale."""
        outcome, error = verdict.outcome, self._errors.take_first()
        if verdict.keeps_writes:
            try:
                self._settle_with_writes(outcome)
            except CancelWins:
                outcome = Cancelled("")
            except Stale:
                return Ended(self.claimed, None, None)
            except FAILURES as failure:
                error = server_error(failure)
                outcome = execution.after_error(self.task, self.claimed, error)
            else:
                self._call_listeners()
                return Ended(self.claimed, outcome, None)
        self._undo()
        return Ended(self.claimed, self._settle_finally(outcome), error)

    def _settle_with_writes(self, outcome: Outcome) -> None:
        if self.task.is_transactional:
            if self._connection.get_nested_transaction() is self._outer:
                raise TransactionEnded("by the handler")
            self._connection.exec_driver_sql(CHECK_CONSTRAINTS)
        with self._connection.begin_nested():  # the result may be impossible to store
            self._complete(outcome)
        release_savepoints(self._connection, outer=self._outer)

    def _settle_finally(self, outcome: Outcome) -> Outcome | None:
        """Settle when no write is left to undo."""
        try:
            self._complete(outcome)
        except CancelWins:
            return Cancelled("")
        except Stale:
            return None
        return outcome

    def _complete(self, outcome: Outcome) -> None:
        attempts, is_kept = Attempts(self._connection, self._worker_id), self._is_kept
        execution.complete(attempts, self.claimed, outcome, is_kept=is_kept)

    def _call_listeners(self) -> None:
        """Call the commit listeners of the handler's Session."""
        session = self._session
        if session is not None and (listeners := listeners_to_commit(session)):
            with self._around(self._context(session, lambda: False)):
                for listener in listeners:
                    listener(session)

    def _undo(self) -> None:
        """Close the handler's Session, and roll back what the attempt has not released."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        undo_savepoints(self._connection, outer=self._outer)


def _named(claimed: Claimed) -> str:
    return f"job {claimed.job_id} {claimed.task}: attempt {claimed.attempt}"
