"""The forms about one job: change it, or enqueue a new one, also as a copy of another."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from pgqueue.dashboard.argument_forms import Field, fields_of, read_fields, secrets_given
from pgqueue.dashboard.pages.job import known
from pgqueue.dashboard.routing import Answer, Done, Page, Refused, Request, Route
from pgqueue.errors import (
    ArgumentsError,
    DuplicateJob,
    JobNotFound,
    OptionError,
    PayloadError,
)
from pgqueue.meta import MAX_META_BYTES, RESERVED
from pgqueue.models import DEAD, WAITING
from pgqueue.operations import Selection
from pgqueue.operations.results import Effect, Result
from pgqueue.options import MOST_ATTEMPTS
from pgqueue.redaction import redacted
from pgqueue.tasks import Task, editing
from pgqueue.tasks.showing import masked, secrets_of
from pgqueue.views.jobs import NOT_YOURS, JobDetails
from pgqueue.views.words import unknown_task

MISTAKES = (ArgumentsError, PayloadError, OptionError, DuplicateJob)
"""What the form shows, so that it can be corrected."""


@dataclass(frozen=True, slots=True)
class Template:
    """The job that a form begins with."""

    stored: Mapping[str, Any]
    """Its arguments by the names that the task has now."""
    shown: Mapping[str, Any]
    """The same with secrets masked."""
    secrets: tuple[str, ...]
    job: JobDetails | None = None


NO_TEMPLATE = Template({}, {}, ())


def edit_job(request: Request, job_id: int) -> Page:
    """The form to change a job that waits, or to requeue one with other arguments."""
    template, task = _template(request, job_id)
    fields = fields_of(task, template.shown, template.stored)
    return _edit_page(request, template, task, fields)


def change_job(request: Request, job_id: int) -> Answer:
    """Change a job as the form says: only what differs from what the form has shown."""
    request.check_jobs([job_id])
    request.queue.lock_job(request.session, job_id)  # of two forms, the second sees the first
    template, task = _template(request, job_id)
    job = _job_of(template)
    if request.posted("seen") != _seen(template):
        raise Refused(f"job {job_id} has changed meanwhile; load the form again", 409)
    shown_fields = fields_of(task, template.shown, template.stored)
    given, fields = read_fields(request, task, shown_fields, template.shown)
    try:
        if any(field.error for field in fields):
            raise ArgumentsError("Nothing was changed: some arguments are wrong.")
        changes = editing.Changes(
            args=given or None, are_args_stored=True, **_changed_options(request, job)
        )
        is_dead = job.status in DEAD
        if is_dead:
            request.check_right("requeue")
        action = "requeue" if is_dead else "change"
        with request.session.begin_nested():  # what changes nothing is not logged
            operator, jobs = request.operator_in_session, Selection([job_id])
            outcome = operator.start(action, jobs, changes=changes).finish()
            if not outcome.changed:
                raise _refusal(outcome.left[0])
    except MISTAKES as error:
        words = _shown(error, template, task, given)
        return _edit_page(request, template, task, fields, error=words)
    [change] = outcome.counts
    words = f"Job {job_id}: {change.replace('_', ' ')}"
    return Done(words, to=request.url("job", job_id=job_id))


def _refusal(left: Result) -> Exception:
    """Why a form has changed nothing; an ArgumentsError if it can be corrected."""
    if left.change in (Effect.REFUSED, Effect.KEY_TAKEN):
        return ArgumentsError(str(left.reason))
    return Refused(f"nothing was changed: job {left}", 409)


def _shown(
    error: object, template: Template, task: Task[..., Any], given: Mapping[str, Any]
) -> str:
    """An error without the secrets of the form and of the job that it began with."""
    return redacted(str(error), (*template.secrets, *secrets_given(task, given)))


def enqueue_form(request: Request, name: str) -> Page:
    """The form to enqueue a job of a task; ``copy``: the id of a job to begin with."""
    task = request.queue.find(name)
    template = _copied(request, task, request.whole("copy", None, 1))
    return _enqueue_page(request, task, template, fields_of(task, template.shown, template.stored))


def enqueue_job(request: Request, name: str) -> Answer:
    """Enqueue a job as the form says."""
    task = request.queue.find(name)
    template = _copied(request, task, request.posted_whole("copy", None, 1))
    shown_fields = fields_of(task, template.shown, template.stored)
    given, fields = read_fields(request, task, shown_fields, template.shown)
    try:
        if any(field.error for field in fields):
            raise ArgumentsError("Nothing was enqueued: some arguments are wrong.")
        chosen = task.options(**_options(request))
        _check_scope(request, chosen)
        copied = None if template.job is None else template.job.columns["id"]
        arguments = {**template.stored, **given}
        job = request.operator_in_session.enqueue(chosen, arguments, copy_of=copied)
        if not job.is_new:
            request.check_jobs([job.id])
    except (*MISTAKES, JobNotFound) as error:
        if request.access.is_limited and isinstance(error, DuplicateJob | JobNotFound):
            # It has the id of the holder, which the user may not see.
            words = "another job holds the unique key already; no job was added"
            raise Refused(words, 409) from error
        words = _shown(error, template, task, given)
        return _enqueue_page(request, task, template, fields, error=words)
    to = request.url("job", job_id=job.id)
    if not job.is_new:
        return Done(f"Job {job.id} holds the unique key already; no job was added", to=to)
    return Done(f"Job {job.id} is enqueued", to=to)


def _template(request: Request, job_id: int) -> tuple[Template, Task[..., Any]]:
    """The job of an edit form; raises Refused if it cannot be changed."""
    request.check_right("view_arguments")
    job, task = known(request, job_id)
    if task is None:
        raise Refused(str(unknown_task(job.columns["task"])), 409)
    if job.status not in (*WAITING, *DEAD):
        raise Refused(f"job {job_id} is {job.status}; only a copy of it can be enqueued", 409)
    return _of_job(job, task), task


def _copied(request: Request, task: Task[..., Any], job_id: int | None) -> Template:
    if job_id is None:
        return NO_TEMPLATE
    request.check_right("view_arguments")
    job, of = known(request, job_id)
    if of is not task:
        raise Refused(f"job {job_id} is of the task {job.columns['task']}", 409)
    return _of_job(job, task)


def _of_job(job: JobDetails, task: Task[..., Any]) -> Template:
    if job.columns["args"] == NOT_YOURS:
        raise Refused("the database role of the dashboard may not read arguments", 403)
    by_name = task.payload.under_new_names
    stored = by_name(job.columns["args"])
    shown = by_name(masked(job, task).columns["args"])
    return Template(stored, shown, secrets_of(job, task), job)


def _job_of(template: Template) -> JobDetails:
    assert template.job is not None  # of an edit form
    return template.job


def _seen(template: Template) -> str:
    """What the form has shown of a job, as a digest; without its secrets."""
    row = _job_of(template).columns
    place = [row["queue"], row["priority"], row["run_at"].isoformat()]
    options = [row["max_attempts"], row["tags"], row["meta"]]
    shown = [template.shown, *place, *options, row["outcome"]]
    return sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def _time_text(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _time_of(text: str) -> datetime:
    """The time that a field says; in UTC unless it says another offset."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"{text[:40]!r} is no time; write 2026-11-25 17:30 (in UTC)") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _changed_options(request: Request, job: JobDetails) -> dict[str, Any]:
    """The options of a form, where they differ from those of the job."""
    if job.status in DEAD:
        return {}
    row, changed = job.columns, dict[str, Any]()
    priority = request.posted_whole("priority", None, 0, 9)
    if priority not in (None, row["priority"]):
        changed["priority"] = priority
    queue = request.posted("queue").strip()
    if queue and queue != row["queue"]:
        request.check_queue(queue)
        changed["queue"] = queue
    at = request.posted("run_at").strip()
    if at and at != _time_text(row["run_at"]):
        changed["run_at"] = _time_of(at)
    most = request.posted_whole("max_attempts", None, 1, MOST_ATTEMPTS)
    if most not in (None, row["max_attempts"]):
        changed["max_attempts"] = most
    timeout = request.posted("timeout").strip()
    if timeout and timeout != _timeout_text(row):
        changed["timeout"] = _seconds_of(timeout)
    if request.form.get("tags", _tags_text(row)) != _tags_text(row):
        changed["tags"] = _tags_of(request)
        _check_tags(request, changed["tags"])
    meta = request.posted("meta", longest=MAX_META_BYTES).strip()
    if meta and meta != _meta_text(row):
        changed["meta"] = _meta_of(meta)
    return changed


