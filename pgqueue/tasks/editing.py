"""New values that an operator gives a job that exists: decided here, written by the repository."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Self

from pgqueue.checks import check_start, check_whole
from pgqueue.errors import ArgumentsError, OptionError
from pgqueue.repository.jobs import Change, Jobs, JobValues, NewValues
from pgqueue.tasks.task import Task

Find = Callable[[str], Task[..., Any]]
"""Returns the task with a name; raises UnknownTask."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be changed of a job; None for what stays.  Raises OptionError."""

    priority: int | None = None
    delay: timedelta | None = None
    run_at: datetime | None = None
    args: Mapping[str, Any] | None = None
    """Some arguments by name; the others stay."""
    are_args_stored: bool = False
    """Whether ``args`` are JSON data, and not values as a caller of the task gives them."""

    def __post_init__(self) -> None:
        if all(value is None for value in (self.priority, self.delay, self.run_at, self.args)):
            raise OptionError(
                "nothing to change is given: give priority, delay, run_at or args, the arguments "
                "by name"
            )
        if self.priority is not None:
            check_whole("", "priority", self.priority, 0, 9)
        check_start("", self.delay, self.run_at)
        if self.args is not None and not isinstance(self.args, Mapping):
            raise ArgumentsError(
                f"args is {type(self.args).__name__}; give a dict of the arguments to change, by "
                "name"
            )

    @property
    def has_args(self) -> bool:
        return self.args is not None

    @property
    def for_log(self) -> dict[str, Any]:
        """The same as JSON data; of arguments only their names, as values may be secret."""
        run_at = None if self.run_at is None else self.run_at.isoformat()
        args = None if self.args is None else sorted(self.args)
        given = {"priority": self.priority, "run_at": run_at, "args": args}
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_log(cls, logged: Mapping[str, Any]) -> Self | None:
        """What the log says; None if nothing is to be changed."""
        priority, run_at = logged.get("priority"), logged.get("run_at")
        if priority is None and run_at is None:
            return None
        return cls(
            priority=priority, run_at=None if run_at is None else datetime.fromisoformat(run_at)
        )

    def from_now(self, now: datetime) -> Self:
        """The same with a time in place of a delay."""
        if self.delay is None:
            return self
        return replace(self, delay=None, run_at=now + self.delay)

    def place(self) -> NewValues | None:
        """The new priority and time; None if arguments change too."""
        if self.args is not None or self.delay is not None:
            return None
        given = {"priority": self.priority, "run_at": self.run_at}
        return {name: value for name, value in given.items() if value is not None}

    def of(self, job: JobValues, find: Find) -> dict[str, Any]:
        """Return the values that differ from those of the job; ``args`` as a dict.

        Raises UnknownTask, ArgumentsError or PayloadError.
        """
        new: dict[str, Any] = {}
        if self.priority not in (None, job.priority):
            new["priority"] = self.priority
        start = self.run_at if self.delay is None else job.now + self.delay
        if start is not None and start != job.run_at:
            new["run_at"] = start
        if self.args is not None:
            task = find(job.task)
            new |= task.edited(job, self.args, are_stored=self.are_args_stored)
        return new


def change(jobs: Jobs, job_id: int, changes: Changes, find: Find, *, notify: bool) -> Change:
    """Change a waiting job; raises JobNotFound, DuplicateJob and what :meth:`Changes.of` raises."""
    return jobs.change(
        job_id,
        lambda job: _storable(changes.of(job, find)),
        with_args=changes.has_args,
        notify=notify,
    )


def requeue(
    jobs: Jobs,
    job_id: int,
    changes: Changes | None,
    find: Find,
    *,
    notify: bool,
    run_at: datetime | None = None,
) -> Change:
    """Requeue a failed or cancelled job with changed arguments, now or for a time."""
    if changes is None:
        return jobs.requeue(job_id, notify=notify, run_at=run_at)
    return jobs.requeue(
        job_id,
        notify=notify,
        edit=lambda job: _storable(changes.of(job, find)),
        run_at=run_at,
    )


def _storable(new: Mapping[str, Any]) -> NewValues:
    return {name: json.dumps(value) if name == "args" else value for name, value in new.items()}
