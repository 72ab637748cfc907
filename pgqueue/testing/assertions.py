"""What a test has enqueued."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, scoped_session

from pgqueue.database.callers import sync_session, translated_errors
from pgqueue.errors import ArgumentsError
from pgqueue.models import Job, JobStatus
from pgqueue.redaction import redacted_data
from pgqueue.tasks import Task

WAITING = (JobStatus.PENDING, JobStatus.BLOCKED)
MAX_LINES = 20
"""Jobs that the message of a failed assertion names."""


@translated_errors()
def enqueued(
    session: "Session | scoped_session[Any]",
    task: Task[..., Any] | None = None,
    /,
    **some_args: Any,
) -> list[Job]:
    """Return the jobs that wait, in the order in which they were enqueued.

    Only those of ``task``, if one is given, and only those with these arguments.  Arguments that
    are not named may have any value.  Jobs that wait for a later time, for a retry or for room in
    their limits are included.
    """
    waiting = [job for job in _jobs(session) if job.status in WAITING]
    if task is None:
        if some_args:
            raise ArgumentsError("enqueued: arguments belong to a task; name it before them")
        return waiting
    wanted = _stored(task, some_args)
    return [job for job in waiting if job.task == task.name and not _differences(task, job, wanted)]


def assert_enqueued(
    session: "Session | scoped_session[Any]", task: Task[..., Any], /, **some_args: Any
) -> Job:
    """Return the first job of :func:`enqueued`.

    Raises AssertionError if there is none; its message names what was enqueued instead.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    found = enqueued(session, task, **some_args)
    if not found:
        raise AssertionError(_message(session, task, some_args))
    return found[0]


def _jobs(session: "Session | scoped_session[Any]") -> list[Job]:
    # A worker may have run a job since this session has read it.
    jobs = select(Job).order_by(Job.id).execution_options(populate_existing=True)
    return list(sync_session(session, "enqueued").scalars(jobs))


def _stored(task: Task[..., Any], some_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a job stores them."""
    unknown = sorted(some_args.keys() - set(task.payload.names))
    if unknown:
        raise ArgumentsError(
            f"task {task.name} has no argument {', '.join(unknown)}; it has "
            f"{', '.join(task.payload.names) or 'none'}"
        )
    stored: dict[str, Any] = json.loads(task.payload.dumps(task.payload.encode(dict(some_args))))
    return stored


def _differences(task: Task[..., Any], job: Job, wanted: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that differ; an argument that was left out has its default."""
    has: dict[str, Any] = job.args
    if wanted.keys() - has.keys():
        defaults = task.payload.with_defaults({})
        left_out = {name: defaults[name] for name in wanted if name in defaults}
        has = {**_stored(task, left_out), **has}
    return [name for name, value in wanted.items() if name not in has or has[name] != value]


def _message(
    session: "Session | scoped_session[Any]", task: Task[..., Any], some_args: Mapping[str, Any]
) -> str:
    wanted = _stored(task, some_args)
    condition = f" with {_words(task, wanted)}" if wanted else ""
    # First the jobs of this task, those with the fewest differences at the top.
    jobs = sorted(
        _jobs(session),
        key=lambda job: (
            job.task != task.name,
            len(_differences(task, job, wanted)) if job.task == task.name else 0,
        ),
    )
    if not jobs:
        return f"no job of {task.name}{condition} waits; no job at all was enqueued"
    lines = [_line(task, job, wanted) for job in jobs[:MAX_LINES]]
    if len(jobs) > MAX_LINES:
        lines.append(f"and {len(jobs) - MAX_LINES} more")
    return "\n  ".join([f"no job of {task.name}{condition} waits; enqueued were", *lines])


def _line(task: Task[..., Any], job: Job, wanted: Mapping[str, Any]) -> str:
    state = "" if job.status in WAITING else f"  ({job.status})"
    if job.task != task.name:
        return f"job {job.id} {job.task}: {_words(None, job.args)}{state}"
    others = {name: wanted[name] for name in _differences(task, job, wanted)}
    instead = f"  (wanted {_words(task, others)})" if others else ""
    return f"job {job.id} {job.task}: {_words(task, job.args)}{instead}{state}"


def _words(task: Task[..., Any] | None, args: Mapping[str, Any]) -> str:
    shown = dict(args)
    if task is not None:
        ordered = {name: args[name] for name in task.payload.names if name in args}
        shown = redacted_data(ordered, names=task.settings.secret_args)
    return ", ".join(f"{name}={value!r}" for name, value in shown.items()) or "no arguments"
