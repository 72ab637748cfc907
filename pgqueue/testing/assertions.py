"""What a test has enqueued, and what waits for what."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, scoped_session

from pgqueue.checks import quoted
from pgqueue.database.callers import sync_session, translated_errors
from pgqueue.errors import ArgumentsError
from pgqueue.models import BatchJob, Dependency, Job, JobStatus
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
    """Return the jobs that wait.

    Jobs that wait for a later time, for a retry or for room in their limits are included.

    Args:
        session: The Session of the test.
        task: Only the jobs of this task.
        **some_args: Only the jobs with these arguments, as Python values.  Arguments that are not
            named may have any value.

    Returns:
        The jobs, in the order in which they were enqueued.

    Raises:
        ArgumentsError: The task has no such argument, or arguments are given without a task.
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

    Args:
        session: The Session of the test.
        task: The task of the job.
        **some_args: Some of the arguments of the job, as Python values.

    Returns:
        The job.

    Raises:
        AssertionError: There is none; the message names what was enqueued instead.
        ArgumentsError: The task has no such argument.

    Example:
        >>> mail.enqueue(session, "ann@example.org")
        >>> job = assert_enqueued(session, mail, address="ann@example.org")
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    found = enqueued(session, task, **some_args)
    if not found:
        raise AssertionError(_message(session, task, some_args, "waits"))
    return found[0]


def assert_blocked(
    session: "Session | scoped_session[Any]",
    task: Task[..., Any],
    /,
    *,
    after: Task[..., Any] | Job | None = None,
    **some_args: Any,
) -> Job:
    """Return the first job of :func:`enqueued` that waits for the end of another job.

    A job waits for each unfinished job of ``after=`` in its workflow, itself or as one of a group,
    and the callback of a batch for all jobs of the batch.

    Args:
        session: The Session of the test.
        task: The task of the job that waits.
        after: The job for which it waits, or the task of one.  Omit it for any job.
        **some_args: Some of the arguments of the job that waits.

    Returns:
        The job.

    Raises:
        AssertionError: No job waits so; the message names what was enqueued, and what waits.
        ArgumentsError: The task has no such argument, or ``after`` is neither a job nor a task.

    Example:
        >>> with queue.workflow(session) as flow:
        ...     flow.add(load.job(12), after=flow.add(transform.job(1)))
        >>> job = assert_blocked(session, load, after=transform, file=12)
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    match after:
        case None:
            waits = "waits for another job"
        case Job():
            waits = f"waits for job {after.id} {after.task}"
        case Task():
            waits = f"waits for a job of {after.name}"
        case _:
            raise ArgumentsError(f"after is {quoted(after)}; give a job or a task")
    for job in enqueued(session, task, **some_args):
        others = _waits_for(session, job)
        if isinstance(after, Job):
            others = [other for other in others if other.id == after.id]
        elif after is not None:
            others = [other for other in others if other.task == after.name]
        if others:
            return job
    raise AssertionError(_message(session, task, some_args, waits))


def _waits_for(session: "Session | scoped_session[Any]", job: Job) -> list[Job]:
    """The unfinished jobs for which a job waits, itself or as one of a group."""
    if job.status is not JobStatus.BLOCKED:
        return []
    after = select(Dependency.after_id).where(Dependency.job_id == job.id)
    members = select(BatchJob.job_id).where((-BatchJob.batch_id).in_(after))
    others = select(Job).where(Job.id.in_(after.union(members)), Job.outcome.is_(None))
    return list(sync_session(session, "assert_blocked").scalars(others.order_by(Job.id)))


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
    session: "Session | scoped_session[Any]",
    task: Task[..., Any],
    some_args: Mapping[str, Any],
    waits: str,
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
        return f"no job of {task.name}{condition} {waits}; no job at all was enqueued"
    lines = [_line(session, task, job, wanted) for job in jobs[:MAX_LINES]]
    if len(jobs) > MAX_LINES:
        lines.append(f"and {len(jobs) - MAX_LINES} more")
    return "\n  ".join([f"no job of {task.name}{condition} {waits}; enqueued were", *lines])


def _line(
    session: "Session | scoped_session[Any]",
    task: Task[..., Any],
    job: Job,
    wanted: Mapping[str, Any],
) -> str:
    state = "" if job.status in WAITING else f"  ({job.status})"
    if before := _waits_for(session, job):
        more = f" and {len(before) - 1} more" if len(before) > 1 else ""
        state = f"  (waits for job {before[0].id} {before[0].task}{more})"
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
