"""One attempt of a transactional handler, from its connection to its COMMIT.

A transactional handler has one COMMIT for its writes, the jobs it enqueues and its outcome.  The
settle runs inside the handler's transaction, right before its COMMIT.  If the lease has passed on
meanwhile, the settle finds no row and all writes of the handler are rolled back.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from pgqueue import execution
from pgqueue.context import Around
from pgqueue.execution import Replay
from pgqueue.middleware import AsyncAround
from pgqueue.outcomes import Outcome
from pgqueue.repository import Attempts, Settled
from pgqueue.unit_of_work import TransactionEnded, server_error, write_pending
from pgqueue.worker.handler_sessions import session_for_handler
from pgqueue.worker.running_attempt import RunningAttempt


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

    @abstractmethod
    def is_replayed(self, error: BaseException) -> bool:
        """Whether after this error the transaction may succeed if it begins again."""

    @abstractmethod
    def prepare_replay(self, connection: Connection, error: BaseException | None) -> None:
        """End the failed transaction before the next begins; raises Stale or CancelWins."""

    def settle(self, connection: Connection, outcome: Outcome) -> Settled:
        """Settle the attempt; raises Stale, CancelWins or TransactionEnded."""
        self.end_handler(connection)
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
                with session_for_handler(
                    transaction.sessions,
                    connection,
                    is_async=task.is_async,
                    begin_again=transaction.begin,
                ) as session:
                    run.session = getattr(session, "sync_session", session)
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
                        result = await_only(running)
                    else:
                        result = execution.run(
                            task,
                            claimed,
                            context,
                            around=transaction.around,
                            write_pending=partial(write_pending, session),
                            is_replayed=transaction.is_replayed,
                        )
                    if not result.keeps_writes or run.session.in_transaction():
                        run.forget_session()  # else it stays open: listeners may read attributes
                if not result.keeps_writes:
                    return result.outcome
                if run.is_lost:
                    return None  # another thread settles the attempt
                try:
                    settled = transaction.settle(connection, result.outcome)
                    transaction.commit_writes(connection)
                except (DBAPIError, TransactionEnded) as error:
                    if transaction.is_replayed(error):
                        raise Replay from error
                    return execution.after_error(task, claimed, server_error(error))
            except Replay as replay:
                transaction.prepare_replay(connection, replay.__cause__)
                continue
            transaction.settled(result.outcome, settled)
            transaction.call_listeners()
            return None
