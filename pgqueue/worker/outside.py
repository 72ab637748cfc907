"""What is done to a run from outside of its thread, when that thread does not come back.

On connections of its own: those of the pool may all be held by threads that do not come back.
"""

from collections.abc import Sequence

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

TAKING_OVER = {**NETWORK, "lock_timeout": "10000"}
"""Milliseconds to wait for the end of a transaction that was told to end."""


def end_transaction(crew: Crew, run: Run) -> None:
    """End the server process of a run's transaction: what its handler wrote rolls back."""
    with run.staying() as pid:
        if pid is not None:
            with own_connection(crew.engine, NETWORK) as connection:
                Fleet(connection).terminate_backend(pid)


def settle_from_outside(crew: Crew, runs: Sequence[Run], outcome: Outcome) -> None:
    """Settle attempts whose threads do not come back: end each T, and take over its message."""
    with own_connection(crew.engine, TAKING_OVER, isolation_level="READ COMMITTED") as connection:
        for run in runs:
            try:
                if _take_over(crew, connection, run, outcome):
                    connection.commit()
                    crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
            except BROKEN as failure:
                logger.warning("job %s: %s", run.claimed.job_id, failure)
            connection.rollback()


def _take_over(crew: Crew, connection: Connection, run: Run, outcome: Outcome) -> bool:
    with run.staying() as pid:
        if pid is None:
            return False
        Fleet(connection).terminate_backend(pid)
    # The server ends T in a moment, and then gives the message to whoever waits for it: us.
    attempts = Attempts(connection, crew.presence.worker_id)
    if not attempts.wait_for_message(run.claimed) or not attempts.take_message(run.claimed):
        return False  # settled after all, by its own T or by another worker
    # None settled: another had it in between, and the message, rolled back to, is its next.
    return bool(attempts.settle([(run.claimed, outcome)], held=True))
