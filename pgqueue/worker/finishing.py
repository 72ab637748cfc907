"""``ctx.finish()``: a handler ends its job in a transaction that it begins itself.

As for a transactional handler, the settle runs in the transaction, right before its COMMIT.  If the
lease has passed on meanwhile, the settle finds no row and the transaction is rolled back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue import execution
from pgqueue.connections.opening import leave_autocommit, let_server_notice_loss
from pgqueue.errors import LeaseLost, PgQueueError
from pgqueue.events import AttemptOutcome
from pgqueue.execution import CancelWins, Stale
from pgqueue.execution.error_reports import storable_result
from pgqueue.outcomes import Cancel, Succeeded
from pgqueue.repository import Attempts, Settled
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session, options_of
from pgqueue.statements.transactions import AFTER_HANDLER
from pgqueue.tasks.delaying import handler_session
from pgqueue.unit_of_work import CommitUnknown, commit, set_now, write_pending
from pgqueue.worker.after_commit import call_listeners
from pgqueue.worker.replays import Replays
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.transactional_handler import leave, time_limits, was_committed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession


class LeaseFinishing:
    """The end of one job, in lease mode."""

    def __init__(self, runtime: WorkerRuntime, run: RunningAttempt) -> None:
        self.is_done = False
        self._runtime = runtime
        self._run = run
        self._is_open = False

    @contextmanager
    def begin(self, result: Any) -> Iterator[Session]:
        """Open a transaction whose commit, at the end of the block, also ends the job."""
        self._refuse(is_async=False)
        outcome = Succeeded(storable_result(result))
        try:
            with self._opened(), self._runtime.engine.connect() as connection:
                leave_autocommit(connection)
                let_server_notice_loss(connection)
                try:
                    yield from self._session_on(connection, outcome)
                finally:
                    leave(self._run, connection)
        except CommitUnknown:
            self._found_out(was_committed(self._runtime, self._run))

    @asynccontextmanager
    async def begin_async(self, result: Any) -> "AsyncIterator[AsyncSession]":
        """Like :meth:`begin` on the event loop, with an AsyncSession."""
        self._refuse(is_async=True)
        outcome = Succeeded(storable_result(result))
        runtime, run = self._runtime, self._run
        try:
            with self._opened():
                async with runtime.loop.engine.connect() as connection:
                    await connection.execution_options(isolation_level=runtime.isolation_level)
                    await connection.run_sync(let_server_notice_loss)
                    try:
                        async with self._async_session_on(connection, outcome) as session:
                            yield session
                    finally:
                        await connection.run_sync(lambda sync: leave(run, sync))
        except CommitUnknown:
            self._found_out(await asyncio.to_thread(was_committed, runtime, run))

    def _session_on(self, connection: Connection, outcome: Succeeded) -> Iterator[Session]:
        sessions = self._runtime.sessions
        with self._run.on(connection), options_of(sessions.kw["bind"], connection):
            begin = self._begin_of(connection)
            begin(connection)
            session = joined_session(sessions, connection, begin_again=begin)
            handler_session.set(session)
            try:
                yield session
                session.expire_on_commit = False  # the handler may use its objects afterwards
                write_pending(session)
                self._settle(connection, session, outcome)
            finally:
                handler_session.set(None)
                session.close()

    @asynccontextmanager
    async def _async_session_on(
        self, connection: "AsyncConnection", outcome: Succeeded
    ) -> "AsyncIterator[AsyncSession]":
        sessions = self._runtime.sessions
        sync = await connection.run_sync(lambda sync: sync)
        with self._run.on(sync), options_of(sessions.kw["bind"], sync):
            begin = self._begin_of(sync)
            await connection.run_sync(begin)
            session = async_sessions.joined_session(sessions, connection, begin_again=begin)
            handler_session.set(session.sync_session)
            try:
                yield session
                await session.run_sync(write_pending)
                await connection.run_sync(self._settle, session.sync_session, outcome)
            finally:
                handler_session.set(None)
                await asyncio.shield(asyncio.create_task(session.close()))

    def _begin_of(self, connection: Connection) -> Callable[[Connection], None]:
        return Replays(self._runtime, self._run, time_limits(self._run, connection)).begin

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _refuse(self, *, is_async: bool) -> None:
        where, is_async_task = self._where, self._run.task.is_async
        if is_async_task and not is_async:
            raise PgQueueError(
                f"{where}: ctx.finish() would block the event loop that all async handlers share; "
                "write `async with ctx.finish_async() as session:`"
            )
        if is_async and not is_async_task:
            raise PgQueueError(
                f"{where}: ctx.finish_async() is for async handlers; "
                "write `with ctx.finish() as session:`"
            )
        if self._is_open or self.is_done:
            state = "has ended already" if self.is_done else "is inside a block of ctx.finish()"
            raise PgQueueError(f"{where}: the job {state}; call ctx.finish() once")

    @property
    def _where(self) -> str:
        return f"job {self._run.claimed.job_id} {self._run.task.name}"

    def _settle(self, connection: Connection, session: Session, outcome: Succeeded) -> None:
        """Settle and commit; raises LeaseLost or Cancel, and the transaction rolls back."""
        attempts = Attempts(connection, self._run.worker_id)
        try:
            if self._run.is_lost:
                raise Stale
            set_now(connection, AFTER_HANDLER)
            claimed = self._run.claimed
            is_kept = self._runtime.is_kept(claimed)
            execution.complete(attempts, claimed, outcome, held=False, is_kept=is_kept)
        except Stale as error:
            raise LeaseLost(
                f"{self._where}: this attempt has lost its job, which another worker may run now, "
                "so nothing was committed; end the handler"
            ) from error
        except CancelWins as error:
            raise Cancel from error
        commit(connection)
        self._done(outcome)
        call_listeners(self._run, session)

    def _done(self, outcome: Succeeded) -> None:
        """Count the end of the job; the handler may go on."""
        self.is_done = True
        runtime, claimed = self._runtime, self._run.claimed
        self._run.ended_at = time.monotonic()
        runtime.note_times(self._run)
        settled = Settled(claimed.job_id, AttemptOutcome.SUCCEEDED)
        runtime.buffer.settled([(claimed, outcome)], [settled])

    def _found_out(self, is_committed: bool) -> None:
        if not is_committed:
            raise ConnectionError(
                f"{self._where}: the connection broke during COMMIT, which was not carried out"
            )
        self._done(Succeeded())