def _tags_of(request: Request) -> list[str]:
    tags = (tag.strip() for tag in request.posted("tags", longest=4000).split(","))
    return [tag for tag in tags if tag]


def _tags_text(row: Mapping[str, Any]) -> str:
    return ", ".join(row["tags"] or [])


def _timeout_text(row: Mapping[str, Any]) -> str:
    """The timeout that the job has of its own, in seconds."""
    seconds = (row["meta"] or {}).get(f"{RESERVED}timeout")
    return "" if seconds is None else f"{seconds:g}"


def _seconds_of(text: str) -> timedelta:
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise OptionError(f"timeout is {text[:40]!r}; give a number of seconds") from None


def _meta_text(row: Mapping[str, Any]) -> str:
    """The meta of the application, as a form shows it."""
    meta = row["meta"] or {}
    return json.dumps({name: meta[name] for name in meta if not name.startswith(RESERVED)})


def _meta_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise OptionError("meta is not JSON; give the keys that change by name") from None


def _options(request: Request) -> dict[str, Any]:
    """The options of a new job that the form names."""
    options: dict[str, Any] = {}
    for name in ("queue", "unique_key"):
        if text := request.posted(name).strip():
            options[name] = text
    if (priority := request.posted_whole("priority", None, 0, 9)) is not None:
        options["priority"] = priority
    if at := request.posted("run_at").strip():
        options["run_at"] = _time_of(at)
    options["tags"] = _tags_of(request)
    return options


