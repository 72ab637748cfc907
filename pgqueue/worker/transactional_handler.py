"""Transactional handlers: one COMMIT for their writes, the jobs they enqueue and their outcome.

The settle runs inside the handler's transaction, right before its COMMIT.  If the lease has passed
on meanwhile, the settle finds no row and all writes of the handler are rolled back.
"""

import asyncio
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from pgqueue import execution, redaction
from pgqueue.connections.opening import leave_autocommit, let_server_notice_loss, own_connection
from pgqueue.connections.session_changes import close_if_changed
from pgqueue.connections.settings import OWN
from pgqueue.events import AttemptOutcome
from pgqueue.execution import CancelWins, Replay, Stale, never
from pgqueue.execution.attempt import AttemptResult
from pgqueue.outcomes import Cancelled, Outcome, Released, Succeeded
from pgqueue.repository import Attempts, Claimed, Settled, Workers
from pgqueue.sessions import async_sessions
from pgqueue.sessions.handlers import joined_session, options_of
from pgqueue.statements.transactions import AFTER_HANDLER, set_local
from pgqueue.tasks.delaying import handler_session
from pgqueue.unit_of_work import (
    CommitUnknown,
    TransactionEnded,
    begin_now,
    commit,
    limits_of,
    set_now,
    told_by_server,
    write_pending,
)
from pgqueue.worker.after_commit import tell_of_commit
from pgqueue.worker.buffer import STALE
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.outage import is_away, words_of
from pgqueue.worker.replays import Replays
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

logger = redaction.logger(__name__)

LOOK_FIRST_AFTER = 0.1
LOOK_EVERY = 1.0
LOOK_FOR = 60.0
WAIT_FOR_CONNECTION = 0.5
MARGIN = timedelta(minutes=1)


