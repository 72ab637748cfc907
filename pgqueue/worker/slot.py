"""The slots: the threads that run handlers."""

import asyncio
from functools import partial

from sqlalchemy.util import greenlet_spawn

from pgqueue import execution, redaction
from pgqueue.context import Finishing as AnyFinishing
from pgqueue.context import JobContext, nothing_around
from pgqueue.outcomes import Exhausted, Outcome
from pgqueue.repository.claim import Claimed
from pgqueue.worker.finishing import Finishing
from pgqueue.worker.handler_transactions import (
    PoolTransaction,
    obstacle,
    run_in_pool_transaction,
)
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

NO_CONTEXT = JobContext(0, 0, 0, "", "")
"""For handlers that ask for no context, if nothing around them asks for one."""


class Slot(WorkerThread):
    """Takes a job from the buffer, runs it, and passes its outcome to the settler."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        super().__init__(name="slot")
        self.runtime = runtime
        self.current: RunningAttempt | None = None
        self.ran = 0
        self.busy = 0.0
        """Seconds spent on the jobs that have run in this slot."""
        self._brought_back: Claimed | None = None

    def work(self) -> None:
        while (claimed := self._next()) is not None:
            if not self.runtime.may_start(claimed):
                continue
            run = self._begin(claimed)
            if run.task.is_async:
                is_ours = self.runtime.loop.wait_for(self._work_on_loop(run))
            else:
                is_ours = self._end(run, self._outcome_of(run))
            if not is_ours:
                return  # another thread has taken this slot

    def _next(self) -> Claimed | None:
        claimed, self._brought_back = self._brought_back, None
        return claimed or self.runtime.buffer.take()

    def _begin(self, claimed: Claimed) -> RunningAttempt:
        run = self.current = self.runtime.run_of(claimed)
        return run

    def _end(self, run: RunningAttempt, outcome: Outcome | None) -> bool:
        """Pass an attempt's outcome to the settler; False if another thread has the slot now."""
        self.current = None
        is_first = run.finish()
        self.ran += 1
        self.busy += run.ended_at - run.started_at
        if is_first:
            if outcome is not None and not run.is_settled:
                if self.runtime.events is not None:
                    self.runtime.note_times(run)
                self.runtime.ledger.done(run.claimed, outcome)
            return True
        return not run.is_abandoned

    def _outcome_of(self, run: RunningAttempt) -> Outcome | None:
        try:
            return run_handler(self.runtime, run)
        except Exception as error:
            return _after_mistake(run, error)

    async def _work_on_loop(self, run: RunningAttempt) -> bool:
        """Run an async job, and those that come next: waking two threads for each job would
        take longer than a quick handler."""
        while True:
            # One asyncio task for each job: a job must not see context variables of another.
            outcome = await asyncio.create_task(self._outcome_of_async(run))
            if not self._end(run, outcome):
                return False
            claimed = self.runtime.buffer.take_now()
            if claimed is None:
                return True
            if not (
                self.runtime.tasks[claimed.task].is_async and self.runtime.may_start_now(claimed)
            ):
                self._brought_back = claimed
                return True
            run = self._begin(claimed)

    async def _outcome_of_async(self, run: RunningAttempt) -> Outcome | None:
        try:
            return await run_async_handler(self.runtime, run)
        except Exception as error:
            return _after_mistake(run, error)


def run_handler(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Run one attempt; None if it is settled already."""
    task, claimed = run.task, run.claimed
    if claimed.attempt > claimed.max_attempts:
        return Exhausted()
    if task.asks_before_start and (outcome := obstacle(runtime, run)) is not None:
        return outcome
    if task.in_process:
        return runtime.children.run(run)
    if task.is_transactional:
        return run_in_pool_transaction(runtime, run)
    context = _context_of(runtime, run)
    return execution.run(task, claimed, context, around=runtime.around_handlers)


async def run_async_handler(runtime: WorkerRuntime, run: RunningAttempt) -> Outcome | None:
    """Like :func:`run_handler`, for an async handler on the event loop."""
    task, claimed = run.task, run.claimed
    if claimed.attempt > claimed.max_attempts:
        return Exhausted()
    if task.asks_before_start:
        outcome = await asyncio.to_thread(obstacle, runtime, run)
        if outcome is not None:
            return outcome
    if task.is_transactional:
        return await greenlet_spawn(run_in_pool_transaction, runtime, run)
    context = _context_of(runtime, run)
    around = runtime.around_async_handlers
    return await execution.run_async(task, claimed, context, around=around)


def _context_of(runtime: WorkerRuntime, run: RunningAttempt) -> JobContext:
    is_asked_for = run.task.injection.parameters or runtime.around_handlers is not nothing_around
    if not is_asked_for:
        return NO_CONTEXT
    return run.context(finishing=partial(_finishing_of, runtime, run))


def _finishing_of(runtime: WorkerRuntime, run: RunningAttempt) -> AnyFinishing:
    if run.finishing is None:
        run.finishing = Finishing(PoolTransaction(runtime, run))
    return run.finishing


def _after_mistake(run: RunningAttempt, error: Exception) -> Outcome:
    """Fail the attempt after an error in pgqueue itself, which must not end the slot."""
    logger.exception("job %s: the worker failed around its handler", run.claimed.job_id)
    return execution.after_error(run.task, run.claimed, error)
