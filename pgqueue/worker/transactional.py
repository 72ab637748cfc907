"""Transactional handlers: their writes, their follow-up jobs and their completion are one commit.

The settle runs inside the handler's own transaction, right before its COMMIT.  If the lease has
passed on meanwhile it finds nothing, and everything the handler wrote rolls back.
"""

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pgqueue import async_session, execution, redaction
from pgqueue.changed_sessions import close_if_changed
from pgqueue.execution import CancelWins, Stale, Verdict
from pgqueue.guests import TransactionEnded, told_by_server
from pgqueue.network import NETWORK
from pgqueue.outcomes import Cancelled, Outcome, Released
from pgqueue.repository import Attempts, Claimed, Fleet
from pgqueue.unit_of_work import (
    AFTER_HANDLER,
    begin_now,
    joined_session,
    leave_autocommit,
    let_server_notice_loss,
    own_connection,
    set_now,
)
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.event_loop import run_alone
from pgqueue.worker.workbench import STALE, WORDS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

logger = redaction.logger(__name__)

LOOK_FIRST_AFTER = 0.1
LOOK_EVERY = 1.0
LOOK_FOR = 60.0
WAIT_FOR_CONNECTION = 0.5
IDLE_MARGIN = timedelta(minutes=1)


class CommitUnknown(Exception):
    """The connection broke during COMMIT: only the rows can tell whether it was carried out."""


def run_in_transaction(crew: Crew, run: Run) -> Outcome | None:
    """Run a handler in a transaction of its own; None when it is settled already."""
    try:
        with crew.engine.connect() as connection:
            leave_autocommit(connection)
            let_server_notice_loss(connection)
            try:
                return _run_on(crew, run, connection)
            finally:
                _leave(run, connection)
    except CommitUnknown:
        return _after_unknown_commit(crew, run)
    except (DBAPIError, PoolTimeout) as error:
        return _after_broken_connection(crew, run, error)


async def run_in_async_transaction(crew: Crew, run: Run) -> Outcome | None:
    """The same on the event loop, with an AsyncSession."""
    try:
        async with crew.loop.engine.connect() as connection:
            await connection.execution_options(isolation_level="READ COMMITTED")
            await connection.run_sync(let_server_notice_loss)
            try:
                return await _run_async_on(crew, run, connection)
            finally:
                await connection.run_sync(lambda sync: _leave(run, sync))
    except CommitUnknown:
        return await asyncio.to_thread(_after_unknown_commit, crew, run)
    except (DBAPIError, PoolTimeout) as error:
        return await asyncio.to_thread(_after_broken_connection, crew, run, error)


def _leave(run: Run, connection: Connection) -> None:
    """Give a connection back for others to use; not one that may have been ended meanwhile."""
    if run.is_lost and not connection.closed and not connection.invalidated:
        connection.invalidate()
    close_if_changed(connection)


def _run_on(crew: Crew, run: Run, connection: Connection) -> Outcome | None:
    with run.on(connection):
        begin_now(connection)
        verdict = run_with_session(crew, run, connection)
        return _complete(crew, run, connection, verdict)


async def _run_async_on(crew: Crew, run: Run, connection: "AsyncConnection") -> Outcome | None:
    with run.on(await connection.run_sync(lambda sync: sync)):
        await connection.run_sync(begin_now)
        verdict = await _run_with_async_session(crew, run, connection)
        return await connection.run_sync(lambda sync: _complete(crew, run, sync, verdict))


def run_with_session(crew: Crew, run: Run, connection: Connection) -> Verdict:
    """Run a handler with a Session inside the transaction of this connection."""
    with joined_session(crew.sessions, connection) as session:
        run.begin()
        return execution.run(
            run.task,
            run.claimed,
            run.context(session),
            around=crew.around,
            write_pending=session.commit,
        )


def run_with_async_session(crew: Crew, run: Run, connection: Connection) -> Verdict:
    """The same for an async handler, on an event loop of its own.

    The connection belongs to this thread and blocks it.  On the loop that all async handlers
    share, two that wait for each other's row locks would stop it for good.
    """
    return run_alone(_run_with_async_session(crew, run, connection))


