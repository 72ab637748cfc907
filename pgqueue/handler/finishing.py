"""``ctx.finish()``: a handler ends its job in a transaction that it begins itself.

As for a transactional handler, the settle runs in the transaction, right before its COMMIT.  If the
lease has passed on meanwhile, the settle finds no row and the transaction is rolled back.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from pgqueue.context import Around
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.unit_of_work import write_pending
from pgqueue.errors import LeaseLost, PgQueueError
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.outcome import success
from pgqueue.handler.transaction import AttemptTransaction, LeasePassedOn, call_listener

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class AttemptFinishing:
    """The end of one job, in a block of its handler."""

    def __init__(
        self,
        attempt: RunningAttempt,
        new_transaction: Callable[[RunningAttempt], AttemptTransaction],
        around: Around,
    ) -> None:
        """``around``: what a framework puts around the block."""
        self.is_done = False
        self._around = around
        self._attempt = attempt
        self._new_transaction = new_transaction

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
        claimed, task = self._attempt.claimed, self._attempt.task
        where = f"job {claimed.job_id} {task.name}"
        if task.is_async and not is_async:
            raise PgQueueError(
                f"{where}: ctx.finish() would block the event loop that all async handlers share; "
                "write `async with ctx.finish_async() as session:`"
            )
        if is_async and not task.is_async:
            raise PgQueueError(
                f"{where}: ctx.finish_async() is for async handlers; "
                "write `with ctx.finish() as session:`"
            )
        if self.is_done:
            raise PgQueueError(f"{where}: the job has ended already; call ctx.finish() once")
        outcome = success(task, claimed, result)
        transaction = self._new_transaction(self._attempt)
        with self._attempt.block("ctx.finish()"), transaction.begun() as connection:
            with transaction.session(connection) as session:
                context = self._attempt.context(session)
                with self._around(context):
                    yield session
                    own: Session = getattr(session, "sync_session", session)
                    write_pending(own)
            try:
                if self._attempt.is_lost:
                    raise LeasePassedOn
                settled = transaction.settle(connection, outcome)
            except LeasePassedOn as error:
                raise LeaseLost(
                    f"{where}: this attempt has lost its job, which another worker may run "
                    "now, so nothing was committed; end the handler"
                ) from error
            with self._attempt.committing():
                transaction.commit_writes(connection)
                self.is_done = True
            transaction.note_settled(outcome, settled)
            for listener in listeners_to_commit(own):
                with self._around(context):
                    call_listener(listener, claimed.job_id, own)
