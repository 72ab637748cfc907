"""The transactions of handlers in a worker, on connections of the pool.

Some options of a task, such as ``expires_in``, ask the database before its handler starts.  They
cost one short transaction for each attempt, committed before the handler is called.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import await_only

from pgqueue import execution, redaction
from pgqueue.database.autocommit import autocommitting
from pgqueue.database.opening import leave_autocommit, let_server_notice_loss
from pgqueue.database.unit_of_work import (
    CommitUnknown,
    TransactionEnded,
    begin_for_handler,
    commit,
    set_now,
    time_limits,
)
from pgqueue.events import AttemptOutcome
from pgqueue.execution import CancelWins, Stale
from pgqueue.outcomes import Cancelled, Outcome, Released, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts, Settled
from pgqueue.repository.transactions import AFTER_HANDLER
from pgqueue.worker.commit_listeners import call_after_commit
from pgqueue.worker.ledger import STALE
from pgqueue.worker.outage import is_away, words_of
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.transactional_attempt import AttemptTransaction, run_in_transaction
from pgqueue.worker.unknown_commits import was_committed

T = TypeVar("T")

logger = redaction.logger(__name__)

NOT_COMMITTED = (Stale, CancelWins, CommitUnknown, DBAPIError, PoolTimeout)
"""Raised around a handler if its transaction was not committed, or if that is not known.  The
handler's own errors are outcomes instead."""

WAIT_FOR_CONNECTION = 0.5
"""Seconds after which a job that has found no connection is released."""


