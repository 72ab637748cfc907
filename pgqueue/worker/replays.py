"""Replays: a handler whose transaction could not be serialized runs again in the same attempt."""

import random
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.execution import CancelWins, Stale
from pgqueue.repository import Attempts
from pgqueue.unit_of_work import begin_for_handler
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)

SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
MOST = 5
FIRST_PAUSE = 0.02
"""Seconds; doubles with each replay."""


class Replays:
    """The transaction of one attempt in lease mode, and how often it may begin again.

    A job with ``max_attempts=1`` is not replayed: its handler must not start twice.
    """

    def __init__(self, runtime: WorkerRuntime, run: RunningAttempt, limits: str) -> None:
        self._runtime = runtime
        self._run = run
        self._most = MOST if run.claimed.max_attempts > 1 else 0
        self._done = 0
        self.begin: Callable[[Connection], None] = partial(
            begin_for_handler, limits=limits, isolation_level=runtime.isolation_level
        )

    def are_due(self, error: BaseException) -> bool:
        """Whether after this error the transaction may succeed if it begins again."""
        if self._run.is_lost:
            return False
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        return state in (SERIALIZATION_FAILURE, DEADLOCK) and self._done < self._most

    def prepare(self, connection: Connection, error: BaseException | None) -> None:
        """End the failed transaction before the next begins; raises Stale or CancelWins.

        A REPEATABLE READ transaction fails at rows that others have changed since it began.  The
        change may be the rescue of its lease or the cancel of its job: the handler must then not
        run again.
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
            self._most,
            getattr(error, "orig", error),
        )

    def pause(self) -> float:
        """Seconds to wait, so that the conflicting transactions do not meet again."""
        return FIRST_PAUSE * 2.0**self._done * random.uniform(0.25, 0.5)  # noqa: S311  # no secret
