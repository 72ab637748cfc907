"""One job: why it does not run, what has happened to it, and what can be done with it."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from werkzeug.routing import BuildError

from pgqueue.dashboard.argument_forms import as_text, type_in_words
from pgqueue.dashboard.rendering import span
from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route
from pgqueue.models import DEAD, UNFINISHED, WAITING
from pgqueue.operations import Selection
from pgqueue.operations.actions import BUTTONS, ON_JOBS, Action
from pgqueue.redaction import MASK, redacted
from pgqueue.tasks import Task
from pgqueue.tasks.showing import masked, secrets_of, without_keys, without_values
from pgqueue.views.jobs import (
    MOST_NODES,
    MOST_STEPS,
    NOT_YOURS,
    JobDetails,
    StepOfJob,
    state_in_words,
)
from pgqueue.views.trail import (
    follow_up_of,
    schedule_of,
    stretches,
    trail,
    waits_after_requeue,
    was_requeued,
    when_of,
)
from pgqueue.views.why import why
from pgqueue.views.words import Kind, Name

PAGES: dict[str, tuple[str, str | None]] = {
    Kind.JOB: ("job", "job_id"),
    Kind.QUEUE: ("queues", None),
    Kind.TASK: ("task", "name"),
    Kind.WORKER: ("workers", None),
    Kind.LIMIT: ("queues", None),
    "batch": ("batch", "batch_id"),
    "schedule": ("schedules", None),
}
"""The page about each kind of name, and its parameter; None for a page with all of them."""
LONGEST_VALUE = 100_000
"""Characters of a value that a page shows."""
MOST_ATTEMPTS = 50
MOST_EVENTS = 100
"""A page shows the newest."""


class Word(NamedTuple):
    """A part of a sentence as a page writes it: text, perhaps a link, or a time."""

    text: str = ""
    href: str | None = None
    time: datetime | None = None


class Value(NamedTuple):
    """An argument, as the page shows it."""

    name: str
    type: str
    text: str
    is_secret: bool


class Step(NamedTuple):
    """A recorded step of the handler, as the page shows it."""

    record: StepOfJob
    took: timedelta | None
    """None: it has not ended."""
    result: str | None


def known(request: Request, job_id: int) -> tuple[JobDetails, Task[..., Any] | None]:
    """A job as it is stored, and its task; None if this application does not have the task.

    Raises JobNotFound also for a job that the user may not see.
    """
    request.check_jobs([job_id])
    job = request.queue.views.job(request.session, job_id)
    return job, request.queue.tasks.get(job.columns["task"])


def shown(request: Request, job: JobDetails, task: Task[..., Any] | None) -> JobDetails:
    """What the user may see of a job: as ``pgqueue jobs ID`` has it, and less without rights."""
    job = masked(job, task) if task is not None else masked(without_values(job), None)
    columns, end = dict(job.columns), job.columns["finished_at"]
    # The row of an attempt is written a moment after that of its job: one end for both.
    past = [
        one if end is None else one._replace(finished_at=min(one.finished_at, end))
        for one in job.past_attempts
    ]
    if not request.may("view_arguments"):
        job = without_keys(job)
        columns = {**job.columns, "args": None}
    if not request.may("view_results"):
        columns["result"] = None
        past = [attempt._replace(traceback=None) for attempt in past]
        job = replace(job, steps=[step._replace(result=None) for step in job.steps])
    if request.access.is_limited:
        job = replace(job, before=(), after=())  # these may be jobs that the user may not see
    return replace(job, columns=columns, past_attempts=past)


def job(request: Request, job_id: int) -> Page:
    """Everything about one job."""
    stored, task = known(request, job_id)
    found = shown(request, stored, task)
    row = found.columns
    events = [event for event in trail(found) if event.at <= found.read_at]
    return Page(
        "job.html",
        title=f"{row['task']} #{job_id}",
        command=f"pgqueue jobs {job_id}",
        job=found,
        row=row,
        task=task,
        reasons=[
            ([_word(request, part) for part in one.words], one.remedy)
            for one in why(found, request.queue.tasks)
        ],
        is_requeued=was_requeued(found),
        waits_after_requeue=waits_after_requeue(found),
        is_unfinished=found.status in UNFINISHED,
        state=state_in_words(
            found.status, attempts=row["attempts"], run_at=row["run_at"], now=found.read_at
        ),
        stretches=_stretches(found),
        steps=[_step(step, found.read_at) for step in found.steps],
        most_nodes=MOST_NODES,
        more_steps=len(found.steps) == MOST_STEPS,
        events=events[-MOST_EVENTS:],
        more_events=max(len(events) - MOST_EVENTS, 0),
        attempts=found.past_attempts[: -MOST_ATTEMPTS - 1 : -1],
        more_attempts=max(len(found.past_attempts) - MOST_ATTEMPTS, 0),
        arguments=_values(task, row["args"]) if request.may("view_arguments") else None,
        result=None if row["result"] is None else _cut(as_text(row["result"])),
        meta=None if row["meta"] is None else _cut(as_text(row["meta"])),
        pytest=_as_test(stored, task) if request.may("view_arguments") else None,
        schedule=schedule_of(found),
        follow_up=follow_up_of(found),
        when=when_of(found),
        link=lambda kind, name: _href(request, kind, name),
        may_restart=request.may("requeue")
        and not request.access.is_limited
        and any(batch.is_ended_workflow for batch in found.batches),
        may_edit=_may_edit(request, found, task),
        may_copy=request.may("enqueue") and _is_template(request, found, task),
        buttons=[
            action
            for action in map(ON_JOBS.__getitem__, BUTTONS)
            if action.is_for(found, task) and request.may(action.right)
        ],
    )


def act_on_job(request: Request, job_id: int, action: str) -> Done:
    """Do an action to one job, with its row in the log, in the transaction of the request."""
    jobs = request.scope(Selection([job_id]))
    outcome = request.operator_in_session.start(action, jobs).finish()
    if not outcome.changed:
        raise Refused(f"nothing was changed: job {outcome.left[0]}", 409)
    [change] = outcome.counts
    return Done(f"Job {job_id}: {change.replace('_', ' ')}", to=request.url("job", job_id=job_id))


def restart_workflow(request: Request, job_id: int) -> Done:
    """Start the workflow of a job again from the job on."""
    known(request, job_id)
    if request.access.is_limited:
        raise Refused("a restart copies jobs that you may not see; none was made", 403)
    new_id = request.operator.restart_workflow(job_id)
    words = f"Started the workflow again from job {job_id}"
    return Done(words, to=request.url("batch", batch_id=new_id))


def send_signal(request: Request, job_id: int) -> Done:
    """Send the signal for which a job waits, as an approval is given."""
    step = known(request, job_id)[0].open_step
    if step is None or step.signal is None or step.name != request.posted("step"):
        raise Refused(f"job {job_id} does not wait for this signal any more; none was sent", 409)
    text = request.posted("payload").strip()
    try:
        payload = json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise Refused(f"this is not JSON: {error}; no signal was sent", 400) from error
    request.operator.signal(step.signal, step.key or "", payload)
    words = f"Sent the signal {f'{step.signal} {step.key}'.strip()}"
    return Done(words, to=request.url("job", job_id=job_id))


def _may_edit(request: Request, job: JobDetails, task: Task[..., Any] | None) -> bool:
    rights = {"edit"} | ({"requeue"} if job.status in DEAD else set())
    is_editable = job.status in (*WAITING, *DEAD) and _is_template(request, job, task)
    return is_editable and all(map(request.may, rights))


def _is_template(request: Request, job: JobDetails, task: Task[..., Any] | None) -> bool:
    """Whether a form can begin with the arguments of a job."""
    is_readable = job.columns["args"] != NOT_YOURS
    return task is not None and is_readable and request.may("view_arguments")


def _word(request: Request, part: Any) -> Word:
    match part:
        case Name():
            return Word(part.text, _href(request, part.kind, part.name))
        case datetime():
            return Word(time=part)
        case timedelta():
            return Word(span(part))
    return Word(part)


def _href(request: Request, kind: str, name: object) -> str | None:
    """The address of the page about something; None if there is no such page for the user."""
    if kind == Kind.JOB and request.access.is_limited:
        return None  # it may be a job that the user does not see
    if kind == Kind.TASK and str(name) not in request.queue.tasks:
        return request.url("jobs", q=Selection(task=str(name)).line)
    endpoint, parameter = PAGES[kind]
    try:
        return request.url(endpoint, **({} if parameter is None else {parameter: name}))
    except BuildError:
        return None


def _step(step: StepOfJob, now: datetime) -> Step:
    end = None if step.is_open(now) else step.finished_at
    result = None if step.result is None else _cut(as_text(step.result))
    return Step(step, None if end is None else end - step.started_at, result)


def _stretches(job: JobDetails) -> list[dict[str, Any]]:
    """The stretches as the macro ``timeline`` takes them."""
    shape = {"running": "running", "succeeded": "succeeded", "cancelled": "cancelled"}
    found = [
        {
            "kind": "run" if one.is_run else "wait",
            "seconds": one.took.total_seconds(),
            "label": f"attempt {one.attempt}, {span(one.took)}"
            if one.is_run
            else f"{span(one.took)} waiting",
            "status": shape.get(one.outcome, "failed"),
        }
        for one in stretches(job)
    ]
    if job.status in WAITING and job.columns["run_at"] > job.read_at:
        found[-1]["label"] = f"due in {span(job.columns['run_at'] - job.read_at)}"
    return found


def _values(task: Task[..., Any] | None, args: Any) -> list[Value]:
    if not isinstance(args, dict):
        return [Value("(all)", "", _cut(as_text(args)), False)]
    secret = () if task is None else task.settings.secret_args
    names = () if task is None else task.payload.names
    in_order = {name: args[name] for name in names if name in args} | args
    return [
        Value(
            name,
            "" if task is None else type_in_words(task, name),
            _cut(as_text(value)),
            name in secret or value == MASK,
        )
        for name, value in in_order.items()
    ]


def _cut(text: str) -> str:
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}\n... {len(text):,} characters in all ..."


def _as_test(job: JobDetails, task: Task[..., Any] | None) -> str | None:
    """The call that enqueues the same job, for a test; secrets are left out, and so are arguments
    that quote one."""
    if task is None:
        return None
    try:
        arguments = task.payload.decode(job.columns["args"])
    except Exception:  # a constructor is the application's code
        return None
    by_name = task.payload.under_new_names
    stored, seen = by_name(job.columns["args"]), by_name(masked(job, task).columns["args"])
    given = [
        f"{name}={value!r}" if stored.get(name) == seen.get(name) else f"{name}=..."
        for name, value in arguments.items()
    ]
    lines = "".join(f"    {one},\n" for one in given)
    function = task.function.__name__
    code = (
        f"from {task.function.__module__} import {function}\n\n"
        f"{function}.enqueue(\n    session,\n{lines})"
    )
    return _cut(redacted(code, secrets_of(job, task)))  # of a repr that quotes more than is stored


def _route(action: Action) -> Route:
    """The route of an action on one job, by its name in addresses: ``requeue_job``."""

    def answer(request: Request, job_id: int) -> Done:
        return act_on_job(request, job_id, action.name)

    answer.__name__ = f"{action.name}_job"
    path = action.name.replace("_", "-")
    return Route(f"/jobs/<int:job_id>/{path}", answer, method="POST", right=action.right)


ROUTES = [
    Route("/jobs/<int:job_id>", job),
    Route("/jobs/<int:job_id>/restart", restart_workflow, method="POST", right="requeue"),
    Route("/jobs/<int:job_id>/signal", send_signal, method="POST", right="signals"),
    *(_route(ON_JOBS[name]) for name in BUTTONS),
]
