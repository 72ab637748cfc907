"""``pgqueue jobs`` and ``enqueue``: a page of jobs, everything about one, or a new one."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import (
    as_job_id,
    as_seconds,
    complete_queue,
    complete_task,
    on_app_with_json,
    on_database_with_json,
    which_jobs,
)
from pgqueue.cli.names import print_no_job
from pgqueue.job_queue import PgQueue
from pgqueue.limits import has_own_capacity, rate_in_words
from pgqueue.models import JobStatus
from pgqueue.redaction import MASK, redacted, redacted_data, secrets_among
from pgqueue.repository import Holder, JobDetails, JobLine, LimitUse, Listing, PastAttempt
from pgqueue.statements.listing import NOT_YOURS, JobFilter
from pgqueue.terminal import as_data, harmless, print_json, print_table

UNKNOWN = (
    "Its arguments and its result are hidden: its task names the secret ones, and "
    "is not among those of --app. With --show-arguments they are shown."
)
LONGEST_ERROR = 80
"""Characters of an error shown in a list; ``jobs show`` shows all."""


class ListFirst(click.Group):
    """``pgqueue jobs`` is ``pgqueue jobs list``, and ``pgqueue jobs 4711`` shows that job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        wants_help = bool(args) and args[0] in ctx.help_option_names
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # the shell completes the command names
        if not args or (args[0].startswith("-") and not wants_help):
            args = ["list", *args]
        elif args[0].isdecimal():
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListFirst)
def jobs() -> None:
    """List jobs, or show one with its errors.

    Without a command, lists jobs; with an id, shows that job.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs --status failed --task mail.welcome
              pgqueue --app shop.jobs:queue jobs 4711
    """


@jobs.command("list")
@which_jobs("pending", "running", "blocked", "succeeded", "failed", "cancelled")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many."
)
@on_database_with_json
def list_(
    given: CliState, /, as_json: bool, limit: int, statuses: Sequence[str], **words: Any
) -> None:
    """List jobs, newest first.

    For a page of older jobs, give the last id as --before.  Reads no arguments, and is fast
    beside millions of ended jobs; only --task or --queue without --status may read far back
    for a rare name.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs list --status pending --status running
    """
    which = JobFilter(statuses=frozenset(map(JobStatus, statuses)), **words)
    queue = given.database()
    with opened(queue) as session:
        page = Listing(session).page(which, limit=limit)
    if as_json:
        jobs = [redacted_data(as_data(job)) for job in page.jobs]
        print_json({"jobs": jobs, "next_before": page.next_before})
        return
    if not page.jobs:
        print_no_job(queue, which.task, which.queue)
        return
    columns = ["id", "status", "task", "queue", "attempts", "created", "last error"]
    print_table(columns, [_cells(job) for job in page.jobs])
    if page.next_before is not None:
        click.echo(f"There are older ones: add --before {page.next_before}", err=True)


@jobs.command()
@click.argument("job_id", metavar="ID", type=as_job_id)
@click.option(
    "--show-arguments", is_flag=True, help="Also where nobody says which of them are secret."
)
@on_database_with_json
def show(given: CliState, as_json: bool, job_id: int, show_arguments: bool) -> None:
    """Show everything about one job.

    Its arguments, options and times, the worker that runs it, and every unsuccessful attempt
    with its error.  Arguments that its task declares secret are shown as ***.  If the app does not
    have the task, arguments and result are hidden.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs show 4711
    """
    queue = given.database()
    with opened(queue) as session:
        job = Listing(session).job(job_id)
    is_known = job.columns["task"] in queue.tasks
    job = _redacted(queue, job) if is_known or show_arguments else _hidden(job)
    if not is_known and not show_arguments:
        click.echo(UNKNOWN, err=True)
    if as_json:
        more = {
            "status": job.status,
            "running_on": job.holder,
            "limits": job.limits,
            "is_queue_paused": job.is_queue_paused,
            "is_task_paused": job.is_task_paused,
        }
        print_json({**job.columns, **more, "failed_attempts": job.past_attempts})
        return
    for line in _lines(job):
        click.echo(harmless(line))


