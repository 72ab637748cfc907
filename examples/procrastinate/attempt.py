"""One run of a job: calls its task, and says how it has ended."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pgqueue
from pgqueue import Cancel, RetryLater, Snooze

from .exceptions import JobAborted, TaskNotFound
from .job_context import JobContext
from .jobs import ABORTED, Job
from .priorities import priority_of

if TYPE_CHECKING:
    from .app import App

logger = logging.getLogger("procrastinate.worker")


class Attempt:
    """An attempt of pgqueue, seen from a task of Procrastinate."""

    def __init__(
        self, app: "App", name: str, context: pgqueue.JobContext, kwargs: dict[str, Any]
    ) -> None:
        own = context.meta.get("procrastinate", {})
        self._app, self._context, self._worker = app, context, app.worker
        self._task = app.tasks.get(name)
        self._began = time.time()
        self.job = Job(
            id=context.job_id,
            queue=context.queue,
            task_name=name,
            task_kwargs=app.connector.loaded(kwargs),
            attempts=context.attempt - 1,
            **own,
        )

    def call(self) -> Any:
        """Call the function; a coroutine function returns its coroutine."""
        if self._task is None:
            raise TaskNotFound(f"there is no task {self.job.task_name}")
        logger.info("Starting job %s", self.job.call_string)
        if self._task.pass_context:
            return self._task(self._task_context(), **self.job.task_kwargs)
        return self._task(**self.job.task_kwargs)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """End the attempt as Procrastinate would, by what pgqueue calls it."""
        strategy = None if self._task is None else self._task.retry_strategy
        try:
            yield
        except (JobAborted, asyncio.CancelledError) as error:
            if self._context.is_stopping() and strategy is not None:
                self._log("Aborted, to retry")
                raise Snooze(timedelta(0)) from error
            self._log("Aborted")
            raise Cancel(ABORTED) from error
        except Exception as error:
            decision = None
            if strategy is not None:
                decision = strategy.get_retry_decision(exception=error, job=self.job)
            if decision is None:
                self._log("Error")
                raise
            self._log("Error, to retry")
            raise RetryLater(
                decision.delay,
                queue=decision.queue,
                priority=None if decision.priority is None else priority_of(decision.priority),
            ) from error
        self._log("Success")

    def _should_abort(self) -> bool:
        """Whether an abort was asked for, or the worker waits no longer for its jobs."""
        is_late = self._worker is not None and self._worker.is_out_of_patience
        return self._context.is_cancelled() or is_late

    def _task_context(self) -> JobContext:
        assert self._task is not None, "it was called"
        worker = self._worker
        return JobContext(
            app=self._app,
            task=self._task,
            job=self.job,
            worker_name=None if worker is None else worker.name,
            worker_queues=None if worker is None else worker.queues,
            start_timestamp=self._began,
            should_abort=self._should_abort,
            additional_context={} if worker is None else worker.additional_context,
        )

    def _log(self, end: str) -> None:
        """Log the end; pgqueue logs the error."""
        lasted = time.time() - self._began
        words = "Job %s ended with status: %s, lasted %.3f s"
        logger.info(words, self.job.call_string, end, lasted)
