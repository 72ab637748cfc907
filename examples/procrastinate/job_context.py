"""What a task gets as its first argument if it has ``pass_context=True``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .jobs import Job

if TYPE_CHECKING:
    from .app import App
    from .tasks import Task


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The running job and the worker that runs it."""

    app: "App"
    task: "Task"
    job: Job
    worker_name: str | None
    worker_queues: Sequence[str] | None
    start_timestamp: float
    should_abort: Callable[[], bool]
    """Whether the task should raise JobAborted."""
    additional_context: Mapping[str, Any] = field(default_factory=dict)