@click.command()
@click.argument("task", metavar="TASK", shell_complete=complete_task)
@click.option("--args", metavar="JSON", default="{}", help="The arguments by name, as JSON.")
@click.option(
    "--queue", metavar="NAME", shell_complete=complete_queue, help="Instead of the task's queue."
)
@click.option("--priority", type=click.IntRange(0, 9), help="0 runs first, 9 last.")
@click.option("--unique-key", metavar="KEY", help="Instead of the task's key.")
@click.option("--max-attempts", type=int, metavar="N", help="Instead of the task's number.")
@click.option(
    "--delay", type=float, metavar="SECONDS", callback=as_seconds, default=0, help="Not before."
)
@on_app_with_json
def enqueue(
    given: CliState, /, task: str, args: str, delay: timedelta, as_json: bool, **options: Any
) -> None:
    """Enqueue a job of a task, in a transaction of its own.

    The arguments are checked as in the application.  If another job of the queue holds the unique
    key, adds none and prints that job, which may have ended if the key is that of a period.

    \b
    Example:  pgqueue --app shop.jobs:queue enqueue mail.welcome --args '{"user_id": 7}'
    """
    queue = given.application()
    wanted = queue.find(task)
    changed = {key: value for key, value in options.items() if value is not None}
    if delay:
        changed["delay"] = delay
    values = json_object(args)
    wanted.payload.bind((), values)  # refuses unknown and missing names, as in the application
    arguments = wanted.payload.decode(values, noun="argument")
    with opened(queue) as session:
        job = wanted.options(**changed).enqueue(session, **arguments)
        found = {
            "id": job.id,
            "task": job.task,
            "queue": job.queue,
            "status": job.status.value,  # before the commit: no worker has claimed it
            "is_new": job.is_new,
        }
        session.commit()
    if as_json:
        print_json(found)
    else:
        click.echo(f"Job {found['id']} of task {found['task']} is {found['status']}.")
        if not job.is_new:
            click.echo("This job held the unique key already; no job was added.", err=True)