def obstacle(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Return the outcome of an attempt whose handler must not start; None if it may start.

    A job whose row another transaction keeps locked is released, and claimed again later.
    """
    try:
        with autocommitting(runtime.engine) as connection:
            attempts = Attempts(connection, run.worker_id)
            return execution.obstacle(run.task, attempts, run.claimed, in_own_transaction=True)
    except (DBAPIError, PoolTimeout) as error:
        if isinstance(error, DBAPIError) and is_lock_timeout(error):
            logger.info(
                "job %d: another transaction has locked its row, so it starts later",
                run.claimed.job_id,
            )
            return Released()
        return after_broken_connection(runtime, run, error)


def run_in_pool_transaction(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Run a handler in a transaction of its own; None if nothing is left to settle.

    For an async handler, call it by ``greenlet_spawn`` on the event loop.
    """
    try:
        return run_in_transaction(PoolTransaction(runtime, run))
    except NOT_COMMITTED as error:
        return _wait_for(run, partial(_after_no_commit, runtime, run, error))


def _wait_for(run: RunningAttempt, function: Callable[[], T]) -> T:
    """Call a function that blocks; for an async handler in a thread, because its loop goes on."""
    return await_only(asyncio.to_thread(function)) if run.task.is_async else function()


SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
MOST_REPLAYS = 5
FIRST_PAUSE = 0.02
"""Seconds; doubles with each replay."""


class PoolTransaction(AttemptTransaction):
    """A transaction on a connection of the engine's pool.

    It begins again after a serialization failure or a deadlock.  A job with ``max_attempts=1`` is
    not replayed: its handler must not start twice.
    """

    def __init__(self, runtime: WorkerRuntime, run: RunningAttempt) -> None:
        super().__init__(
            run,
            runtime.sessions,
            around=runtime.around_handlers,
            around_async=runtime.around_async_handlers,
            is_kept=runtime.is_kept(run.claimed),
        )
        self._runtime = runtime
        self._max_replays = MOST_REPLAYS if run.claimed.max_attempts > 1 else 0
        self._replays = 0

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        runtime, run = self._runtime, self.run
        engine = runtime.loop.engine.sync_engine if run.task.is_async else runtime.engine
        with engine.connect() as connection:
            if run.task.is_async:
                # The BEGIN that the worker sends itself, with the level, is for plain connections.
                connection.execution_options(isolation_level=runtime.isolation_level)
            else:
                leave_autocommit(connection)
            let_server_notice_loss(connection)
            try:
                with run.on(connection):
                    yield connection
                    if (left := connection.get_transaction()) is not None:
                        left.rollback()
            finally:
                if run.session is not None:
                    run.session.close()
                # Another thread may have ended the server process of a lost attempt.
                if run.is_lost and not connection.closed and not connection.invalidated:
                    connection.invalidate()

    def begin(self, connection: Connection) -> None:
        limits = time_limits(self.run.task.settings.timeout, connection)
        level = self._runtime.isolation_level
        begin_for_handler(connection, limits, isolation_level=level)

    def end_handler(self, connection: Connection) -> None:
        if connection.get_transaction() is None or connection.invalidated:
            raise TransactionEnded("by the handler, or with its connection")
        set_now(connection, AFTER_HANDLER)

    def commit_writes(self, connection: Connection) -> None:
        commit(connection)

    def settled(self, outcome: Outcome, settled: Settled) -> None:
        self.run.ended_at = time.monotonic()
        self._runtime.note_times(self.run)
        self._runtime.ledger.settled([(self.run.claimed, outcome)], [settled])

    def call_listeners(self) -> None:
        call_after_commit(self._runtime.around, self.run.context, self.run.session)

    def was_committed(self) -> bool:
        return _wait_for(self.run, partial(_was_committed, self._runtime, self.run))

    def is_replayed(self, error: BaseException) -> bool:
        if self.run.is_lost:
            return False
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        return state in (SERIALIZATION_FAILURE, DEADLOCK) and self._replays < self._max_replays

    def prepare_replay(self, connection: Connection, error: BaseException | None) -> None:
        """End the failed transaction before the next begins; raises Stale or CancelWins.

        A REPEATABLE READ transaction fails at rows that others have changed since it began.  The
        change may be the rescue of the attempt's lease or the cancel of its job: the handler must
        then not run again.
        """
        run = self.run
        run.forget_session()
        connection.rollback()
        is_cancelled = Attempts(connection, run.worker_id).is_cancelled(run.claimed)
        connection.rollback()
        if is_cancelled is None:
            raise Stale
        if is_cancelled:
            raise CancelWins
        self._replays += 1
        logger.info(
            "job %d %s: attempt %d begins again (%d of %d): %s",
            run.claimed.job_id,
            run.task.name,
            run.claimed.attempt,
            self._replays,
            self._max_replays,
            getattr(error, "orig", error),
        )
        # A pause, so that the conflicting transactions do not meet again.
        pause = FIRST_PAUSE * 2.0**self._replays * random.uniform(0.25, 0.5)  # noqa: S311  # no secret
        _wait_for(run, partial(time.sleep, pause))


def _after_no_commit(
    runtime: WorkerRuntime, run: RunningAttempt, error: Exception
) -> Outcome | None:
    """The outcome after one of :data:`NOT_COMMITTED`; None if nothing is left to settle."""
    match error:
        case Stale():
            report_stale(runtime, run.claimed)
            return None
        case CancelWins():
            return Cancelled("")
        case CommitUnknown():
            return _after_unknown_commit(runtime, run)
    return after_broken_connection(runtime, run, error)


def report_stale(runtime: WorkerRuntime, claimed: Claimed) -> None:
    logger.warning("job %s: its lease had passed on, its writes are undone", claimed.job_id)
    runtime.ledger.discarded(claimed, STALE)


def after_broken_connection(
    runtime: WorkerRuntime, run: RunningAttempt, error: Exception
) -> Outcome:
    """The outcome after an error outside of the handler."""
    if run.has_begun:
        return execution.after_error(run.task, run.claimed, error)
    _log_no_connection(runtime, run, error)
    runtime.stopping.wait(WAIT_FOR_CONNECTION)  # or the job would be claimed again in a loop
    return Released()


def _log_no_connection(runtime: WorkerRuntime, run: RunningAttempt, error: Exception) -> None:
    """Log an outage once, not for each job that was claimed before it."""
    if isinstance(error, DBAPIError) and is_away(error):
        # A connection from the pool may have broken in an outage that is over.
        opened_at = float("-inf") if error.connection_invalidated else run.started_at
        runtime.outage.is_met(error, name=f"job {run.claimed.job_id}", opened_at=opened_at)
    else:
        reason = words_of(error)
        logger.warning("job %s: no connection for its handler: %s", run.claimed.job_id, reason)


def _after_unknown_commit(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    if _was_committed(runtime, run):
        settled = Settled(run.claimed.job_id, str(AttemptOutcome.SUCCEEDED))
        transaction = PoolTransaction(runtime, run)
        transaction.settled(Succeeded(), settled)
        transaction.call_listeners()
        return None
    # If the COMMIT was carried out after all, the lease is gone and this outcome is dropped.
    lost = ConnectionError("the connection broke during COMMIT, which was not carried out")
    return execution.after_error(run.task, run.claimed, lost)


def _was_committed(runtime: WorkerRuntime, run: RunningAttempt) -> bool:
    return was_committed(runtime.engine, run.worker_id, run.claimed, stopping=runtime.stopping)
