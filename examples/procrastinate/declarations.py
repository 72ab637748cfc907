"""The tasks of an application as tasks of pgqueue.

Each is declared twice, because there a limit belongs to a task, and here a lock to a job: once
without a limit, and once, with another name, for jobs that have a lock.
"""

import asyncio
from datetime import datetime
from threading import Lock
from typing import TYPE_CHECKING, Any

import pgqueue
from pgqueue import Limit, PgQueue, Retry, Unique

from .attempt import Attempt
from .periodic import PeriodicTask
from .priorities import priority_of
from .tasks import Task

if TYPE_CHECKING:
    from .app import App
    from .jobs import Job

LOCKED = ":locked"
"""The end of the name of a task of pgqueue, for jobs with a lock."""
MOST_ATTEMPTS = 30_000
LIMIT = Limit(1, by="lock", name="procrastinate.lock", order="strict")


def queueing(key: str | None) -> Unique:
    """The uniqueness of jobs with this queueing lock; without one, of no job."""
    return Unique(
        key=key if key is not None else lambda lock: None,
        until="started",
        on_conflict="raise",
        across="queues",
    )


def meta_of(job: "Job") -> dict[str, Any]:
    """What a running job knows of itself beside its arguments."""
    own = {"priority": job.priority, "lock": job.lock, "queueing_lock": job.queueing_lock}
    return {"procrastinate": own}


class Declarations:
    """The ``PgQueue`` of an application, whose tasks may be defined after it."""

    def __init__(self, app: "App", queue: PgQueue) -> None:
        self._app, self._queue = app, queue
        self._declared: dict[str, pgqueue.Task[..., Any]] = {}
        self._changing = Lock()

    def complete(self) -> PgQueue:
        """Return the queue, when all tasks are declared."""
        with self._changing:
            for task in dict.fromkeys(self._app.tasks.values()):
                if task.name not in self._declared:
                    self._declare(task.name, task)
        return self._queue

    def find(self, job: "Job") -> pgqueue.Task[..., Any]:
        """Return the task of pgqueue for a job.  The code of its task may be elsewhere."""
        self.complete()
        known = self._app.tasks.get(job.task_name)
        name = job.task_name if known is None else known.name
        with self._changing:
            if name not in self._declared:
                self._declare(name, None)
        return self._declared[name if job.lock is None else name + LOCKED]

    def _declare(self, name: str, task: Task | None) -> None:
        names = [] if task is None else [one for one, of in self._app.tasks.items() if of is task]
        retries = None if task is None else task.most_retries
        for end, limits in (("", []), (LOCKED, [LIMIT])):
            declare = self._queue.task(
                name=name + end,
                aliases=[alias + end for alias in names if alias != name],
                # Attempt decides which error is retried, and when.
                max_attempts=MOST_ATTEMPTS if retries is None else min(retries + 1, MOST_ATTEMPTS),
                retry=Retry.never(),
                unique=queueing(None),
                limit=limits,
            )
            is_async = task is not None and asyncio.iscoroutinefunction(task.func)
            handler = self._async_handler(name) if is_async else self._handler(name)
            self._declared[name + end] = declare(handler)
        for periodic in self._app.periodic_tasks:
            if periodic.task is task:
                self._schedule(periodic)

    def _schedule(self, periodic: PeriodicTask) -> None:
        job = periodic.task.configure(**periodic.options).job
        options: dict[str, Any] = {"queue": job.queue, "priority": priority_of(job.priority)}
        if job.queueing_lock is not None:
            options["unique_key"] = job.queueing_lock

        def arguments(tick: datetime) -> dict[str, Any]:
            kwargs = self._app.connector.stored(dict(periodic.kwargs(tick)))
            return {"kwargs": kwargs, "lock": job.lock}

        name = f"{job.task_name}:{periodic.periodic_id}" if periodic.periodic_id else job.task_name
        declare = self._queue.schedule(
            name=name, args=arguments, meta=meta_of(job), **periodic.rule, **options
        )
        declare(self._declared[job.task_name if job.lock is None else job.task_name + LOCKED])

    def _handler(self, name: str) -> Any:
        def handle(ctx: pgqueue.JobContext, kwargs: dict[str, Any], lock: str | None = None) -> Any:
            attempt = Attempt(self._app, name, ctx, kwargs)
            with attempt.judged():
                return attempt.call()

        return handle

    def _async_handler(self, name: str) -> Any:
        async def handle(
            ctx: pgqueue.JobContext, kwargs: dict[str, Any], lock: str | None = None
        ) -> Any:
            attempt = Attempt(self._app, name, ctx, kwargs)
            with attempt.judged():
                return await attempt.call()

        return handle
