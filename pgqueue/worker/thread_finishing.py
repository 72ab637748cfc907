"""``ctx.finish()`` in the threads of a worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.util import await_only

from pgqueue.events import AttemptOutcome
from pgqueue.outcomes import Succeeded
from pgqueue.repository.settle import Settled
from pgqueue.unit_of_work import begin_for_handler, time_limits
from pgqueue.worker.finishing import Finishing
from pgqueue.worker.handler_transactions import async_connection_for, connection_for
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.unknown_commits import was_committed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


class ThreadFinishing(Finishing):
    """Begins a transaction on a connection of the engine's pool."""

    def __init__(self, runtime: WorkerRuntime, run: RunningAttempt) -> None:
        super().__init__(
            run.task,
            run.claimed,
            worker_id=run.worker_id,
            sessions=runtime.sessions,
            is_kept=runtime.is_kept(run.claimed),
        )
        self._runtime = runtime
        self._run = run

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        run = self._run
        with connection_for(self._runtime, run) as connection, run.on(connection):
            self._begin(connection)
            yield connection

    @asynccontextmanager
    async def _async_transaction(self) -> "AsyncIterator[AsyncConnection]":
        async with async_connection_for(self._runtime, self._run) as connection:
            with self._run.on(await connection.run_sync(lambda sync: sync)):
                await connection.run_sync(self._begin)
                yield connection

    def _begin(self, connection: Connection) -> None:
        limits = time_limits(self.task.settings.timeout, connection)
        level = self._runtime.isolation_level
        begin_for_handler(connection, limits, isolation_level=level)

    @property
    def _is_lost(self) -> bool:
        return self._run.is_lost

    def _was_committed(self) -> bool:
        runtime = self._runtime
        ask = partial(was_committed, stopping=runtime.stopping)
        if self.task.is_async:  # in the greenlet of an AsyncSession: the event loop must go on
            thread = asyncio.to_thread(ask, runtime.engine, self.worker_id, self.claimed)
            return await_only(thread)
        return ask(runtime.engine, self.worker_id, self.claimed)

    def _done(self, outcome: Succeeded) -> None:
        super()._done(outcome)
        runtime = self._runtime
        self._run.ended_at = time.monotonic()
        runtime.note_times(self._run)
        settled = Settled(self.claimed.job_id, str(AttemptOutcome.SUCCEEDED))
        runtime.buffer.settled([(self.claimed, outcome)], [settled])
