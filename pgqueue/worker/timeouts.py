"""Ends attempts from outside of their threads, if those threads do not return.

Uses connections of its own: threads that do not return may hold all connections of the pool.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from pgqueue import redaction
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import OWN
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import log_fields
from pgqueue.handler.outcome import after_timeout
from pgqueue.outcomes import Outcome, Succeeded
from pgqueue.repository.workers import Workers
from pgqueue.worker.reconnecting import BROKEN
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)

END_AGAIN = 1.0
"""Seconds between two tries to end transactions."""
NOT_LOOKED_AT = 0.1
"""Seconds for which an attempt runs before its connection is looked at."""


def stop_cut_off(runs: Iterable[RunningAttempt]) -> None:
    """Tell handlers to stop if their transaction has ended with its connection.

    A handler that computes for hours would notice only at its next statement.  Most handlers end
    before they are looked at.
    """
    begun_before = time.monotonic() - NOT_LOOKED_AT
    for run in runs:
        if run.started_at < begun_before and not run.is_cancelled() and run.is_cut_off:
            run.ask_to_stop(ConnectionError("the connection of its transaction ended while it ran"))
            logger.warning(
                "job %s: the connection of its transaction has ended while it runs; what is not "
                "committed is lost",
                run.claimed.job_id,
                extra=log_fields(run.claimed),
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
        "job %d %s: past its timeout; its thread is abandoned",
        run.claimed.job_id,
        run.task.name,
        extra=log_fields(run.claimed),
    )
    if run.is_settled:
        return Succeeded()  # committed: nothing is left to settle
    return after_timeout(run.task, run.claimed)


class Transactions:
    """Ends the transactions of attempts whose threads do not return."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._not_ended: list[RunningAttempt] = []
        """Attempts whose transactions could not be ended."""
        self._tried_at = float("-inf")

    def end(self, runs: Iterable[RunningAttempt]) -> None:
        """End the server processes of attempts in :func:`staying`: their writes are rolled back."""
        left = [run for run in runs if run.server_process is not None]
        if not left:
            return
        self._tried_at = time.monotonic()
        with (
            _reporting("transactions"),
            own_connection(self._runtime.engine, OWN, purpose="timeouts") as connection,
        ):
            for run in tuple(left):
                pid = run.server_process
                with _reporting(f"job {run.claimed.job_id}"):
                    if pid is not None:
                        Workers(connection).terminate_backend(pid)
                    left.remove(run)
        self._not_ended += left

    def end_again(self) -> None:
        """Try again those not ended: the database was away, or had no connection left."""
        if self._not_ended and time.monotonic() - self._tried_at >= END_AGAIN:
            not_ended, self._not_ended = self._not_ended, []
            with staying(not_ended):
                self.end(not_ended)


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Log errors of the database, and go on after the block."""
    try:
        yield
    except BROKEN as failure:
        logger.warning("%s: not ended from outside: %s", what, failure)
