"""The transactions of handlers, on connections of the pool.

Some options of a task, such as ``expires_in``, ask the database before its handler starts.  They
cost one short transaction for each attempt, committed before the handler is called.

A transactional handler has one COMMIT for its writes, the jobs it enqueues and its outcome.  The
settle runs inside the handler's transaction, right before its COMMIT.  If the lease has passed on
meanwhile, the settle finds no row and all writes of the handler are rolled back.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from pgqueue import execution, redaction
from pgqueue.connections.autocommit import autocommitting
from pgqueue.connections.opening import leave_autocommit, let_server_notice_loss
from pgqueue.events import AttemptOutcome
from pgqueue.execution import CancelWins, Replay, Stale
from pgqueue.execution.attempt import AttemptResult
from pgqueue.outcomes import Cancelled, Outcome, Released, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts, Settled
from pgqueue.repository.transactions import AFTER_HANDLER
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session
from pgqueue.unit_of_work import (
    CommitUnknown,
    TransactionEnded,
    begin_for_handler,
    commit,
    server_error,
    set_now,
    time_limits,
    write_pending,
)
from pgqueue.worker.buffer import STALE
from pgqueue.worker.handler_sessions import call_after_commit, session_for_handler
from pgqueue.worker.outage import is_away, words_of
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.unknown_commits import was_committed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

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


def run_in_transaction(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Run a handler in a transaction of its own; None if its attempt is settled already."""
    try:
        with connection_for(runtime, run) as connection:
            return _run_on(runtime, run, connection)
    except NOT_COMMITTED as error:
        return _after_no_commit(runtime, run, error)


