"""What is done to a run from outside of its thread, when that thread does not come back.

On connections of its own: those of the pool may all be held by threads that do not come back.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.network import NETWORK
from pgqueue.outcomes import Outcome
from pgqueue.repository import Attempts, Fleet
from pgqueue.unit_of_work import own_connection
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.line import BROKEN
from pgqueue.worker.workbench import WORDS

logger = redaction.logger(__name__)

BRIEFLY = "SET LOCAL lock_timeout = 10000"
"""Milliseconds to wait for the end of a transaction that was told to end.  For this transaction
only: a pooler may forget what was set for a session, and this would wait for ever."""


@contextmanager
def staying(runs: Sequence[Run]) -> Iterator[None]:
    """While none of these runs leaves its server process, nor ends its transaction by itself."""
    with ExitStack() as kept:
        for run in runs:
            kept.enter_context(run.leaving)
        yield


def end_transaction(crew: Crew, run: Run) -> None:
    """End the server process of a run that stays: what its handler wrote rolls back."""
    if run.backend_pid is not None:
        with own_connection(crew.engine, NETWORK) as connection:
            Fleet(connection).terminate_backend(run.backend_pid)


def settle_from_outside(crew: Crew, runs: Sequence[Run], outcome: Outcome) -> None:
    """Settle attempts whose threads do not come back: end each T, and take over its message.

    The runs are staying.
    """
    with own_connection(crew.engine, NETWORK, isolation_level="READ COMMITTED") as connection:
        for run in runs:
            try:
                if _take_over(crew, connection, run, outcome):
                    connection.commit()
                    crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
            except BROKEN as failure:
                logger.warning("job %s: %s", run.claimed.job_id, failure)
            connection.rollback()


def _take_over(crew: Crew, connection: Connection, run: Run, outcome: Outcome) -> bool:
    if run.backend_pid is None:
        return False
    connection.exec_driver_sql(BRIEFLY)
    attempts = Attempts(connection, crew.presence.worker_id)
    # First: the end of T frees the message, and whoever meets it would stamp it as a crash.
    is_ours = attempts.keep_lease(run.claimed)
    Fleet(connection).terminate_backend(run.backend_pid)
    if not is_ours:
        return False  # settled after all, or its job is being deleted
    if attempts.wait_for_message(run.claimed):
        attempts.take_message(run.claimed)
    attempts.settle([(run.claimed, outcome)], held=True)  # of a job that has ended, its lease alone
    return True
