"""What is done to a run from outside of its thread, when that thread does not come back.

On connections of its own: those of the pool may all be held by threads that do not come back.
"""

from pgqueue.network import NETWORK
from pgqueue.outcomes import Outcome
from pgqueue.repository import Attempts, Fleet
from pgqueue.unit_of_work import own_connection
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.workbench import WORDS

TAKING_OVER = {**NETWORK, "lock_timeout": "10000"}
"""Milliseconds to wait for the end of a transaction that was told to end."""


def end_transaction(crew: Crew, run: Run) -> None:
    """End the server process of a run's transaction: what its handler wrote rolls back."""
    with run.staying() as pid:
        if pid is not None:
            with own_connection(crew.engine, NETWORK) as connection:
                Fleet(connection).terminate_backend(pid)


def settle_from_outside(crew: Crew, run: Run, outcome: Outcome) -> None:
    """Settle an attempt whose thread does not come back: end its T, and take over its message."""
    with own_connection(crew.engine, TAKING_OVER, isolation_level="READ COMMITTED") as connection:
        with run.staying() as pid:
            if pid is None:
                return
            Fleet(connection).terminate_backend(pid)
        # The server ends T in a moment, and then gives the message to whoever waits for it: us.
        attempts = Attempts(connection, crew.presence.worker_id)
        if not attempts.wait_for_message(run.claimed) or not attempts.take_message(run.claimed):
            return  # settled after all, by its own T or by another worker
        if not attempts.settle([(run.claimed, outcome)], held=True):
            return  # another had it in between: the message, back with this rollback, is its next
        connection.commit()
        crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
