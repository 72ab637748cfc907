"""``ctx.finish()``: a handler ends its job in a transaction that it begins itself.

As for a transactional handler, the settle runs in the transaction, right before its COMMIT.  If the
lease has passed on meanwhile, the settle finds no row and the transaction is rolled back.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import execution
from pgqueue.errors import LeaseLost, PgQueueError
from pgqueue.execution import CancelWins, Stale
from pgqueue.execution.error_reports import storable_result
from pgqueue.outcomes import Cancel, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.repository.transactions import AFTER_HANDLER
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session
from pgqueue.tasks import Task
from pgqueue.unit_of_work import CommitUnknown, commit, set_now, write_pending
from pgqueue.worker.handler_sessions import call_listeners, session_for_handler

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession


class Finishing(ABC):
    """The end of one job.  Where its handler runs decides which transaction that is: a subclass
    for the threads of a worker, one for the tests of an application."""

    def __init__(
        self,
        task: Task[..., Any],
        claimed: Claimed,
        *,
        worker_id: UUID,
        sessions: sessionmaker[Session],
        is_kept: bool,
    ) -> None:
        """``is_kept``: whether the job's row stays if it has succeeded."""
        self.is_done = False
        self.task = task
        self.claimed = claimed
        self.worker_id = worker_id
        self._sessions = sessions
        self._is_kept = is_kept
        self._is_open = False

    @contextmanager
    def begin(self, result: Any) -> Iterator[Session]:
        """Open a transaction whose commit, at the end of the block, also ends the job."""
        self._refuse(is_async=False)
        outcome = Succeeded(storable_result(result))
        with (
            self._opened(),
            self._transaction() as connection,
            session_for_handler(
                joined_session, self._sessions, connection, begin_again=self._begin
            ) as session,
        ):
            try:
                yield session
                self._end(connection, session, outcome)
            finally:
                session.close()

    @asynccontextmanager
    async def begin_async(self, result: Any) -> "AsyncIterator[AsyncSession]":
        """Like :meth:`begin` on an event loop, with an AsyncSession."""
        self._refuse(is_async=True)
        outcome = Succeeded(storable_result(result))
        joined, begin = async_sessions.joined_session, self._begin
        with self._opened():
            async with self._async_transaction() as connection:
                sync: Any = getattr(connection, "sync_connection", connection)
                with session_for_handler(
                    joined, self._sessions, connection, begin_again=begin
                ) as session:
                    try:
                        yield session
                        await session.run_sync(lambda own: self._end(sync, own, outcome))
                    finally:
                        await async_sessions.close(session)

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Connection]:
        """A transaction that has begun, and that is rolled back after an error in the block."""

    def _async_transaction(self) -> "AbstractAsyncContextManager[AsyncConnection | Connection]":
        """The same for async handlers."""
        raise NotImplementedError

    @abstractmethod
    def _begin(self, connection: Connection) -> None:
        """Begin again after a rollback by the handler's Session."""

    def _was_committed(self) -> bool:
        """Ask the database after a COMMIT without an answer; only where a COMMIT is sent."""
        raise NotImplementedError("the inline worker of a test sends no COMMIT")

    @property
    def _is_lost(self) -> bool:
        """Whether it is known already that the lease has passed on."""
        return False

    def _done(self, outcome: Succeeded) -> None:
        """Note the end of the job; the handler may go on."""
        self.is_done = True

    def _end(self, connection: Connection, session: Session, outcome: Succeeded) -> None:
        """Write what is pending, settle and commit.

        Raises LeaseLost or Cancel, and the transaction is rolled back.
        """
        write_pending(session)
        try:
            if self._is_lost:
                raise Stale
            self._settle(connection, outcome)
        except Stale as error:
            raise LeaseLost(
                f"{self._where}: this attempt has lost its job, which another worker may run now, "
                "so nothing was committed; end the handler"
            ) from error
        except CancelWins as error:
            raise Cancel from error
        self._commit(connection)
        self._done(outcome)
        call_listeners(self.claimed.job_id, session)

    def _settle(self, connection: Connection, outcome: Succeeded) -> None:
        set_now(connection, AFTER_HANDLER)
        self._complete(connection, outcome)

    def _complete(self, connection: Connection, outcome: Succeeded) -> None:
        attempts = Attempts(connection, self.worker_id)
        is_kept = self._is_kept
        execution.complete(attempts, self.claimed, outcome, is_kept=is_kept)

    def _commit(self, connection: Connection) -> None:
        try:
            commit(connection)
        except CommitUnknown as error:
            if not self._was_committed():
                raise ConnectionError(
                    f"{self._where}: the connection broke during COMMIT, which was not carried out"
                ) from error

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _refuse(self, *, is_async: bool) -> None:
        if self.task.is_async and not is_async:
            raise PgQueueError(
                f"{self._where}: ctx.finish() would block the event loop that all async handlers "
                "share; write `async with ctx.finish_async() as session:`"
            )
        if is_async and not self.task.is_async:
            raise PgQueueError(
                f"{self._where}: ctx.finish_async() is for async handlers; "
                "write `with ctx.finish() as session:`"
            )
        if self._is_open or self.is_done:
            state = "has ended already" if self.is_done else "is inside a block of ctx.finish()"
            raise PgQueueError(f"{self._where}: the job {state}; call ctx.finish() once")

    @property
    def _where(self) -> str:
        return f"job {self.claimed.job_id} {self.task.name}"
