"""The slots: the threads that run handlers."""

import asyncio
from contextvars import copy_context
from functools import cache
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pgqueue import redaction
from pgqueue.database.autocommit import autocommitting
from pgqueue.database.opening import ConnectFailed, isolation_of
from pgqueue.database.unit_of_work import server_error
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import log_fields
from pgqueue.handler.outcome import after_error, obstacle
from pgqueue.handler.run import run_async_attempt, run_attempt
from pgqueue.handler.steps import AttemptSteps
from pgqueue.handler.transaction import FAILURES, AttemptTransaction, LeasePassedOn
from pgqueue.outcomes import Outcome, Released
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.tasks import Task
from pgqueue.worker.outage import is_away, words_of
from pgqueue.worker.pool_transaction import KeptConnection, PoolTransaction
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

WAIT_FOR_CONNECTION = 0.5
"""Seconds after which a job that has found no connection is released."""


def steps_in_child(runtime: WorkerRuntime, attempt: RunningAttempt) -> AttemptSteps:
    """The steps of a handler in a child process, which has a copy of the runtime from before the
    worker's first connection."""

    def transaction(of: RunningAttempt) -> PoolTransaction:
        runtime.isolation_level = cached_isolation_of(runtime.engine)
        return PoolTransaction(runtime, of)

    return AttemptSteps(attempt, transaction, runtime.around_finish, runtime.application)


cached_isolation_of = cache(isolation_of)


def _may_keep(task: Task[..., Any]) -> bool:
    """Whether a handler has a connection all the time that it runs."""
    return task.is_transactional and not task.is_async