def run_in_transaction(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Run a handler in a transaction of its own; None if its attempt is settled already."""
    try:
        with runtime.engine.connect() as connection:
            leave_autocommit(connection)
            let_server_notice_loss(connection)
            try:
                return _run_on(runtime, run, connection)
            finally:
                leave(run, connection)
    except Stale:
        report_stale(runtime, run.claimed)
        return None
    except CancelWins:
        return Cancelled("")
    except CommitUnknown:
        return _after_unknown_commit(runtime, run)
    except (DBAPIError, PoolTimeout) as error:
        return _after_broken_connection(runtime, run, error)


async def run_in_async_transaction(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Like :func:`run_in_transaction` on the event loop, with an AsyncSession."""
    try:
        async with runtime.loop.engine.connect() as connection:
            await connection.execution_options(isolation_level=runtime.isolation_level)
            await connection.run_sync(let_server_notice_loss)
            try:
                return await _run_async_on(runtime, run, connection)
            finally:
                await connection.run_sync(lambda sync: leave(run, sync))
    except Stale:
        report_stale(runtime, run.claimed)
        return None
    except CancelWins:
        return Cancelled("")
    except CommitUnknown:
        return await asyncio.to_thread(_after_unknown_commit, runtime, run)
    except (DBAPIError, PoolTimeout) as error:
        return await asyncio.to_thread(_after_broken_connection, runtime, run, error)


def leave(run: RunningAttempt, connection: Connection) -> None:
    """Prepare a connection for the pool; invalidate one that may have been ended meanwhile."""
    if run.session is not None:
        run.session.close()
    if run.is_lost and not connection.closed and not connection.invalidated:
        connection.invalidate()
    close_if_changed(connection)


def _run_on(runtime: WorkerRuntime, run: RunningAttempt, connection: Connection) -> Outcome | None:
    replays = Replays(runtime, run, time_limits(run, connection))
    with run.on(connection):
        while True:
            replays.begin(connection)
            try:
                verdict = run_with_session(runtime, run, connection, replays)
                return _complete(runtime, run, connection, verdict, replays)
            except Replay as replay:
                replays.prepare(connection, replay.__cause__)
            time.sleep(replays.pause())


async def _run_async_on(
    runtime: WorkerRuntime, run: RunningAttempt, connection: "AsyncConnection"
) -> Outcome | None:
    sync = await connection.run_sync(lambda sync: sync)
    replays = Replays(runtime, run, time_limits(run, sync))
    with run.on(sync):
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


def run_with_session(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: Connection,
    replays: Replays | None = None,
) -> AttemptResult:
    """Run a handler with a Session inside the transaction of this connection."""
    begin_again = begin_now if replays is None else replays.begin
    session = joined_session(runtime.sessions, connection, begin_again=begin_again)

    def write() -> None:
        session.expire_on_commit = False  # for ``after_commit`` listeners
        write_pending(session)

    with options_of(runtime.sessions.kw["bind"], connection):
        try:
            run.begin()
            handler_session.set(session)
            verdict = execution.run(
                run.task,
                run.claimed,
                run.context(session),
                around=runtime.around_handlers,
                write_pending=write,
                is_replayed=never if replays is None else replays.are_due,
            )
            _keep_session(run, session, verdict)
            return verdict
        finally:
            handler_session.set(None)
            if run.session is None:
                session.close()


def _keep_session(run: RunningAttempt, session: Session, verdict: AttemptResult) -> None:
    """Leave a Session open until the COMMIT: listeners may read expired attributes."""
    if verdict.keeps_writes and not session.in_transaction():
        run.session = session


def run_with_async_session(
    runtime: WorkerRuntime, run: RunningAttempt, connection: Connection
) -> AttemptResult:
    """Like :func:`run_with_session` for an async handler, on an event loop of its own.

    The connection is synchronous and blocks this thread.  On the shared event loop, two handlers
    that wait for each other's row locks would block the loop for ever.
    """
    return run_alone(_run_with_async_session(runtime, run, connection))


async def _run_with_async_session(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: "AsyncConnection | Connection",
    replays: Replays | None = None,
) -> AttemptResult:
    begin_again = begin_now if replays is None else replays.begin
    session = async_sessions.joined_session(runtime.sessions, connection, begin_again=begin_again)

    async def write() -> None:
        await session.run_sync(write_pending)

    sync: Any = getattr(connection, "sync_connection", connection)
    with options_of(runtime.sessions.kw["bind"], sync):
        try:
            run.begin()
            handler_session.set(session.sync_session)
            verdict = await execution.run_async(
                run.task,
                run.claimed,
                run.context(session),
                around=runtime.around_async_handlers,
                write_pending=write,
                is_replayed=never if replays is None else replays.are_due,
            )
            _keep_session(run, session.sync_session, verdict)
            return verdict
        finally:
            handler_session.set(None)
            if run.session is None:
                await asyncio.shield(asyncio.create_task(session.close()))


def time_limits(run: RunningAttempt, connection: Connection) -> str:
    """The statements that set the server's timeouts for a handler's transaction.

    The server ends the transaction of a frozen worker, but never before the task's own timeout.
    Empty for a task without a timeout: the server's own settings then hold.
    """
    timeout = run.task.settings.timeout
    if timeout is None:
        return ""
    milliseconds = int((timeout + MARGIN).total_seconds() * 1000)
    limits = [(name, milliseconds) for name in limits_of(connection)]
    # A running transaction_timeout can only be lengthened by setting it to 0 first.
    none = [("transaction_timeout", 0)] * (len(limits) > 1)
    return set_local(none + limits)


def was_committed(runtime: WorkerRuntime, run: RunningAttempt) -> bool:
    """Whether the transaction of an attempt has settled it; False also if that stays unknown.

    The transaction may still commit, and locks the lease, until its server process has ended.
    """
    logger.info("job %s: asking whether it was committed", run.claimed.job_id)
    deadline = time.monotonic() + LOOK_FOR
    wait = LOOK_FIRST_AFTER
    while time.monotonic() < deadline:
        try:
            with own_connection(runtime.engine, OWN) as connection:
                settled = Workers(connection).has_settled(run.worker_id, run.claimed)
                if settled is not None:
                    return settled
        except DBAPIError as error:
            logger.debug("job %s: not known yet: %s", run.claimed.job_id, error)
        runtime.stopping.wait(wait) if not runtime.stopping.is_set() else time.sleep(wait)
        wait = min(2 * wait, LOOK_EVERY)  # each look is a connection
    return False


def _complete(
    runtime: WorkerRuntime,
    run: RunningAttempt,
    connection: Connection,
    verdict: AttemptResult,
    replays: Replays,
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
        return execution.after_error(run.task, run.claimed, told_by_server(error))
    _tell_of_success(runtime, run, verdict.outcome, settled)
    return None


def _settle(
    runtime: WorkerRuntime, run: RunningAttempt, connection: Connection, outcome: Outcome
) -> Settled:
    set_now(connection, AFTER_HANDLER)
    attempts = Attempts(connection, runtime.identity.worker_id)
    is_kept = runtime.is_kept(run.claimed)
    return execution.complete(attempts, run.claimed, outcome, held=False, is_kept=is_kept)


def _tell_of_success(
    runtime: WorkerRuntime, run: RunningAttempt, outcome: Outcome, settled: Settled
) -> None:
    run.ended_at = time.monotonic()
    runtime.note_times(run)
    runtime.buffer.settled([(run.claimed, outcome)], [settled])
    tell_of_commit(runtime, run)


def report_stale(runtime: WorkerRuntime, claimed: Claimed) -> None:
    logger.warning("job %s: its lease had passed on, its writes are undone", claimed.job_id)
    runtime.buffer.discarded(claimed, STALE)


def _after_broken_connection(
    runtime: WorkerRuntime, run: RunningAttempt, error: Exception
) -> Outcome:
    """The outcome after an error outside of the handler, whose own errors do not come here."""
    if run.has_begun:
        return execution.after_error(run.task, run.claimed, error)
    _tell_of_no_connection(runtime, run, error)
    runtime.stopping.wait(WAIT_FOR_CONNECTION)  # or the job would be claimed again in a loop
    return Released()


def _tell_of_no_connection(runtime: WorkerRuntime, run: RunningAttempt, error: Exception) -> None:
    """Log an outage once, not for each job that was claimed before it."""
    if isinstance(error, DBAPIError) and is_away(error):
        # A connection from the pool may have broken in an outage that is over.
        opened_at = float("-inf") if error.connection_invalidated else float("inf")
        runtime.outage.is_met(error, name=f"job {run.claimed.job_id}", opened_at=opened_at)
    else:
        refused = words_of(error)
        logger.warning("job %s: no connection for its handler: %s", run.claimed.job_id, refused)


def _after_unknown_commit(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    if was_committed(runtime, run):
        settled = Settled(run.claimed.job_id, AttemptOutcome.SUCCEEDED)
        _tell_of_success(runtime, run, Succeeded(), settled)
        return None
    # If the COMMIT was carried out after all, the lease is gone and this outcome is dropped.
    lost = ConnectionError("the connection broke during COMMIT, which was not carried out")
    return execution.after_error(run.task, run.claimed, lost)
