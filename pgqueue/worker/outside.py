"""What is done to a run from outside of its thread, when that thread does not come back.

On connections of its own: those of the pool may all be held by threads that do not come back.
"""

from pgqueue.outcomes import Outcome
from pgqueue.repository import Attempts, Fleet
from pgqueue.unit_of_work import NETWORK, own_connection
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.transactional import was_committed
from pgqueue.worker.workbench import WORDS


def end_transaction(crew: Crew, run: Run) -> None:
    """End the server process of a run's transaction: what its handler wrote rolls back."""
    with run.staying() as pid:
        if pid is not None:
            with own_connection(crew.engine, NETWORK) as connection:
                Fleet(connection).terminate_backend(pid)


def settle_from_outside(crew: Crew, run: Run, outcome: Outcome) -> None:
    """Settle an attempt whose thread does not come back: end its T, and take over its message."""
    pid = run.backend_pid
    end_transaction(crew, run)
    if pid is None or was_committed(crew, run, pid) is not False:
        return
    with (
        own_connection(crew.engine, NETWORK, isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        attempts = Attempts(connection, crew.presence.worker_id)
        if not attempts.take_message(run.claimed):
            return  # another has found it already, and counts the attempt as crashed
        attempts.settle([(run.claimed, outcome)], held=True)
    crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