def json_object(text: str) -> dict[str, Any]:
    """Read the arguments of a job as --args has them."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--args is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError(
            "--args is not a JSON object: give the arguments by name, as in '{\"user_id\": 7}'"
        )
    return found


def _hidden(job: JobDetails) -> JobDetails:
    """Mask arguments and result.  Errors were masked when stored, by a worker that had the task."""
    hidden = {name: _masked(job.columns[name]) for name in ("args", "result")}
    return _redacted(PgQueue(), replace(job, columns={**job.columns, **hidden}))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, MASK)
    return value if value in (None, NOT_YOURS) else MASK


def _redacted(queue: PgQueue, job: JobDetails) -> JobDetails:
    """Mask secrets; only the app knows which arguments of its tasks are secret."""
    task = queue.tasks.get(job.columns["task"])
    names = () if task is None else task.settings.secret_args
    secrets = secrets_among(job.columns["args"], names)
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
    return replace(job, columns=columns, past_attempts=past)


def _cells(job: JobLine) -> list[str]:
    error = redacted(job.last_error or "").strip().partition("\n")[0]
    return [
        str(job.id),
        job.status.value,
        job.task,
        job.queue,
        f"{job.attempts}/{job.max_attempts}",
        _local(job.created_at),
        error if len(error) <= LONGEST_ERROR else f"{error[: LONGEST_ERROR - 3]}...",
    ]


def _lines(job: JobDetails) -> Iterator[str]:
    row = job.columns
    yield f"Job {row['id']}  {row['task']}  {job.status}"
    yield ""
    for name, value in _facts(job):
        first, *others = value.split("\n")
        yield f"  {name:<14}{first}"
        yield from (f"  {'':<14}{line}" for line in others)
    first_with: dict[str, int] = {}
    for attempt in job.past_attempts:
        yield from _lines_of_attempt(attempt, first_with)


def _use(limit: LimitUse) -> str:
    if limit.capacity is None:
        return f"{limit.held} places held; no worker has declared it"
    if not has_own_capacity(limit.capacity, is_fair=limit.is_fair):
        return f"{limit.held} places held; the keys take turns"
    if limit.capacity == 0:
        return f"paused, {limit.held} places held"
    if limit.period is None:
        return f"{limit.held} of {limit.capacity} places held"
    wait = limit.seconds_to_token
    room = "room now" if wait is None else f"next start in {wait:.1f} s"
    return f"{rate_in_words(limit.capacity, limit.period)}, {room}"


def _pauses(job: JobDetails) -> Iterator[tuple[str, str]]:
    queue, task = job.columns["queue"], job.columns["task"]
    if job.is_queue_paused:
        yield "paused", f"queue {queue}: pgqueue resume {queue}"
    if job.is_task_paused:
        yield "paused", f"task {task}: pgqueue resume --task {task}"


def _facts(job: JobDetails) -> Iterator[tuple[str, str]]:
    row = job.columns
    yield "queue", f"{row['queue']}, priority {row['priority']}"
    yield "arguments", _json(row["args"])
    yield "attempts", f"{row['attempts']} of {row['max_attempts']}{_snoozes(row['snoozes'])}"
    if job.status in (JobStatus.PENDING, JobStatus.BLOCKED):
        yield from _pauses(job)
    for limit in job.limits:
        yield "limit", f"{limit.key}, {_use(limit)}"
    if row["progress"] is not None:
        yield "progress", _progress(row["progress"])
    for name in ("unique_key", "tags", "meta", "result", "last_error"):
        if row[name] is not None:
            text = row[name] if isinstance(row[name], str) else _json(row[name])
            yield name.replace("_", " "), text
    times = {
        "created": row["created_at"],
        "due": row["run_at"],
        "started": row["started_at"],
        "cancel asked": row["cancel_requested_at"],
        "finished": row["finished_at"],
    }
    yield from ((name, _local(time)) for name, time in times.items() if time is not None)
    if job.holder is not None:
        yield "runs on", _holder(job.holder)


def _holder(holder: Holder) -> str:
    beat = holder.heartbeat_age
    age = "" if beat is None else f", last heartbeat {beat.total_seconds():.1f} s ago"
    name = _worker(holder)
    return f"{name}, attempt {holder.attempt} since {_local(holder.started_at)}{age}"


def _lines_of_attempt(attempt: PastAttempt, first_with: dict[str, int]) -> Iterator[str]:
    """The lines of an attempt; a traceback that an earlier attempt had is not repeated."""
    began = "" if attempt.started_at is None else f"{_local(attempt.started_at)} to "
    yield ""
    yield f"Attempt {attempt.attempt}  {attempt.outcome}  {began}{_local(attempt.finished_at)}"
    if attempt.worker_id is not None:
        yield f"  on {_worker(attempt)}"
    # A traceback ends with the error itself.
    error = None if attempt.error_type is None else f"{attempt.error_type}: {attempt.error}"
    words = attempt.traceback or error or ""
    first = first_with.setdefault(words, attempt.attempt)
    if attempt.traceback and first != attempt.attempt:
        words = f"{error}\n(with the traceback of attempt {first})"
    yield from (f"  {line}" for line in words.rstrip().split("\n"))


def _worker(of: Holder | PastAttempt) -> str:
    """A stopped worker has deleted its row, so that only its id is known."""
    if of.hostname is None:
        return f"worker {of.worker_id}"
    return f"{of.hostname}:{of.pid} (worker {of.worker_id})"


def _progress(progress: Any) -> str:
    if not isinstance(progress, dict):  # hidden from this role
        return str(progress)
    of = "" if progress.get("total") is None else f" of {progress['total']}"
    note = "" if progress.get("note") is None else f": {progress['note']}"
    return f"{progress.get('done')}{of}{note}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2 if len(str(value)) > LONGEST_ERROR else None)


def _snoozes(number: int) -> str:
    return f", snoozed {number} times" if number else ""


def _local(time: datetime) -> str:
    """A time in the reader's own time zone, with its offset."""
    return time.astimezone().isoformat(sep=" ", timespec="seconds")