def _check_scope(request: Request, task: Task[..., Any]) -> None:
    """Raises Refused for a job that the user could not see."""
    request.check_queue(task.settings.queue)
    _check_tags(request, task.settings.tags)


def _check_tags(request: Request, given: Sequence[str]) -> None:
    tags = request.access.tags
    if tags is not None and not set(tags) & set(given):
        raise Refused(f"give the job one of your tags: {', '.join(sorted(tags))}", 403)


def _edit_page(
    request: Request, template: Template, task: Task[..., Any], fields: list[Field], error: str = ""
) -> Page:
    job = _job_of(template)
    row = job.columns
    is_dead = job.status in DEAD
    return Page(
        "edit_job.html",
        title=f"Change {task.name} #{row['id']}",
        command=f"pgqueue {'requeue' if is_dead else 'change'} {row['id']} --args JSON",
        status=400 if error else 200,
        job_id=row["id"],
        is_dead=is_dead,
        fields=fields,
        seen=_seen(template),
        priority=request.posted("priority") or str(row["priority"]),
        queue=request.posted("queue") or row["queue"],
        run_at=request.posted("run_at") or _time_text(row["run_at"]),
        max_attempts=request.posted("max_attempts") or str(row["max_attempts"]),
        timeout=request.posted("timeout") or _timeout_text(row),
        tags=request.form.get("tags", _tags_text(row)),
        meta=request.form.get("meta", _meta_text(row)),
        error=error,
    )


def _enqueue_page(
    request: Request, task: Task[..., Any], template: Template, fields: list[Field], error: str = ""
) -> Page:
    row = {} if template.job is None else template.job.columns
    settings, form = task.settings, request.form
    tags = row.get("tags") or settings.tags
    return Page(
        "enqueue.html",
        title=f"Enqueue {task.name}",
        command=f"pgqueue enqueue {task.name} --args JSON",
        status=400 if error else 200,
        task=task,
        copy=row.get("id"),
        fields=fields,
        queue=form.get("queue", row.get("queue", settings.queue)),
        priority=form.get("priority", str(row.get("priority", settings.priority))),
        run_at=form.get("run_at", ""),
        unique_key=form.get("unique_key", ""),
        tags=form.get("tags", ", ".join(tags)),
        error=error,
    )


ROUTES = [
    Route("/jobs/<int:job_id>/edit", edit_job, right="edit"),
    Route("/jobs/<int:job_id>/change", change_job, method="POST", right="edit"),
    Route("/tasks/<task:name>/enqueue", enqueue_form, right="enqueue"),
    Route("/tasks/<task:name>/enqueue", enqueue_job, method="POST", right="enqueue"),
]
