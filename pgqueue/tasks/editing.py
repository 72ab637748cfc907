"""New values that an operator gives a job that exists: decided here, written by the repository."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Self

from pgqueue.checks import SHORTEST_SPAN, Check, check, check_start, queue_name, span, whole
from pgqueue.errors import ArgumentsError, OptionError
from pgqueue.meta import RESERVED, checked_meta, checked_tags, meta_text
from pgqueue.options import MOST_ATTEMPTS, as_noted
from pgqueue.repository.jobs import Change, Jobs, JobValues, NewValues
from pgqueue.tasks.task import Task

CHECKS: Mapping[str, Check] = {
    "queue": queue_name,
    "priority": whole(0, 9),
    "max_attempts": whole(1, MOST_ATTEMPTS),
    "timeout": span(SHORTEST_SPAN),
}

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
    max_attempts: int | None = None
    timeout: timedelta | None = None
    tags: Sequence[str] | None = None
    """All tags of the job; empty: none."""
    meta: Mapping[str, Any] | None = None
    """Some keys; the others stay."""
    args: Mapping[str, Any] | None = None
    """Some arguments by name; the others stay."""
    are_args_stored: bool = False
    """Whether ``args`` are JSON data, and not values as a caller of the task gives them."""

    def __post_init__(self) -> None:
        given = (getattr(self, name) for name in CHANGEABLE)
        if all(value is None for value in given):
            raise OptionError(f"nothing to change is given: give {', '.join(CHANGEABLE)}")
        for name, rule in CHECKS.items():
            if getattr(self, name) is not None:
                check("", name, getattr(self, name), rule)
        check_start("", self.delay, self.run_at)
        if self.tags is not None:
            checked_tags("", self.tags)
        if self.meta is not None:
            checked_meta("", self.meta)
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
        given = {
            **{name: getattr(self, name) for name in ("priority", "queue", "max_attempts")},
            "run_at": None if self.run_at is None else self.run_at.isoformat(),
            "timeout": as_noted(self.timeout),
            "tags": None if self.tags is None else list(self.tags),
            "meta": None if self.meta is None else dict(self.meta),
            "args": None if self.args is None else sorted(self.args),
        }
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_log(cls, logged: Mapping[str, Any]) -> Self | None:
        """What the log says; None if nothing is to be changed.  Raises OptionError."""
        given = {name: logged[name] for name in CHANGEABLE if name in logged}
        try:
            if "run_at" in given:
                given["run_at"] = datetime.fromisoformat(given["run_at"])
            if "timeout" in given:
                given["timeout"] = timedelta(seconds=given["timeout"])
            return cls(**given) if given else None
        except (TypeError, ValueError) as error:
            raise OptionError(f"the log says of the changes what cannot be read: {error}") from None

    def from_now(self, now: datetime) -> Self:
        """The same with a time in place of a delay."""
        if self.delay is None:
            return self
        return replace(self, delay=None, run_at=now + self.delay)

    def position(self) -> NewValues | None:
        """The new queue, priority and time; None if something else changes too."""
        given = {name: getattr(self, name) for name in CHANGEABLE}
        new = {name: value for name, value in given.items() if value is not None}
        return new if new.keys() <= {"priority", "run_at", "queue"} else None

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
        if self.max_attempts not in (None, job.max_attempts):
            if self.max_attempts <= job.attempts:
                raise OptionError(
                    f"job {job.id} has used up {job.attempts} attempts; give max_attempts of at "
                    f"least {job.attempts + 1}, or cancel it"
                )
            new["max_attempts"] = self.max_attempts
        if self.tags is not None and (tags := checked_tags("", self.tags)) != (job.tags or []):
            new["tags"] = tags
        if (meta := self._meta_of(job)) != (job.meta or {}):
            has_keys = job.unique_key is not None or job.limit_keys is not None
            if has_keys and self.meta is not None:
                find(job.task).check_meta(job, meta)
            new["meta"] = meta
        if self.args is not None:
            task = find(job.task)
            new |= task.edited(job, self.args, are_stored=self.are_args_stored)
        return new

    def _meta_of(self, job: JobValues) -> dict[str, Any]:
        """The meta of a job with what changes of it, and with its timeout."""
        changed = {} if self.meta is None else checked_meta("", self.meta)
        noted = {} if self.timeout is None else {f"{RESERVED}timeout": as_noted(self.timeout)}
        meta = {**(job.meta or {}), **changed, **noted}
        if changed:
            meta_text(f"job {job.id}: ", meta)
        return meta


CHANGEABLE = tuple(each.name for each in fields(Changes) if each.name != "are_args_stored")
"""What may change of a job that waits."""


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
    """The values as parameters; no tags and no meta are NULL."""
    stored = {name: new[name] for name in new.keys() - {"args", "tags", "meta"}}
    if "args" in new:
        stored["args"] = json.dumps(new["args"])
    for name in new.keys() & {"tags", "meta"}:
        stored[name] = json.dumps(new[name]) if new[name] else None
    return stored
