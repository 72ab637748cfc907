"""What all commands share: the group that prints their errors, and their options."""

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import datetime, timedelta
from typing import Any

import click

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.refusals import words_for
from pgqueue.redaction import redacted
from pgqueue.tasks import Task
from pgqueue.terminal import harmless

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as in shells."""

Decorator = Callable[[Any], Any]


class ErrorHandlingGroup(click.Group):
    """A group whose commands print an error that a user can fix in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        _survive_odd_characters()
        given = ctx.ensure_object(CliState)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except click.ClickException as error:
            _show_traceback(error, given)
            raise
        except Exception as error:
            words = words_for(error)
            if words is None:
                raise  # a bug of ours, whose report needs the traceback, or an exit code
            _show_traceback(error, given)
            raise click.ClickException(words) from error


def together(*decorators: Decorator) -> Decorator:
    """One decorator that does what these do, the first one outermost."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """The option may stand before or after the command's name; the later one takes precedence."""
    given = ctx.ensure_object(CliState)
    if value is not None:
        setattr(given, str(parameter.name), value)


def _option_of_state(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, expose_value=False, callback=_keep, **settings)


def as_seconds(
    _ctx: click.Context, _parameter: click.Parameter, value: float | None
) -> timedelta | None:
    """The callback of an option in seconds."""
    if value is None:
        return None
    if not 0 <= value <= 86400:  # refuses nan too
        raise click.BadParameter(f"{value:g} is not between 0 and 86400 seconds")
    return timedelta(seconds=value)


def as_job_id(value: str) -> int:
    """Parameter type: the id of a job that may or may not exist."""
    if not value.isdecimal() or not 0 < int(value) < 2**63:
        raise click.BadParameter(f"{value!r} is not the id of a job")
    return int(value)


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


app_option = _option_of_state(
    "--app",
    metavar="MODULE:QUEUE",
    help="Where the PgQueue is, e.g. shop.jobs:queue; a function that returns it will do.",
)
url_option = _option_of_state(
    "--url",
    metavar="URL",
    help="The database, where no app is needed, e.g. postgresql://me@localhost/shop.",
)
verbose_option = _option_of_state(
    "-v",
    "--verbose",
    "is_verbose",
    is_flag=True,
    default=None,
    help="Log more, and show the traceback of an error.",
)
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document for a program."
)

on_app = together(app_option, verbose_option, click.pass_obj)
"""For commands that need the application."""
on_app_with_json = together(app_option, verbose_option, _json_option, click.pass_obj)
on_database = together(app_option, url_option, verbose_option, click.pass_obj)
"""For commands that need a database, with or without an application."""
on_database_with_json = together(
    app_option, url_option, verbose_option, _json_option, click.pass_obj
)


def complete_task(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the application's tasks."""
    return sorted(task.name for task in _tasks(ctx) if task.name.startswith(incomplete))


def complete_queue(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Queues of the application's tasks."""
    queues = {task.settings.queue for task in _tasks(ctx)}
    return sorted(queue for queue in queues if queue.startswith(incomplete))


def _tasks(ctx: click.Context) -> list[Task[..., object]]:
    given = ctx.ensure_object(CliState)
    given.app = given.app or ctx.find_root().params.get("app")
    # Output of the application's import must not appear in the line that is being typed.
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            return list(given.application().tasks.values())
        except Exception:  # an application may raise anything
            return []


_FILTERS = (
    click.option(
        "--task", metavar="NAME", shell_complete=complete_task, help="Only jobs of this task."
    ),
    click.option(
        "--queue", metavar="NAME", shell_complete=complete_queue, help="Only jobs of this queue."
    ),
    click.option("--tag", metavar="TAG", help="Only jobs with this tag."),
    click.option("--before", type=as_job_id, metavar="ID", help="Only jobs older than this one."),
    click.option("--after", type=as_job_id, metavar="ID", help="Only jobs newer than this one."),
)


def which_jobs(*statuses: str) -> Decorator:
    """Add the options that select jobs; no statuses if the command means only one."""
    status = click.option(
        "--status",
        "statuses",
        type=click.Choice(statuses),
        multiple=True,
        help="Only jobs that stand there; may be repeated.",
    )
    return together(*([status] if statuses else []), *_FILTERS)


def log_to_stderr(given: CliState) -> None:
    """Log plain lines, unless the application has configured logging."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if given.replaced_handler is not None:
        logger, handler = given.replaced_handler
        logger.removeHandler(handler)  # or each line of the application is written twice
    if given.is_verbose:
        logging.getLogger("pgqueue").setLevel(logging.DEBUG)


def _show_traceback(error: Exception, given: CliState) -> None:
    if given.is_verbose:
        lines = "".join(traceback.format_exception(error))
        click.echo(harmless(redacted(lines)), err=True)


def _survive_odd_characters() -> None:
    """Replace characters that the output cannot encode: they must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
