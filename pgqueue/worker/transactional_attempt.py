"""One attempt of a transactional handler, from its connection to its COMMIT.

A transactional handler has one COMMIT for its writes, the jobs it enqueues and its outcome.  The
settle runs inside the handler's transaction, right before its COMMIT.  If the lease has passed on
meanwhile, the settle finds no row and all writes of the handler are rolled back.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from pgqueue import execution
from pgqueue.context import Around
from pgqueue.database.async_sessions import joined_session as joined_async_session
from pgqueue.database.handlers import joined_session, options_of
from pgqueue.database.unit_of_work import TransactionEnded, server_error, write_pending
from pgqueue.execution import Replay
from pgqueue.middleware import AsyncAround
from pgqueue.outcomes import Outcome
from pgqueue.repository.settle import Attempts, Settled
from pgqueue.tasks.delaying import handler_session
from pgqueue.worker.running_attempt import RunningAttempt

T = TypeVar("T")

FAILURES = (TransactionEnded, DBAPIError, InvalidRequestError)
"""Raised at the settle for what a handler has left: a deferred constraint, an ended savepoint."""


class AttemptTransaction(ABC):
    """The transaction in which a handler writes and its job is settled."""

    def __init__(
        self,
        run: RunningAttempt,
        sessions: sessionmaker[Session],
        *,
        around: Around,
        around_async: AsyncAround,
        is_kept: bool,
    ) -> None:
        """``is_kept``: whether the job's row stays if it has succeeded."""
        self.run = run
        self.sessions = sessions
        self.around = around
        self.around_async = around_async
        self.is_kept = is_kept

    @abstractmethod
    def connection(self) -> AbstractContextManager[Connection]:
        """A connection for the transaction; what is not committed at the end is rolled back.

        For an async handler it is used in a greenlet, in which ``await_only`` can be called.
        """

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin it; also begin it again after a rollback by the handler's Session."""

    @abstractmethod
    def end_handler(self, connection: Connection) -> None:
        """Prepare for the settle; raises TransactionEnded if the handler has ended it."""

    @abstractmethod
    def commit_writes(self, connection: Connection) -> None: ...

    @abstractmethod
    def settled(self, outcome: Outcome, settled: Settled) -> None:
        """Note that the attempt is settled and committed."""

    @abstractmethod
    def call_listeners(self) -> None:
        """Call the ``after_commit`` listeners of the handler's Session."""

    @contextmanager
    def session(self, connection: Connection) -> Iterator[tuple[Any, Session]]:
        """Join the handler's Session, or AsyncSession, to the transaction, with the options of the
        application's engine, and let ``delay()`` know of it.

        Yields it, and the Session itself, which is ``run.session`` until :meth:`connection` ends.
        """
        join = joined_async_session if self.run.task.is_async else joined_session
        with options_of(self.sessions.kw["bind"], connection):
            session: Any = join(self.sessions, connection, begin_again=self.begin)
            own = self.run.session = getattr(session, "sync_session", session)
            handler_session.set(own)
            try:
                yield session, own
            finally:
                handler_session.set(None)

    @property
    def is_lost(self) -> bool:
        """Whether it is known already that another thread or worker settles the attempt."""
        return self.run.is_lost

    def wait_for(self, running: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine of an async handler."""
        return await_only(running)

    def is_replayed(self, error: BaseException) -> bool:
        """Whether after this error the transaction may succeed if it begins again."""
        return False

    def prepare_replay(self, connection: Connection, error: BaseException | None) -> None:
        """End the failed transaction before the next begins; raises Stale or CancelWins."""
        raise NotImplementedError("is_replayed() is never true here")

    def was_committed(self) -> bool:
        """Ask the database after a COMMIT without an answer; only where a COMMIT is sent."""
        raise NotImplementedError("the inline worker of a test sends no COMMIT")

    def failed(self, error: Exception) -> Outcome:
        """The outcome after an error at the settle or the COMMIT."""
        return execution.after_error(self.run.task, self.run.claimed, server_error(error))

    def settle(self, connection: Connection, outcome: Outcome) -> Settled:
        """Settle the attempt; raises Stale, CancelWins or TransactionEnded."""
        self.end_handler(connection)
        return self.complete(connection, outcome)

    def complete(self, connection: Connection, outcome: Outcome) -> Settled:
        attempts = Attempts(connection, self.run.worker_id)
        return execution.complete(attempts, self.run.claimed, outcome, is_kept=self.is_kept)


def run_in_transaction(transaction: AttemptTransaction) -> Outcome | None:
    """Run a handler in a transaction and commit it with its outcome.

    Returns an outcome that must still be settled, for which nothing was committed; None if nothing
    is left to settle.  For an async handler, call it by ``greenlet_spawn``.
    """
    run = transaction.run
    task, claimed = run.task, run.claimed
    with transaction.connection() as connection:
        while True:
            transaction.begin(connection)
            try:
                with transaction.session(connection) as (session, own):
                    run.begin()
                    context = run.context(session)
                    if task.is_async:
                        running = execution.run_async(
                            task,
                            claimed,
                            context,
                            around=transaction.around_async,
                            write_pending=partial(session.run_sync, write_pending),
                            is_replayed=transaction.is_replayed,
                        )
                        outcome = transaction.wait_for(running)
                    else:
                        outcome = execution.run(
                            task,
                            claimed,
                            context,
                            around=transaction.around,
                            write_pending=partial(write_pending, session),
                            is_replayed=transaction.is_replayed,
                        )
                    if not outcome.keeps_writes or own.in_transaction():
                        run.forget_session()  # else it stays open: listeners may read attributes
                if not outcome.keeps_writes:
                    return outcome
                if transaction.is_lost:
                    return None  # another thread settles the attempt
                try:
                    settled = transaction.settle(connection, outcome)
                    transaction.commit_writes(connection)
                except FAILURES as error:
                    if transaction.is_replayed(error):
                        raise Replay from error
                    return transaction.failed(error)
            except Replay as replay:
                transaction.prepare_replay(connection, replay.__cause__)
                continue
            transaction.settled(outcome, settled)
            transaction.call_listeners()
            return None