async def _run_with_async_session(
    crew: Crew, run: Run, connection: "AsyncConnection | Connection"
) -> Verdict:
    async with async_session.joined_session(connection, begin_again=begin_now) as session:
        run.begin()
        return await execution.run_async(
            run.task,
            run.claimed,
            run.context(session),
            around=crew.around,
            write_pending=session.commit,
        )


def idle_limit(run: Run) -> str:
    """What bounds the time that the server waits for this worker, as the first of a transaction."""
    timeout = run.task.settings.timeout
    if timeout is None:
        return "SELECT"
    # The server ends T for a worker that was frozen, but never within the task's own timeout.
    milliseconds = int((timeout + IDLE_MARGIN).total_seconds() * 1000)
    return f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}"


def commit(connection: Connection) -> None:
    """Commit once.  A COMMIT that was cut off is never sent again: it would commit nothing."""
    transaction = connection.get_transaction()
    assert transaction is not None, "begun by the caller"
    try:
        transaction.commit()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise CommitUnknown from error
        raise


def was_committed(crew: Crew, run: Run) -> bool:
    """Whether the transaction of a run has settled it; False also if the database does not say.

    Until its server process is gone it may still commit, and holds the lease that it deleted.
    """
    logger.info("job %s: asking whether it was committed", run.claimed.job_id)
    deadline = time.monotonic() + LOOK_FOR
    wait = LOOK_FIRST_AFTER
    while time.monotonic() < deadline:
        try:
            with own_connection(crew.engine, NETWORK) as connection:
                settled = Fleet(connection).has_settled(run.worker_id, run.claimed)
                if settled is not None:
                    return settled
        except DBAPIError as error:
            logger.debug("job %s: nobody knows yet: %s", run.claimed.job_id, error)
        crew.stopping.wait(wait) if not crew.stopping.is_set() else time.sleep(wait)
        wait = min(2 * wait, LOOK_EVERY)  # each look is a connection
    return False


def _complete(crew: Crew, run: Run, connection: Connection, verdict: Verdict) -> Outcome | None:
    """Settle in the transaction and commit it, if what was written is to be kept.

    What is returned is still to be settled.
    """
    outcome = verdict.outcome
    transaction = connection.get_transaction()
    if not verdict.keeps_writes:
        if transaction is not None:
            transaction.rollback()
        return outcome
    if transaction is None or connection.invalidated:
        ended = TransactionEnded("by the handler, or with its connection")
        return execution.after_error(run.task, run.claimed, ended)
    if run.is_lost:
        transaction.rollback()  # it is being settled over the head of its thread
        return None
    attempts = Attempts(connection, crew.presence.worker_id)
    try:
        set_now(connection, AFTER_HANDLER)
        execution.complete(attempts, run.claimed, outcome, held=False)
        commit(connection)
    except Stale:
        transaction.rollback()
        report_stale(crew, run.claimed)
        return None
    except CancelWins:
        transaction.rollback()
        return Cancelled("")
    except (DBAPIError, TransactionEnded) as error:
        transaction.rollback()
        return execution.after_error(run.task, run.claimed, told_by_server(error))
    crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
    return None


def report_stale(crew: Crew, claimed: Claimed) -> None:
    logger.warning("job %s: its lease had passed on, its writes are undone", claimed.job_id)
    crew.bench.settled_already(claimed, STALE)


def _after_broken_connection(crew: Crew, run: Run, error: Exception) -> Outcome:
    """It broke around the handler; what the handler raises itself has become its verdict."""
    if run.has_begun:
        return execution.after_error(run.task, run.claimed, error)
    logger.warning("job %s: no connection for its handler: %s", run.claimed.job_id, error)
    crew.stopping.wait(WAIT_FOR_CONNECTION)  # or it would be claimed again at once, and again
    return Released()


def _after_unknown_commit(crew: Crew, run: Run) -> Outcome | None:
    if was_committed(crew, run):
        crew.bench.settled_already(run.claimed, "succeeded")
        return None
    # If it was carried out after all, the lease is gone, and this is refused.
    lost = ConnectionError("the connection broke during COMMIT, which was not carried out")
    return execution.after_error(run.task, run.claimed, lost)
