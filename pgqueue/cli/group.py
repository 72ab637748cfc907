"""What all commands share: the options for application and database, and their errors."""

import io
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.terminal import harmless

if TYPE_CHECKING:
    from pgqueue.job_queue import PgQueue

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as in shells."""


@dataclass
class CliState:
    """The options given before or after the command's name.

    It is the ``ctx.obj`` of every command, and the only place where a command gets its queue.
    """

    app: str | None = None
    url: str | None = None
    url_of_environment: str | None = None
    is_verbose: bool = False
    queue: "PgQueue | None" = None
    """The application's queue, if it is known without --app, as in ``flask pgqueue``."""
    replaced_handler: tuple[logging.Logger, logging.Handler] | None = None
    """The logger of a Flask application and Flask's own handler, which the worker's replaces."""

    def application(self) -> "PgQueue":
        """The application's queue with its tasks, for commands that need them."""
        from pgqueue.cli.app_loader import application

        return application(self)

    def database(self) -> "PgQueue":
        """A queue on the selected database, with or without tasks."""
        from pgqueue.cli.app_loader import database

        return database(self)


class ErrorHandlingGroup(click.Group):
    """A group whose commands print an error in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        _survive_odd_characters()
        try:
            with failing_in_one_line(ctx.ensure_object(CliState)):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@contextmanager
def failing_in_one_line(given: CliState) -> Iterator[None]:
    """Turn errors that a user can fix into one line on stderr, with -v after the traceback."""
    try:
        yield
    except click.ClickException as error:
        _show_traceback(error, given)
        raise
    except Exception as error:
        from pgqueue.cli.refusals import words_for

        words = words_for(error)
        if words is None:
            raise  # our own bug: a report needs the traceback
        _show_traceback(error, given)
        raise click.ClickException(words) from error


def app_option(command: F) -> F:
    return click.option(
        "--app",
        metavar="MODULE:QUEUE",
        expose_value=False,
        callback=_keep,
        help="Where the PgQueue is, e.g. shop.jobs:queue; a function that returns it will do.",
    )(command)


def url_option(command: F) -> F:
    return click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_keep,
        help="The database, where no app is needed, e.g. postgresql://me@localhost/shop.",
    )(command)


def verbose_option(command: F) -> F:
    return click.option(
        "-v",
        "--verbose",
        "is_verbose",
        is_flag=True,
        default=None,
        expose_value=False,
        callback=_keep,
        help="Log more, and show the traceback of an error.",
    )(command)


def as_seconds(
    _ctx: click.Context, _parameter: click.Parameter, value: float | None
) -> timedelta | None:
    """The callback of an option in seconds."""
    if value is None:
        return None
    if not 0 <= value <= 86400:  # refuses nan too
        raise click.BadParameter(f"{value:g} is not between 0 and 86400 seconds")
    return timedelta(seconds=value)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document for a program."
)


def on_database(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the commands that read a database."""
    return app_option(url_option(verbose_option(json_option(click.pass_obj(function)))))


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


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """The option may stand before or after the command's name; the later one takes precedence."""
    given = ctx.ensure_object(CliState)
    if value is not None:
        setattr(given, str(parameter.name), value)


def _show_traceback(error: Exception, given: CliState) -> None:
    if given.is_verbose:
        from pgqueue.redaction import redacted

        lines = "".join(traceback.format_exception(error))
        click.echo(harmless(redacted(lines)), err=True)


def _survive_odd_characters() -> None:
    """Replace characters that the output cannot encode: they must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
