"""``ctx.finish()``: a handler ends its job in a transaction that it begins itself.

As for a transactional handler, the settle runs in the transaction, right before its COMMIT.  If the
lease has passed on meanwhile, the settle finds no row and the transaction is rolled back.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from pgqueue.database.unit_of_work import CommitUnknown, write_pending
from pgqueue.errors import LeaseLost, PgQueueError
from pgqueue.execution import CancelWins, Stale
from pgqueue.execution.error_reports import storable_result
from pgqueue.outcomes import Cancel, Succeeded
from pgqueue.worker.commit_listeners import call_listeners
from pgqueue.worker.transactional_attempt import AttemptTransaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class Finishing:
    """The end of one job, in a block of its handler."""

    def __init__(self, transaction: AttemptTransaction) -> None:
        self.is_done = False
        self._transaction = transaction
        self._is_open = False

    def begin(self, result: Any) -> AbstractContextManager[Session]:
        """Open a transaction whose commit, at the end of the block, also ends the job."""
        return self._block(result, is_async=False)

    @asynccontextmanager
    async def begin_async(self, result: Any) -> "AsyncIterator[AsyncSession]":
        """Like :meth:`begin` on an event loop, with an AsyncSession."""
        block = self._block(result, is_async=True)
        session = await greenlet_spawn(block.__enter__)
        try:
            yield session
        except BaseException as error:
            await greenlet_spawn(block.__exit__, type(error), error, error.__traceback__)
            raise
        await greenlet_spawn(block.__exit__, None, None, None)

    @contextmanager
    def _block(self, result: Any, *, is_async: bool) -> Iterator[Any]:
        self._refuse(is_async=is_async)
        outcome = Succeeded(storable_result(result))
        transaction, run = self._transaction, self._transaction.run
        self._is_open = True
        try:
            with transaction.connection() as connection:
                transaction.begin(connection)
                with transaction.session(connection) as (session, own):
                    yield session
                    write_pending(own)
                try:
                    if transaction.is_lost:
                        raise Stale
                    settled = transaction.settle(connection, outcome)
                except Stale as error:
                    raise LeaseLost(
                        f"{self._where}: this attempt has lost its job, which another worker may "
                        "run now, so nothing was committed; end the handler"
                    ) from error
                except CancelWins as error:
                    raise Cancel from error
                try:
                    transaction.commit_writes(connection)
                except CommitUnknown as error:
                    if not transaction.was_committed():
                        raise ConnectionError(
                            f"{self._where}: the connection broke during COMMIT, which was not "
                            "carried out"
                        ) from error
                self.is_done = True
                transaction.settled(outcome, settled)
                call_listeners(run.claimed.job_id, own)
        finally:
            self._is_open = False

    def _refuse(self, *, is_async: bool) -> None:
        is_for_loop = self._transaction.run.task.is_async
        if is_for_loop and not is_async:
            raise PgQueueError(
                f"{self._where}: ctx.finish() would block the event loop that all async handlers "
                "share; write `async with ctx.finish_async() as session:`"
            )
        if is_async and not is_for_loop:
            raise PgQueueError(
                f"{self._where}: ctx.finish_async() is for async handlers; "
                "write `with ctx.finish() as session:`"
            )
        if self._is_open or self.is_done:
            state = "has ended already" if self.is_done else "is inside a block of ctx.finish()"
            raise PgQueueError(f"{self._where}: the job {state}; call ctx.finish() once")

    @property
    def _where(self) -> str:
        run = self._transaction.run
        return f"job {run.claimed.job_id} {run.task.name}"