async def run_in_async_transaction(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Like :func:`run_in_transaction` on the event loop, with an AsyncSession."""
    try:
        async with async_connection_for(runtime, run) as connection:
            return await _run_async_on(runtime, run, connection)
    except NOT_COMMITTED as error:
        return await asyncio.to_thread(_after_no_commit, runtime, run, error)


@contextmanager
def connection_for(runtime: WorkerRuntime, run: RunningAttempt) -> Iterator[Connection]:
    """A connection of the pool for the transactions of an attempt."""
    with runtime.engine.connect() as connection:
        leave_autocommit(connection)
        let_server_notice_loss(connection)
        try:
            yield connection
        finally:
            _prepare_for_pool(run, connection)


@asynccontextmanager
async def async_connection_for(
    runtime: WorkerRuntime, run: RunningAttempt
) -> "AsyncIterator[AsyncConnection]":
    """Like :func:`connection_for`, on the event loop."""
    async with runtime.loop.engine.connect() as connection:
        await connection.execution_options(isolation_level=runtime.isolation_level)
        await connection.run_sync(let_server_notice_loss)
        try:
            yield connection
        finally:
            await connection.run_sync(lambda sync: _prepare_for_pool(run, sync))


def _prepare_for_pool(run: RunningAttempt, connection: Connection) -> None:
    """Prepare a connection for the pool; invalidate one that may have been ended meanwhile."""
    if run.session is not None:
        run.session.close()
    if run.is_lost and not connection.closed and not connection.invalidated:
        connection.invalidate()


def _run_on(runtime: WorkerRuntime, run: RunningAttempt, connection: Connection) -> Outcome | None:
    replays = Replays(runtime, run, time_limits(run.task.settings.timeout, connection))
    with run.on(connection):
        while True:
            replays.begin(connection)
            try:
                verdict = _run_with_session(runtime, run, connection, replays)
                return _complete(runtime, run, connection, verdict, replays)
            except Replay as replay:
                replays.prepare(connection, replay.__cause__)
            time.sleep(replays.pause())


async def _run_async_on(
    runtime: WorkerRuntime, run: RunningAttempt, connection: "AsyncConnection"
) -> Outcome | None:
    sync_connection = await connection.run_sync(lambda sync: sync)
    replays = Replays(runtime, run, time_limits(run.task.settings.timeout, sync_connection))
    with run.on(sync_connection):
        while True:
            await connection.run_sync(replays.begin)
            try:
                verdict = await _run_with_async_session(runtime, run, connection, replays)
                complete = partial(_complete, runtime, run, verdict=verdict, replays=replays)
                return await connection.run_sync(complete)
            except Replay as replay:
                error = replay.__cause__
                await connection.run_sync(replays.prepare, error)
            await asyncio.sleep(replays.pause())


def _run_with_session(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: Connection,
    replays: "Replays",
) -> AttemptResult:
    """Run a handler with a Session inside the transaction of this connection."""
    sessions = runtime.sessions
    with session_for_handler(
        joined_session, sessions, connection, begin_again=replays.begin
    ) as session:
        try:
            run.begin()
            verdict = execution.run(
                run.task,
                run.claimed,
                run.context(session),
                around=runtime.around_handlers,
                write_pending=partial(write_pending, session),
                is_replayed=replays.are_due,
            )
            _keep_session(run, session, verdict)
            return verdict
        finally:
            if run.session is None:
                session.close()


def _keep_session(run: RunningAttempt, session: Session, verdict: AttemptResult) -> None:
    """Leave a Session open until the COMMIT: listeners may read expired attributes."""
    if verdict.keeps_writes and not session.in_transaction():
        run.session = session


async def _run_with_async_session(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: "AsyncConnection",
    replays: "Replays",
) -> AttemptResult:
    sessions, joined = runtime.sessions, async_sessions.joined_session
    with session_for_handler(joined, sessions, connection, begin_again=replays.begin) as session:
        try:
            run.begin()
            verdict = await execution.run_async(
                run.task,
                run.claimed,
                run.context(session),
                around=runtime.around_async_handlers,
                write_pending=partial(session.run_sync, write_pending),
                is_replayed=replays.are_due,
            )
            _keep_session(run, session.sync_session, verdict)
            return verdict
        finally:
            if run.session is None:
                await async_sessions.close(session)


def _complete(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: Connection,
    verdict: AttemptResult,
    replays: "Replays",
) -> Outcome | None:
    """Settle in the transaction and commit it, if the handler's writes are kept.

    Returns an outcome that must still be settled, or None.
    """
    transaction = connection.get_transaction()
    if not verdict.keeps_writes:
        if transaction is not None:
            transaction.rollback()
        return verdict.outcome
    if transaction is None or connection.invalidated:
        ended = TransactionEnded("by the handler, or with its connection")
        return execution.after_error(run.task, run.claimed, ended)
    if run.is_lost:
        transaction.rollback()  # another thread settles the attempt
        return None
    try:
        settled = _settle(runtime, run, connection, verdict.outcome)
        commit(connection)
    except (DBAPIError, TransactionEnded) as error:
        if replays.are_due(error):
            raise Replay from error
        transaction.rollback()
        return execution.after_error(run.task, run.claimed, server_error(error))
    _report_success(runtime, run, verdict.outcome, settled)
    return None


def _settle(
    runtime: WorkerRuntime, run: RunningAttempt, connection: Connection, outcome: Outcome
) -> Settled:
    set_now(connection, AFTER_HANDLER)
    attempts = Attempts(connection, runtime.identity.worker_id)
    is_kept = runtime.is_kept(run.claimed)
    return execution.complete(attempts, run.claimed, outcome, is_kept=is_kept)


def _report_success(
    runtime: WorkerRuntime, run: RunningAttempt, outcome: Outcome, settled: Settled
) -> None:
    run.ended_at = time.monotonic()
    runtime.note_times(run)
    runtime.buffer.settled([(run.claimed, outcome)], [settled])
    call_after_commit(runtime.around, run.context, run.session)


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
    runtime.buffer.discarded(claimed, STALE)


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
    if was_committed(runtime.engine, run.worker_id, run.claimed, stopping=runtime.stopping):
        settled = Settled(run.claimed.job_id, str(AttemptOutcome.SUCCEEDED))
        _report_success(runtime, run, Succeeded(), settled)
        return None
    # If the COMMIT was carried out after all, the lease is gone and this outcome is dropped.
    lost = ConnectionError("the connection broke during COMMIT, which was not carried out")
    return execution.after_error(run.task, run.claimed, lost)


SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
MOST_REPLAYS = 5
FIRST_PAUSE = 0.02
"""Seconds; doubles with each replay."""


class Replays:
    """Begins the transaction of one attempt, and counts how often it begins again.

    A job with ``max_attempts=1`` is not replayed: its handler must not start twice.
    """

    def __init__(self, runtime: WorkerRuntime, run: RunningAttempt, limits: str) -> None:
        self._runtime = runtime
        self._run = run
        self._max_replays = MOST_REPLAYS if run.claimed.max_attempts > 1 else 0
        self._done = 0
        self.begin: Callable[[Connection], None] = partial(
            begin_for_handler, limits=limits, isolation_level=runtime.isolation_level
        )

    def are_due(self, error: BaseException) -> bool:
        """Whether after this error the transaction may succeed if it begins again."""
        if self._run.is_lost:
            return False
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        return state in (SERIALIZATION_FAILURE, DEADLOCK) and self._done < self._max_replays

    def prepare(self, connection: Connection, error: BaseException | None) -> None:
        """End the failed transaction before the next begins; raises Stale or CancelWins.

        A REPEATABLE READ transaction fails at rows that others have changed since it began.  The
        change may be the rescue of the attempt's lease or the cancel of its job: the handler must
        then not run again.
        """
        self._run.forget_session()
        connection.rollback()
        attempts = Attempts(connection, self._runtime.identity.worker_id)
        is_cancelled = attempts.is_cancelled(self._run.claimed)
        connection.rollback()
        if is_cancelled is None:
            raise Stale
        if is_cancelled:
            raise CancelWins
        self._done += 1
        logger.info(
            "job %d %s: attempt %d begins again (%d of %d): %s",
            self._run.claimed.job_id,
            self._run.task.name,
            self._run.claimed.attempt,
            self._done,
            self._max_replays,
            getattr(error, "orig", error),
        )

    def pause(self) -> float:
        """Seconds to wait before a replay, so that conflicting transactions do not meet again."""
        return FIRST_PAUSE * 2.0**self._done * random.uniform(0.25, 0.5)  # noqa: S311  # no secret
