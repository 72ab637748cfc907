"""A function, and what defers calls of it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .jobs import Job
from .retry import BaseRetryStrategy, strategy_of

if TYPE_CHECKING:
    from .app import App, Blueprint


class Options(TypedDict, total=False):
    """What may differ from one job of a task to the next."""

    lock: str | None
    queueing_lock: str | None
    task_kwargs: Mapping[str, Any] | None
    schedule_at: datetime | None
    schedule_in: Mapping[str, int] | None
    queue: str | None
    priority: int | None
    connection: Any


class JobDeferrer:
    """Defers jobs that have the same options."""

    def __init__(self, app: "App", job: Job, connection: Any = None) -> None:
        """``connection``: a Session or Connection of SQLAlchemy, whose transaction is joined."""
        self.job = job
        self._app, self._connection = app, connection

    def defer(self, **task_kwargs: Any) -> int:
        """Return the id of the new job."""
        [id] = self.batch_defer(task_kwargs)
        return id

    def batch_defer(self, *task_kwargs: Mapping[str, Any]) -> list[int]:
        """Return the ids of the new jobs."""
        jobs = [
            replace(self.job, task_kwargs={**self.job.task_kwargs, **one}) for one in task_kwargs
        ]
        return self._app.job_manager.defer_jobs(jobs, connection=self._connection)

    async def defer_async(self, **task_kwargs: Any) -> int:
        return await asyncio.to_thread(self.defer, **task_kwargs)

    async def batch_defer_async(self, *task_kwargs: Mapping[str, Any]) -> list[int]:
        return await asyncio.to_thread(self.batch_defer, *task_kwargs)


class Task:
    """A function of an application or a blueprint."""

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        blueprint: "Blueprint",
        name: str | None = None,
        aliases: Sequence[str] = (),
        retry: bool | int | BaseRetryStrategy = False,
        pass_context: bool = False,
        queue: str = "default",
        priority: int = 0,
        lock: str | None = None,
        queueing_lock: str | None = None,
    ) -> None:
        self.func, self.blueprint = func, blueprint
        self.name = name or f"{func.__module__}.{func.__qualname__}"
        self.aliases = list(aliases)
        self.retry_strategy = strategy_of(retry)
        self.pass_context = pass_context
        self._job = Job(
            task_name=self.name,
            queue=queue,
            priority=priority,
            lock=lock,
            queueing_lock=queueing_lock,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    @property
    def most_retries(self) -> int | None:
        """None if only the strategy knows."""
        return 0 if self.retry_strategy is None else self.retry_strategy.max_attempts

    def configure(self, **options: Unpack[Options]) -> JobDeferrer:
        """Return what defers jobs with other options than those of the task."""
        return deferrer(self.blueprint.bound(), replace(self._job, task_name=self.name), options)

    def defer(self, **task_kwargs: Any) -> int:
        return self.configure().defer(**task_kwargs)

    def batch_defer(self, *task_kwargs: Mapping[str, Any]) -> list[int]:
        return self.configure().batch_defer(*task_kwargs)

    async def defer_async(self, **task_kwargs: Any) -> int:
        return await self.configure().defer_async(**task_kwargs)

    async def batch_defer_async(self, *task_kwargs: Mapping[str, Any]) -> list[int]:
        return await self.configure().batch_defer_async(*task_kwargs)


def deferrer(app: "App", job: Job, options: Options) -> JobDeferrer:
    """Return what defers jobs like this one, with other options."""
    at, span = options.get("schedule_at"), options.get("schedule_in")
    if at is not None and span is not None:
        raise ValueError("give schedule_at or schedule_in, not both")
    if span is not None:
        at = datetime.now(UTC) + timedelta(**span)
    given: dict[str, Any] = {
        name: options.get(name)
        for name in ("lock", "queueing_lock", "queue", "priority")
        if options.get(name) is not None
    }
    kwargs = dict(options.get("task_kwargs") or {})
    job = replace(job, scheduled_at=at, task_kwargs=kwargs, **given)
    return JobDeferrer(app, job, options.get("connection"))
