"""One attempt in this thread, in a transaction that is not the worker's.

A transactional handler gets a savepoint, where a worker would give it a transaction.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from pgqueue import execution
from pgqueue.context import JobContext, nothing_around
from pgqueue.errors import ArgumentsError, AttemptFailed
from pgqueue.execution import AttemptResult, CancelWins, Stale
from pgqueue.meta import read_meta
from pgqueue.middleware import around_async_handlers, around_handlers
from pgqueue.outcomes import AttemptEnd, Cancelled, Exhausted, Failed, Outcome, Retried, Unreadable
from pgqueue.repository import Attempts, Claimed
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session, listeners_to_commit
from pgqueue.statements.tables import CRASHED
from pgqueue.statements.transactions import CHECK_CONSTRAINTS
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job
from pgqueue.unit_of_work import (
    TransactionEnded,
    begin_now,
    release_savepoints,
    told_by_server,
    undo_savepoints,
    write_pending,
)
from pgqueue.worker.buffer import STALE, WORDS
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.handler_errors import HandlerErrors

T = TypeVar("T")

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

    The savepoint decides about what the handler writes through the Session that it is given.
    What the handler commits by other Sessions stays if it fails, as in a worker.
    """

    def __init__(
        self,
        connection: Connection,
        task: Task[..., Any],
        claimed: Claimed,
        *,
        sessions: sessionmaker[Session],
        layers: Sequence[Any],
        is_kept: bool,
    ) -> None:
        self.task = task
        self._connection = connection
        self._claimed = claimed
        self._sessions = sessions
        self._is_kept = is_kept
        self._errors = HandlerErrors()
        layers = [self._errors.around(nothing_around), *layers]
        self._around = around_handlers(layers)
        self._around_async = around_async_handlers(layers)
        self._outer = connection.get_nested_transaction()
        self._session: Session | None = None

    def run(
        self,
        attempts: Attempts,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        instead: Callable[[Outcome], Outcome] | None = None,
    ) -> Ended:
        """Run the handler and settle; ``instead`` replaces the outcome and undoes the writes."""
        with self.savepoint():
            verdict = self.verdict(is_cancelled)
            if instead is not None:
                verdict = AttemptResult(instead(verdict.outcome), keeps_writes=False)
            return self._settle(attempts, verdict)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """The savepoint that a transactional handler's Session joins; undone if it still exists."""
        if self.task.is_transactional:
            self._connection.begin_nested()
        try:
            yield
        finally:
            running_job.set(None)  # this thread goes on with the code of the test
            self._undo()

    def verdict(self, is_cancelled: Callable[[], bool]) -> AttemptResult:
        """Run the handler."""
        if self._claimed.attempt > self._claimed.max_attempts:
            return AttemptResult(Exhausted(), keeps_writes=False)
        if self.task.is_async:
            return self._wait_for(self._verdict_async(is_cancelled))
        session = None
        if self.task.is_transactional:
            session = joined_session(self._sessions, self._connection, begin_again=begin_now)
            self._session = session
        return execution.run(
            self.task,
            self._claimed,
            self._context(session, is_cancelled),
            around=self._around,
            write_pending=None if session is None else lambda: write_pending(session),
        )

    async def _verdict_async(self, is_cancelled: Callable[[], bool]) -> AttemptResult:
        session: Any = None
        if self.task.is_transactional:
            session = async_sessions.joined_session(
                self._sessions, self._connection, begin_again=begin_now
            )
            self._session = session.sync_session
        return await execution.run_async(
            self.task,
            self._claimed,
            self._context(session, is_cancelled),
            around=self._around_async,
            write_pending=None if session is None else lambda: session.run_sync(write_pending),
        )

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._connection.dialect.is_async:
            return await_only(coroutine)  # in the greenlet of ``run_sync``, on the test's own loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_alone(coroutine)
        coroutine.close()
        raise ArgumentsError(
            f"{_named(self._claimed)} is async and cannot run here, inside of an event loop: with "
            "an AsyncSession, `await session.run_sync(run_jobs)`; or make the test a plain function"
        )

    def _context(self, session: Any, is_cancelled: Callable[[], bool]) -> JobContext:
        claimed = self._claimed
        return JobContext(
            job_id=claimed.job_id,
            attempt=claimed.attempt,
            max_attempts=claimed.max_attempts,
            queue=claimed.queue,
            task=claimed.task,
            session=session,
            meta=read_meta(claimed.meta),
            cancelled=is_cancelled,
        )

    def _settle(self, attempts: Attempts, verdict: AttemptResult) -> Ended:
        """Settle; undo the handler's writes if it failed, its job was cancelled or it is stale."""
        outcome, error = verdict.outcome, self._errors.take_first()
        if verdict.keeps_writes:
            try:
                self._settle_with_writes(attempts, outcome)
            except CancelWins:
                outcome = Cancelled("")
            except Stale:
                return Ended(self._claimed, None, None)
            except FAILURES as failure:
                error = told_by_server(failure)
                outcome = execution.after_error(self.task, self._claimed, error)
            else:
                self._tell_listeners()
                return Ended(self._claimed, outcome, None)
        self._undo()
        return Ended(self._claimed, self._settle_finally(attempts, outcome), error)

    def _settle_with_writes(self, attempts: Attempts, outcome: Outcome) -> None:
        if self.task.is_transactional:
            if self._connection.get_nested_transaction() is self._outer:
                raise TransactionEnded("by the handler")
            self._connection.exec_driver_sql(CHECK_CONSTRAINTS)
        with self._connection.begin_nested():  # its result may be impossible to store
            self._complete(attempts, outcome)
        release_savepoints(self._connection, outer=self._outer)

    def _settle_finally(self, attempts: Attempts, outcome: Outcome) -> Outcome | None:
        """Settle when no write is left to undo."""
        try:
            self._complete(attempts, outcome)
        except CancelWins:
            return Cancelled("")
        except Stale:
            return None
        return outcome

    def _complete(self, attempts: Attempts, outcome: Outcome) -> None:
        is_kept = self._is_kept
        execution.complete(attempts, self._claimed, outcome, held=False, is_kept=is_kept)

    def _tell_listeners(self) -> None:
        """Tell those who listen to the handler's Session of a commit."""
        session = self._session
        if session is not None and (listeners := listeners_to_commit(session)):
            with self._around(self._context(session, lambda: False)):
                for listener in listeners:
                    listener(session)

    def _undo(self) -> None:
        """Close the handler's Session and roll back to where the attempt began."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        undo_savepoints(self._connection, outer=self._outer)


def _named(claimed: Claimed) -> str:
    return f"job {claimed.job_id} {claimed.task}: attempt {claimed.attempt}"
