"""A job and its status, as Procrastinate shows them."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pgqueue import JobStatus

ABORTED = "aborted"
"""The reason with which a job is cancelled that has raised JobAborted."""


class Status(Enum):
    """A status of a job."""

    TODO = "todo"
    DOING = "doing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is deferred, runs, or is listed."""

    id: int | None = None
    status: Status | None = None
    queue: str = "default"
    priority: int = 0
    lock: str | None = None
    queueing_lock: str | None = None
    task_name: str
    task_kwargs: dict[str, Any] = field(default_factory=dict)
    scheduled_at: datetime | None = None
    attempts: int = 0

    @property
    def call_string(self) -> str:
        """The call, with the id of the job, for log lines."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.task_kwargs.items())
        return f"{self.task_name}[{self.id}]({arguments})"


def status_of(status: JobStatus, error: str | None, *, is_cancel_requested: bool) -> Status:
    """Return Procrastinate's status of a job of pgqueue."""
    match status:
        case JobStatus.RUNNING:
            return Status.DOING
        case JobStatus.SUCCEEDED:
            return Status.SUCCEEDED
        case JobStatus.FAILED:
            return Status.FAILED
        case JobStatus.CANCELLED:
            was_running = is_cancel_requested or error == ABORTED
            return Status.ABORTED if was_running else Status.CANCELLED
    return Status.TODO  # pending, or blocked by a lock
