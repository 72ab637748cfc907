"""New values that an operator gives a job that exists: decided here, written by the repository."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Self

from pgqueue.checks import check_queue_name, check_start, check_whole
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
    queue: str | None = None
    """The queue to which the job moves."""
    args: Mapping[str, Any] | None = None
    """Some arguments by name; the others stay."""
    are_args_stored: bool = False
    """Whether ``args`` are JSON data, and not values as a caller of the task gives them."""

    def __post_init__(self) -> None:
        given = (self.priority, self.delay, self.run_at, self.queue, self.args)
        if all(value is None for value in given):
            raise OptionError(
                "nothing to change is given: give priority, delay, run_at, queue or args, the "
                "arguments by name"
            )
        if self.queue is not None:
            check_queue_name(self.queue)
        if self.priority is not None:
            check_whole("", "priority", self.priority, 0, 9)
        check_start("", self.delay, self.run_at)
        if self.args is not None and not isinstance(self.args, Mapping):
            raise ArgumentsError(
                f"args is {type(self.args).__name__}; give a dict of the arguments to change, by "
                "name"
            )
        for name in self.args or ():
            if not isinstance(name, str):
                raise ArgumentsError(f"args has {name!r}, which is not the name of an argument")

    @property
    def has_args(self) -> bool:
        return self.args is not None

    @property
    def for_log(self) -> dict[str, Any]:
        """The same as JSON data; of arguments only their names, as values may be secret."""
        run_at = None if self.run_at is None else self.run_at.isoformat()
        args = None if self.args is None else sorted(self.args)
        given = {"priority": self.priority, "run_at": run_at, "queue": self.queue, "args": args}
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_log(cls, logged: Mapping[str, Any]) -> Self | None:
        """What the log says; None if nothing is to be changed.  Raises OptionError."""
        given = {name: logged[name] for name in ("priority", "run_at", "queue") if name in logged}
        try:
            if "run_at" in given:
                given["run_at"] = datetime.fromisoformat(given["run_at"])
            return cls(**given) if given else None
        except (TypeError, ValueError) as error:
            raise OptionError(f"the log says of the changes what cannot be read: {error}") from None

    def from_now(self, now: datetime) -> Self:
        """The same with a time in place of a delay."""
        if self.delay is None:
            return self
        return replace(self, delay=None, run_at=now + self.delay)

    def position(self) -> NewValues | None:
        """The new queue, priority and time; None if arguments change too."""
        if self.args is not None or self.delay is not None:
            return None
        given = {"priority": self.priority, "run_at": self.run_at, "queue": self.queue}
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
        if self.queue not in (None, job.queue):
            find(job.task).check_move(job, self.queue)
            new["queue"] = self.queue
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
