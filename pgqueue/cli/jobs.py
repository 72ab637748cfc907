"""``pgqueue jobs`` and ``enqueue``: everything about one job, or a new one."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.lists import list_jobs, local
from pgqueue.cli.operators import operator_of, reason_option
from pgqueue.cli.options import (
    Seconds,
    as_arguments,
    as_job_id,
    complete_queue,
    complete_task,
    on_app_with_json,
    on_database_with_json,
)
from pgqueue.rules.limits import has_own_capacity, rate_in_words
from pgqueue.tasks.showing import masked, without_values
from pgqueue.terminal import harmless, print_json
from pgqueue.views.jobs import MOST_NODES, MOST_STEPS, JobDetails, LimitUse, PastAttempt
from pgqueue.views.trail import when_of
from pgqueue.views.why import why
from pgqueue.views.words import Reason, in_words, span

UNKNOWN = (
    "Its arguments and its result are hidden: its task names the secret ones, and "
    "is not among those of --app. With --show-arguments they are shown."
)
LONGEST_LINE = 80
"""Characters of JSON in one line."""


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

    Without a command, lists jobs; with an id, shows that job. To change one: `pgqueue requeue ID`,
    `pgqueue cancel ID` and others, without `jobs`.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs --status failed --task mail.welcome
              pgqueue --app shop.jobs:queue jobs 4711
    """


jobs.add_command(list_jobs)


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
        job = queue.views.job(session, job_id)
    is_known = job.columns["task"] in queue.tasks
    if not is_known and not show_arguments:
        job = without_values(job)
        click.echo(UNKNOWN, err=True)
    job = masked(job, queue.tasks.get(job.columns["task"]))
    reasons = why(job, queue.tasks)
    if as_json:
        more = {
            "status": job.status,
            "why": [{"words": str(one), "remedy": one.remedy} for one in reasons],
            "running_on": job.holder,
            "limits": job.limits,
            "is_queue_paused": job.wait.is_queue_paused,
            "is_task_paused": job.wait.task_paused_at is not None,
            "is_queue_served": job.wait.workers > 0,
            "batches": [batch.id for batch in job.batches],
            "before": job.before,
            "after": job.after,
            "steps": job.steps,
        }
        print_json({**job.columns, **more, "failed_attempts": job.past_attempts})
        return
    for line in _lines(job, reasons):
        click.echo(harmless(line))


@click.command()
@click.argument("task", metavar="TASK", shell_complete=complete_task)
@click.option(
    "--args",
    metavar="JSON",
    default="{}",
    callback=as_arguments,
    help="The arguments by name, as JSON.",
)
@click.option(
    "--queue", metavar="NAME", shell_complete=complete_queue, help="Instead of the task's queue."
)
@click.option("--priority", type=click.IntRange(0, 9), help="0 runs first, 9 last.")
@click.option("--unique-key", metavar="KEY", help="Instead of the task's key.")
@click.option("--max-attempts", type=int, metavar="N", help="Instead of the task's number.")
@click.option("--delay", type=Seconds(), default=0, help="Not before.")
@reason_option
@on_app_with_json
def enqueue(
    given: CliState,
    /,
    task: str,
    args: dict[str, Any],
    delay: timedelta,
    reason: str,
    as_json: bool,
    **options: Any,
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
    job = operator_of(queue, reason).enqueue(wanted.options(**changed), args)
    found = {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "status": job.status.value,  # before the commit: no worker has claimed it
        "is_new": job.is_new,
    }
    if as_json:
        print_json(found)
    else:
        click.echo(f"Job {found['id']} of task {found['task']} is {found['status']}.")
        if not job.is_new:
            click.echo("This job held the unique key already; no job was added.", err=True)


def _lines(job: JobDetails, reasons: Sequence[Reason]) -> Iterator[str]:
    yield f"Job {job.columns['id']}  {job.columns['task']}  {job.status}"
    yield ""
    for name, value in _facts(job, reasons):
        first, *others = value.split("\n")
        yield f"  {name:<14}{first}"
        yield from (f"  {'':<14}{line}" for line in others)
    yield from _steps(job)
    attempt_with: dict[str, int] = {}
    for attempt in job.past_attempts:
        began = "" if attempt.started_at is None else f"{local(attempt.started_at)} to "
        yield ""
        yield f"Attempt {attempt.attempt}  {attempt.outcome}  {began}{local(attempt.finished_at)}"
        if attempt.worker_id is not None:
            yield f"  on {_worker(attempt)}"
        if attempt.moved_to is not None:
            yield f"  retried in queue {attempt.moved_to}"
        # A traceback ends with the error itself.
        error = None if attempt.error_type is None else f"{attempt.error_type}: {attempt.error}"
        words = attempt.traceback or error or ""
        first_attempt = attempt_with.setdefault(words, attempt.attempt)
        if attempt.traceback and first_attempt != attempt.attempt:
            words = f"{error}\n(with the traceback of attempt {first_attempt})"
        yield from (f"  {line}" for line in words.rstrip().split("\n"))


def _steps(job: JobDetails) -> Iterator[str]:
    if job.steps:
        yield ""
    for step in job.steps[::-1]:
        end = "" if step.finished_at is None else f" to {local(step.finished_at)}"
        result = "" if step.result is None else f"  {_json(step.result)}"
        began = f"{local(step.started_at)}{end}"
        yield f"Step {step.name}  {step.kind} of attempt {step.attempt}  {began}{result}"
    if len(job.steps) == MOST_STEPS:
        yield "Older steps are not shown."


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
    room = "room now" if wait is None else f"next start in {span(wait)}"
    return f"{rate_in_words(limit.capacity, limit.period)}, {room}"


def _facts(job: JobDetails, reasons: Sequence[Reason]) -> Iterator[tuple[str, str]]:
    """What is known of a job besides its attempts, each with its name."""
    for reason in reasons:
        words = (
            local(part) if isinstance(part, datetime) else in_words(part) for part in reason.words
        )
        remedy = "" if reason.remedy is None else f"; run {reason.remedy}"
        yield "why", f"{''.join(words)}{remedy}"
    row = job.columns
    yield "queue", f"{row['queue']}, priority {row['priority']}"
    yield "arguments", _json(row["args"])
    snoozes = f", snoozed {row['snoozes']} times" if row["snoozes"] else ""
    yield "attempts", f"{row['attempts']} of {row['max_attempts']}{snoozes}"
    if when := when_of(job):
        yield "when", when
    for name, nodes in (("waits for", job.before), ("followed by", job.after)):
        if nodes:
            yield name, "\n".join(map(str, nodes[:MOST_NODES])) + "\n…" * (len(nodes) > MOST_NODES)
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
        "kill asked": row["kill_requested_at"],
        "finished": row["finished_at"],
    }
    yield from ((name, local(time)) for name, time in times.items() if time is not None)


def _worker(of: PastAttempt) -> str:
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
    return json.dumps(value, indent=2 if len(str(value)) > LONGEST_LINE else None)


COMMANDS = (jobs, enqueue)
