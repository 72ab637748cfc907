"""The application and its blueprints: names of tasks, and the database of their jobs."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack, overload

from pgqueue import PgQueue

from .connectors import Connector
from .declarations import Declarations
from .exceptions import TaskAlreadyRegistered, TaskNotFound, UnboundTaskError
from .jobs import Job
from .manager import JobManager
from .periodic import PeriodicTask
from .tasks import JobDeferrer, Options, Task, deferrer
from .worker import Worker


class Blueprint:
    """Tasks that an application adds."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        """By all their names."""
        self.periodic_tasks: list[PeriodicTask] = []

    def bound(self) -> "App":
        """Return the application."""
        raise UnboundTaskError("the blueprint of this task is in no App: call add_tasks_from()")

    @overload
    def task(self, func: Callable[..., Any], /) -> Task: ...
    @overload
    def task(self, /, **options: Any) -> Callable[[Callable[..., Any]], Task]: ...
    def task(self, func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a function a task; used bare or with options."""

        def register(func: Callable[..., Any]) -> Task:
            task = Task(func, blueprint=self, **options)
            for name in (task.name, *task.aliases):
                self.add_task_alias(task, name)
            return task

        return register if func is None else register(func)

    def periodic(
        self, *, cron: str, periodic_id: str = "", **options: Unpack[Options]
    ) -> Callable[[Task], Task]:
        """Defer a task regularly; write it above ``task``."""

        def register(task: Task) -> Task:
            self.periodic_tasks.append(PeriodicTask(task, cron, periodic_id, options))
            return task

        return register

    def add_task_alias(self, task: Task, alias: str) -> None:
        """Give a task another name."""
        if alias in self.tasks:
            raise TaskAlreadyRegistered(f"there is a task {alias} already")
        self.tasks[alias] = task

    def add_tasks_from(self, blueprint: "Blueprint", *, namespace: str) -> None:
        """Add the tasks of a blueprint, with ``namespace:`` before their names."""
        for task in set(blueprint.tasks.values()):
            task.blueprint, task.name = self, f"{namespace}:{task.name}"
        for name, task in blueprint.tasks.items():
            self.add_task_alias(task, f"{namespace}:{name}")
        self.periodic_tasks += blueprint.periodic_tasks


class App(Blueprint):
    """What an application holds."""

    def __init__(
        self,
        *,
        connector: Connector,
        import_paths: Iterable[str] = (),
        worker_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.connector = connector
        self.worker_defaults = dict(worker_defaults or {})
        self.job_manager = JobManager(self)
        self.worker: Worker | None = None
        """The last one."""
        self._import_paths = tuple(import_paths)
        self.declarations = Declarations(self, PgQueue(connector.url))

    @property
    def queue(self) -> PgQueue:
        """The queue of pgqueue, with all tasks."""
        for path in self._import_paths:
            importlib.import_module(path)
        return self.declarations.complete()

    def bound(self) -> "App":
        return self

    def with_connector(self, connector: Connector) -> "App":
        """Return another application with the same tasks."""
        app = App(
            connector=connector,
            import_paths=self._import_paths,
            worker_defaults=self.worker_defaults,
        )
        app.tasks, app.periodic_tasks = self.tasks, self.periodic_tasks
        return app

    def configure_task(
        self, name: str, *, allow_unknown: bool = True, **options: Unpack[Options]
    ) -> JobDeferrer:
        """Return what defers jobs of a task by its name."""
        self.queue  # noqa: B018  # imports the modules of the tasks
        if name in self.tasks:
            return self.tasks[name].configure(**options)
        if not allow_unknown:
            raise TaskNotFound(f"there is no task {name}")
        return deferrer(self, Job(task_name=name), options)

    async def run_worker_async(self, **options: Any) -> None:
        """Run a worker until it is cancelled or stopped, or with ``wait=False`` until no job is
        left."""
        self.worker = Worker(self, **{**self.worker_defaults, **options})
        await self.worker.run()

    def run_worker(self, **options: Any) -> None:
        """Run a worker in an event loop of its own."""
        asyncio.run(self.run_worker_async(**options))

    def open(self) -> Self:
        """Nothing needs to be opened: connections are made when they are used."""
        return self

    def close(self) -> None:
        """Close all connections."""
        self.queue.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def open_async(self) -> AsyncIterator[Self]:
        """Open and close in a coroutine."""
        with self:
            yield self
