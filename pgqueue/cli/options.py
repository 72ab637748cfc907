"""The options, parameter types and hints that the commands share."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import Field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import click

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.app_options import APP, URL, Decorator, option_of_state, verbose_option
from pgqueue.errors import OptionError
from pgqueue.filter_line import read_fingerprint, read_span
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus
from pgqueue.operations import Selection
from pgqueue.operations.selection import RANGES, WRITTEN, ValueKind
from pgqueue.tasks import Task, queues_of
from pgqueue.terminal import harmless
from pgqueue.views.jobs import PageStart, page_start

LONGEST_AGE = 100 * 366 * 86_400
"""Seconds."""


def together(*decorators: Decorator) -> Decorator:
    """One decorator that does what these do, the first one outermost."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class Seconds(click.types.FloatParamType):
    """Parameter type: a duration in seconds."""

    name = "seconds"

    def __init__(self, least: float = 0, most: float = 86_400) -> None:
        self._least, self._most = least, most

    def convert(
        self, value: Any, parameter: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        seconds = super().convert(value, parameter, ctx)
        if not self._least <= seconds <= self._most:  # refuses nan too
            words = f"{seconds:g} is not between {self._least} and {self._most} seconds"
            self.fail(words, parameter, ctx)
        return timedelta(seconds=seconds)


def as_arguments(
    _ctx: click.Context, parameter: click.Parameter, value: str | None
) -> dict[str, Any] | None:
    """The callback of --args and --meta."""
    option, noun = f"--{parameter.name}", "keys" if parameter.name == "meta" else "arguments"
    if value is None:
        return None
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.UsageError(f"{option} is not JSON: {error}") from error
    except RecursionError as error:
        raise click.UsageError(f"{option} is nested too deeply") from error
    if not isinstance(found, dict):
        raise click.UsageError(
            f"{option} is not a JSON object: give the {noun} by name, as in '{{\"user_id\": 7}}'"
        )
    return found


def as_tags(value: str) -> list[str]:
    """Parameter type: tags, separated by commas."""
    return [tag for tag in map(str.strip, value.split(",")) if tag]


def as_json_value(value: str) -> Any:
    """Parameter type: what JSON can express."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"this is not JSON: {error}") from error


def as_job_id(value: str, of: str = "job") -> int:
    """Parameter type: the id of a job that may or may not exist."""
    if not value.isdecimal() or not 0 < int(value) < 2**63:
        raise click.BadParameter(f"{value!r} is not the id of a {of}")
    return int(value)


def as_batch_id(value: str) -> int:
    """Parameter type: the id of a batch that may or may not exist."""
    return as_job_id(value, "batch")


def as_action_id(value: str) -> int:
    """Parameter type: the id of an action of the log."""
    return as_job_id(value, "action")


def as_worker_id(value: str) -> UUID:
    """Parameter type: the id of a worker that may or may not live."""
    try:
        return UUID(value)
    except ValueError as error:
        raise click.BadParameter("give the ids that `pgqueue workers` shows") from error


def as_page_start(value: str) -> PageStart:
    """Parameter type: the id of a job, or numbers that a page of jobs has printed."""
    try:
        return page_start(value)
    except ValueError:
        return as_job_id(value)


def as_fingerprint(value: str) -> int:
    """Parameter type: the kind of an error, as ``pgqueue failures`` prints it."""
    try:
        return read_fingerprint(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not an error of `pgqueue failures`") from error


def as_span(value: str) -> timedelta:
    """Parameter type: a time until now."""
    try:
        return read_span(value)
    except ValueError as error:
        words = f"{value!r} is not a span of time, as 90s, 30m, 1h or 7d"
        raise click.BadParameter(words) from error


def as_filter(value: str) -> Selection:
    """Parameter type: a filter as one line."""
    try:
        found = Selection.from_line(value)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error
    if found.ids is not None:
        raise click.BadParameter(f"{found.ids[0]} is the id of a job: give it without --where")
    return found


def as_time(value: str) -> datetime:
    """Parameter type: a time with a time zone."""
    try:
        time = datetime.fromisoformat(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a time, as 2030-01-31T08:00Z") from error
    if time.utcoffset() is None:
        raise click.BadParameter(
            f"{value!r} has no time zone; give it, as {value}Z or {value}+01:00"
        )
    return time


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document for a program."
)

_app = option_of_state("--app", **APP)
_url = option_of_state("--url", **URL)

on_app = together(_app, verbose_option, click.pass_obj)
"""For commands that need the application."""
on_app_with_json = together(_json_option, on_app)
on_database = together(_url, on_app)
"""For commands that need a database, with or without an application."""
on_database_with_json = together(_json_option, on_database)


def complete_task(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the application's tasks."""
    return sorted(task.name for task in _tasks(ctx) if task.name.startswith(incomplete))


def complete_queue(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Queues of the application's tasks."""
    return sorted(queue for queue in queues_of(_tasks(ctx)) if queue.startswith(incomplete))


def _tasks(ctx: click.Context) -> list[Task[..., object]]:
    given = ctx.ensure_object(CliState)
    given.app = given.app or ctx.find_root().params.get("app")
    # Output of the application's import must not appear in the line that is being typed.
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            return list(given.application().tasks.values())
        except Exception:  # an application may raise anything
            return []


TYPES: Mapping[ValueKind, dict[str, Any]] = {
    ValueKind.TEXT: {"metavar": "NAME"},
    ValueKind.JOB: {"type": as_job_id, "metavar": "ID"},
    ValueKind.BATCH: {"type": as_batch_id, "metavar": "ID"},
    ValueKind.ERROR: {"type": as_fingerprint, "metavar": "ERROR"},
    ValueKind.NUMBER: {"type": click.IntRange(*RANGES[ValueKind.NUMBER]), "metavar": "N"},
    ValueKind.UNTIL: {"type": Seconds(most=LONGEST_AGE)},
}
"""The settings of an option, by the kind of its condition."""
COMPLETED = {"task": complete_task, "queue": complete_queue}


def _option_of(each: Field[Any]) -> Decorator:
    """The option of a condition."""
    about, complete = each.metadata, COMPLETED.get(each.name)
    settings = {**TYPES[about["kind"]], "help": f"Only jobs {about['help']}."}
    return click.option(about["option"], each.name, shell_complete=complete, **settings)


FILTERS = {name: _option_of(each) for name, each in WRITTEN.items() if each.metadata["option"]}
FILTERS["where"] = click.option(
    "--where",
    type=as_filter,
    metavar="FILTER",
    help="Only jobs of a filter, as 'arg.order_id:42 error:timeout created:>2h took:>10s'.",
)
"""The options that select jobs, by their field of JobFilter."""


OF_PAGE = FILTERS | {
    "before": click.option(
        "--before",
        type=as_page_start,
        metavar="ID",
        help="What the page before has printed, or an id.",
    )
}
"""The same for a page of jobs."""


def which_jobs(
    statuses: Iterable[JobStatus], filters: Mapping[str, Decorator] = FILTERS
) -> Decorator:
    """Add the options that select jobs of these statuses."""
    status = click.option(
        "--status",
        "statuses",
        type=click.Choice([status.value for status in statuses]),
        multiple=True,
        help="Only jobs that stand there; may be repeated.",
    )
    return together(status, *filters.values())


def chosen_jobs(
    statuses: Iterable[str], *, where: Selection | None, **conditions: Any
) -> Selection:
    """The jobs of the options; raises UsageError for a condition that is given twice."""
    chosen = where or Selection()
    given = {name for name, value in conditions.items() if value is not None}
    given |= {"statuses"} if statuses else set()
    for name in sorted(given & {*chosen.which.given()}):
        option = name.replace("_", "-")
        raise click.UsageError(f"{option} is given twice: as an option and in --where")
    return chosen.also(status=statuses, **conditions)


def hint_at_names(
    queue: PgQueue, *, task: str | None = None, queue_name: str | None = None
) -> None:
    """Ask on stderr whether a name is misspelt; without the app, its names are unknown."""
    if not queue.tasks:
        return
    if task is not None and task not in queue.tasks:
        click.echo(harmless(f"The app has no task {task}. Is the name misspelt?"), err=True)
    if queue_name is not None and queue_name not in queues_of(queue.tasks.values()):
        words = f"No task of the app uses queue {queue_name}. Is the name misspelt?"
        click.echo(harmless(words), err=True)
