"""Ends attempts from outside of their threads, if those threads do not return.

Uses connections of its own: threads that do not return may hold all connections of the pool.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.connections.opening import own_connection
from pgqueue.connections.settings import OWN
from pgqueue.execution import after_error, too_late
from pgqueue.outcomes import AttemptEnd, Outcome, Succeeded
from pgqueue.repository import Attempts, Settled, Workers
from pgqueue.statements.transactions import set_local
from pgqueue.unit_of_work import end
from pgqueue.worker.reconnecting import BROKEN
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)

TAKEOVER = 10.0
"""Seconds to wait in all for the ends of transactions that were told to end, and for the rows of
their attempts.  The timeouts of the worker's other handlers wait meanwhile."""
FOR_JOB = 0.5
"""Seconds to wait for the row of one job, which an application may lock for hours."""


def stop_cut_off(runs: Iterable[RunningAttempt]) -> None:
    """Tell handlers to stop if their transaction has ended with its connection.

    A handler that computes for hours would notice only at its next statement.
    """
    for run in runs:
        if not run.is_cancelled() and run.is_cut_off:
            run.ask_to_stop()
            logger.warning(
                "job %s: the connection of its transaction has ended while it runs; what is not "
                "committed is lost",
                run.claimed.job_id,
            )


@contextmanager
def staying(runs: Iterable[RunningAttempt]) -> Iterator[None]:
    """Keep these attempts from leaving their server processes and ending their transactions."""
    with ExitStack() as kept:
        for run in runs:
            kept.enter_context(run.leaving)
        yield


def late(run: RunningAttempt) -> Outcome:
    """The outcome of an attempt that is past its timeout."""
    logger.warning(
        "job %d %s: past its timeout; its thread is abandoned", run.claimed.job_id, run.task.name
    )
    if run.is_settled:
        return Succeeded()  # by ctx.finish(): nothing is left to settle
    error = too_late(run.task)
    return after_error(run.task, run.claimed, error, end=AttemptEnd.TIMEOUT)


def end_transactions(
    runtime: WorkerRuntime, runs: Iterable[RunningAttempt]
) -> list[RunningAttempt]:
    """End the server processes of attempts in :func:`staying`: their writes are rolled back.

    Returns attempts it could not end: the database is away, or has no connection left.
    """
    left = [run for run in runs if run.server_process is not None]
    if left:
        with (
            _reporting("transactions"),
            own_connection(runtime.engine, OWN, purpose="timeouts") as connection,
        ):
            for run in tuple(left):
                pid = run.server_process
                with _reporting(f"job {run.claimed.job_id}"):
                    if pid is not None:
                        Workers(connection).terminate_backend(pid)
                    left.remove(run)
    return left


def settle_from_outside(
    runtime: WorkerRuntime,
    outcomes: Iterable[tuple[RunningAttempt, Outcome]],
    *,
    seconds: float = TAKEOVER,
) -> list[tuple[RunningAttempt, Outcome]]:
    """Settle attempts whose threads do not return: end each transaction, take over its message.

    Call in :func:`staying`.  Waits for locks for ``seconds`` in all, in equal shares of the time
    left.  Returns attempts it could not settle, as :func:`end_transactions` does.
    """
    left = list(outcomes)
    deadline = time.monotonic() + seconds
    with (
        _unfinished(runtime),
        _reporting("attempts"),
        own_connection(
            runtime.engine, OWN, isolation_level="READ COMMITTED", purpose="timeouts"
        ) as connection,
    ):
        for place, (run, outcome) in enumerate(todo := tuple(left)):
            share = (deadline - time.monotonic()) / (len(todo) - place)
            with _reporting(f"job {run.claimed.job_id}"):
                settled = _take_over(runtime, connection, run, outcome, seconds=share)
                if settled is not None:
                    end(connection)
                    runtime.note_times(run)
                    runtime.buffer.settled([(run.claimed, outcome)], settled)
                left.remove((run, outcome))
            connection.rollback()
    return left


def _take_over(
    runtime: WorkerRuntime,
    connection: Connection,
    run: RunningAttempt,
    outcome: Outcome,
    *,
    seconds: float,
) -> list[Settled] | None:
    """The attempt if its outcome was written; None if there is nothing to commit."""
    if run.backend_pid is None:
        return None
    _wait_for_locks(connection, seconds)
    attempts = Attempts(connection, runtime.identity.worker_id)
    # First: the transaction's end frees the message, and the next claim would count a crash.
    is_ours = attempts.keep_lease(run.claimed)
    if (pid := run.server_process) is not None:
        Workers(connection).terminate_backend(pid)
    if not is_ours:
        return None  # settled after all, or its job is being deleted
    if attempts.wait_for_message(run.claimed):
        attempts.take_message(run.claimed)
    _wait_for_locks(connection, min(seconds, FOR_JOB))
    # If the job has ended, this deletes only its lease.
    return attempts.settle([(run.claimed, outcome)], held=True)


def _wait_for_locks(connection: Connection, seconds: float) -> None:
    """Set the lock timeout for this transaction only: a pooler may forget session settings."""
    milliseconds = max(int(1000 * seconds), 1)  # 0 would mean no limit
    connection.exec_driver_sql(set_local([("lock_timeout", milliseconds)]))


@contextmanager
def _unfinished(runtime: WorkerRuntime) -> Iterator[None]:
    """Keep ``run_until_empty`` from ending.

    Another slot may claim the message of such an attempt as soon as its transaction has ended, and
    give it back because the attempt is not over: the worker then knows of no job until the settle.
    """
    runtime.settles_from_outside = True
    try:
        yield
    finally:
        runtime.settles_from_outside = False


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Log errors of the database, and go on after the block."""
    try:
        yield
    except BROKEN as failure:
        logger.warning("%s: not ended from outside: %s", what, failure)
