"""What people may see of a job: secrets masked, and all arguments of a task that is not known.

A unique key and the keys of limits are made from arguments, so they are shown and masked as these.
"""

from dataclasses import replace
from typing import Any

from pgqueue.redaction import MASK, redacted, redacted_data, secrets_among
from pgqueue.repository.listing import NOT_YOURS, JobDetails
from pgqueue.rules.limits import SEPARATOR
from pgqueue.rules.limits import without_values as without_values_of_key
from pgqueue.tasks.task import Task


def without_values(job: JobDetails) -> JobDetails:
    """Mask all arguments, the keys that are made from them, and the results, also of steps.

    For a job of an unknown task, which would say which of them are secret.  Errors were masked
    when they were stored, by a worker that had the task.
    """
    columns = dict(job.columns)
    for name in ("args", "result"):
        if isinstance(value := columns[name], dict):
            columns[name] = dict.fromkeys(value, MASK)
        elif value not in (None, NOT_YOURS):
            columns[name] = MASK
    steps = [
        step if step.result in (None, NOT_YOURS) else step._replace(result=MASK)
        for step in job.steps
    ]
    return without_keys(replace(job, columns=columns, steps=steps))


def without_keys(job: JobDetails) -> JobDetails:
    """Mask the unique key, and the values in the keys of limits."""
    columns = dict(job.columns)
    if columns["unique_key"] not in (None, NOT_YOURS):
        columns["unique_key"] = MASK
    if columns["limit_keys"] not in (None, NOT_YOURS):
        keys = columns["limit_keys"].split(SEPARATOR)
        columns["limit_keys"] = SEPARATOR.join(map(without_values_of_key, keys))
    limits = [use._replace(key=without_values_of_key(use.key)) for use in job.limits]
    return replace(job, columns=columns, limits=limits)


def shown_arguments(args: Any, task: Task[..., Any] | None) -> Any:
    """The arguments of a job with secrets masked; all of them if its task is not known."""
    if task is None:
        return dict.fromkeys(args, MASK) if isinstance(args, dict) else MASK
    names = task.settings.secret_args
    return redacted_data(args, names=names, secrets=secrets_among(args, names))


def secrets_of(job: JobDetails, task: Task[..., Any] | None) -> tuple[str, ...]:
    """The values of the secret arguments of a job; none if its task is not known."""
    return () if task is None else secrets_among(job.columns["args"], task.settings.secret_args)


def masked(job: JobDetails, task: Task[..., Any] | None) -> JobDetails:
    """Mask secrets, also where other values and errors quote them."""
    names = () if task is None else task.settings.secret_args
    secrets = secrets_of(job, task)
    columns = {
        name: redacted_data(value, names=names if name == "args" else (), secrets=secrets)
        for name, value in job.columns.items()
    }
    past = [
        attempt._replace(
            error=redacted_data(attempt.error, secrets=secrets),
            traceback=redacted_data(attempt.traceback, secrets=secrets),
        )
        for attempt in job.past_attempts
    ]
    steps = [
        step._replace(
            name=redacted(step.name, secrets),
            key=redacted_data(step.key, secrets=secrets),
            result=redacted_data(step.result, secrets=secrets),
        )
        for step in job.steps
    ]
    reason = redacted_data(job.wait.unreadable_reason, secrets=secrets)
    wait = job.wait._replace(unreadable_reason=reason)
    limits = [use._replace(key=redacted(use.key, secrets)) for use in job.limits]
    job = replace(job, columns=columns, past_attempts=past, limits=limits)
    return replace(job, steps=steps, wait=wait)