class Slot(WorkerThread):
    """Takes a job from the buffer, runs it, and passes its outcome to the settler.

    It is the ``Host`` of its attempts.
    """

    def __init__(self, runtime: WorkerRuntime) -> None:
        super().__init__(name="slot")
        self.runtime = runtime
        self.around = runtime.around_handlers
        self.around_async = runtime.around_async_handlers
        self.around_finish = runtime.around_finish
        self.application = runtime.application
        self.current: RunningAttempt | None = None
        self.ran = 0
        """Number of jobs that have run in this slot."""
        self.busy = 0.0
        """Seconds spent on the jobs that have run in this slot."""
        self._kept = KeptConnection(runtime.engine)
        self._brought_back: Claimed | None = None
        """A job that was taken on the event loop and must begin in this thread."""

    def work(self) -> None:
        while (claimed := self._next()) is not None:
            if not self.runtime.may_start(claimed):
                continue  # it was released
            if (attempt := self._set_current(claimed)) is None:
                continue
            if self._kept.held is not None and not _may_keep(attempt.task):
                self._kept.close()
            if attempt.task.is_async:
                has_slot = self.runtime.loop.wait_for(self._work_on_loop(attempt))
            else:
                try:
                    # A context variable that one handler sets is not set in the next.
                    outcome = copy_context().run(run_attempt, attempt, self)
                except Exception as error:
                    outcome = self._outcome_after_error(attempt, error)
                has_slot = self._end(attempt, outcome)
            if not has_slot:
                return  # another thread has taken this slot

    async def _work_on_loop(self, attempt: RunningAttempt) -> bool:
        """Run an async job, and the async jobs after it; False if another thread has the slot now.

        Waking two threads for each job would take longer than a quick handler.
        """
        while True:
            # One asyncio task for each job: a job must not see context variables of another.
            try:
                outcome = await asyncio.create_task(run_async_attempt(attempt, self))
            except Exception as error:
                outcome = await asyncio.to_thread(self._outcome_after_error, attempt, error)
            if not self._end(attempt, outcome):
                return False
            claimed = self.runtime.buffer.take_now()
            if claimed is None:
                return True
            if not (self.runtime.tasks[claimed.task].is_async and self.runtime.identity.is_fresh):
                self._brought_back = claimed
                return True
            if (begun := self._set_current(claimed)) is None:
                return True
            attempt = begun

    def _next(self) -> Claimed | None:
        claimed, self._brought_back = self._brought_back, None
        claimed = claimed or self.runtime.buffer.take_now()
        if claimed is None:
            self._kept.close()
            claimed = self.runtime.buffer.take()
        return claimed

    def _set_current(self, claimed: Claimed) -> RunningAttempt | None:
        """Begin an attempt; None if the job is no longer this worker's.

        The heartbeat of a worker that was declared dead forgets all jobs, and then gives up the
        attempts that it sees.  So the attempt is seen here before the job is looked up.
        """
        attempt = self.current = self.runtime.attempt_of(claimed)
        if self.runtime.ledger.knows(claimed):
            return attempt
        self.current = None
        return None

    def _end(self, attempt: RunningAttempt, outcome: Outcome | None) -> bool:
        """Pass an attempt's outcome to the settler; False if another thread has the slot now."""
        is_first = attempt.finish()  # False: another thread has taken the attempt
        self.ran += 1
        self.busy += attempt.ended_at - attempt.started_at
        if is_first:
            self.runtime.ledger.ran(attempt, outcome)
        self.current = None  # after the outcome was passed on: an interrupt waits for it
        return is_first or not attempt.is_abandoned

    def _outcome_after_error(self, attempt: RunningAttempt, error: Exception) -> Outcome | None:
        """The outcome after an error outside of the handler; None if nothing is left to settle.

        Pauses if there was no connection.
        """
        claimed, fields = attempt.claimed, log_fields(attempt.claimed)
        if isinstance(error, LeasePassedOn):
            words = "job %s: its lease had passed on, its writes are undone"
            logger.warning(words, claimed.job_id, extra=fields)
            self.runtime.ledger.stale(claimed)
            return None
        if isinstance(error, DBAPIError | PoolTimeout | ConnectFailed) and not attempt.has_begun:
            if isinstance(error, DBAPIError) and is_away(error):
                # A connection from the pool may have broken in an outage that is over: -inf begins
                # no new one.
                opened_at = float("-inf") if error.connection_invalidated else attempt.started_at
                name = f"job {claimed.job_id}"
                # Logs an outage once, not for each job that was claimed before it.
                self.runtime.outage.record_error(error, name=name, opened_at=opened_at)
            else:
                reason = words_of(error)
                words = "job %s: no connection for its handler: %s"
                logger.warning(words, claimed.job_id, reason, extra=fields)
            # Without a pause the job would be claimed again in a loop.
            self.runtime.stopping.wait(WAIT_FOR_CONNECTION)
            return Released()
        if not (attempt.has_begun and isinstance(error, FAILURES)):
            # Not an error of the settle or the COMMIT, so one in pgqueue itself, which must not end
            # the slot.
            words = "job %s: the worker failed around its handler"
            logger.exception(words, claimed.job_id, extra=fields)
        return after_error(attempt.task, claimed, server_error(error))

    def ask_before_start(self, attempt: RunningAttempt) -> Outcome | None:
        """Ask the database whether the handler may start, in a short transaction of its own.

        A job whose row another transaction keeps locked is released, and claimed again later.
        """
        try:
            with autocommitting(self.runtime.engine) as connection:
                attempts = Attempts(connection, attempt.worker_id)
                return obstacle(attempt.task, attempts, attempt.claimed, in_own_transaction=True)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            logger.info(
                "job %d: another transaction has locked its row, so it starts later",
                attempt.claimed.job_id,
                extra=log_fields(attempt.claimed),
            )
            return Released()

    def run_in_child(self, attempt: RunningAttempt) -> Outcome:
        return self.runtime.children.run(attempt)

    def transaction(self, attempt: RunningAttempt) -> AttemptTransaction:
        return PoolTransaction(
            self.runtime, attempt, self._kept if _may_keep(attempt.task) else None
        )
