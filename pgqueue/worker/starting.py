"""What is asked of the database before a handler starts, for the tasks whose options ask for it.

One short transaction for each such attempt, on a connection of the pool, committed before the
handler is called.  Other tasks cost nothing.
"""

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pgqueue import execution, redaction
from pgqueue.connections.autocommit import autocommitting
from pgqueue.outcomes import Outcome, Released
from pgqueue.repository import Attempts
from pgqueue.worker.handler_transactions import after_broken_connection
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)


def obstacle(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Return the outcome of an attempt whose handler must not start; None if it may.

    A job whose row another transaction keeps locked is given back, and claimed again later.
    """
    try:
        with autocommitting(runtime.engine) as connection:
            attempts = Attempts(connection, run.worker_id)
            return execution.obstacle(run.task, attempts, run.claimed, is_alone=True)
    except (DBAPIError, PoolTimeout) as error:
        if isinstance(error, DBAPIError) and is_lock_timeout(error):
            logger.info(
                "job %d: another transaction has locked its row, so it starts later",
                run.claimed.job_id,
            )
            return Released()
        return after_broken_connection(runtime, run, error)
