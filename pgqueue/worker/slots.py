"""Slots: the threads that run handlers."""

import time

from pgqueue import execution, redaction
from pgqueue.context import JobContext, nothing_around
from pgqueue.outcomes import Exhausted, Outcome
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.loops import Loop
from pgqueue.worker.transactional import run_in_async_transaction, run_in_transaction

logger = redaction.logger(__name__)

NO_CONTEXT = JobContext(0, 0, 0, "", "")
"""For handlers that do not ask for one, with nothing around them that does."""


class Slot(Loop):
    """Lease mode: takes a job from the workbench, runs it, hands its outcome to the settler."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(name="slot")
        self.crew = crew
        self.current: Run | None = None
        self.ran = 0
        self.busy = 0.0
        """Seconds spent on the jobs that have run here."""

    def work(self) -> None:
        bench = self.crew.bench
        while (claimed := bench.take()) is not None:
            if not self.crew.may_start(claimed):
                continue
            run = self.current = Run(claimed, self.crew.tasks[claimed.task])
            outcome = self._outcome_of(run)
            self.current = None
            self.ran += 1
            self.busy += time.monotonic() - run.started_at
            if run.finish():
                if outcome is not None:
                    bench.done(claimed, outcome)
            elif run.is_abandoned:
                return  # another thread has taken this slot

    def _outcome_of(self, run: Run) -> Outcome | None:
        try:
            return run_handler(self.crew, run)
        except Exception as error:  # a mistake of ours must not cost the worker a slot
            logger.exception("job %s: the worker failed around its handler", run.claimed.job_id)
            return execution.after_error(run.task, run.claimed, error)


def run_handler(crew: Crew, run: Run) -> Outcome | None:
    """Run one attempt in lease mode; None when it is settled already."""
    task, claimed = run.task, run.claimed
    if claimed.attempt > claimed.max_attempts:
        return Exhausted()
    if task.address is not None:
        return crew.children.run(run)
    if task.is_transactional:
        if task.is_async:
            return crew.loop.run(run_in_async_transaction(crew, run))
        return run_in_transaction(crew, run)
    is_asked_for = task.injection.parameters or crew.around is not nothing_around
    context = run.context() if is_asked_for else NO_CONTEXT
    if task.is_async:
        verdict = crew.loop.run(execution.run_async(task, claimed, context, around=crew.around))
        return verdict.outcome
    return execution.run(task, claimed, context, around=crew.around).outcome
