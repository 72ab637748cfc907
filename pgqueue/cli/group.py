"""What all commands share: how the application and the database are named, and how they fail."""

import io
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.terminal import harmless

if TYPE_CHECKING:
    from pgqueue.job_queue import PgQueue

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as shells count it."""


@dataclass
class CliState:
    """What was said on the command line, before or after the command's name.

    It is the ``ctx.obj`` of every command, and the one place where a command gets its queue.
    """

    app: str | None = None
    url: str | None = None
    url_of_environment: str | None = None
    is_verbose: bool = False
    queue: "PgQueue | None" = None
    """The application's, where it is known without --app, as in ``flask pgqueue``."""

    def application(self) -> "PgQueue":
        """The application's queue, with its tasks; for commands that need them."""
        from pgqueue.cli.app_loader import application

        return application(self)

    def database(self) -> "PgQueue":
        """A queue on the database that is meant, with or without tasks."""
        from pgqueue.cli.app_loader import database

        return database(self)


class ErrorHandlingGroup(click.Group):
    """A group whose commands end in one line when something is wrong."""

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
    """Turn what a user can mend into one line on stderr; with -v the traceback comes first."""
    try:
        yield
    except click.ClickException as error:
        _show_traceback(error, given)
        raise
    except Exception as error:
        from pgqueue.cli.refusals import words_for

        words = words_for(error)
        if words is None:
            raise  # a mistake of ours: the traceback is what a report needs
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


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document for a program."
)


def on_database(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the commands that look at a database."""
    return app_option(url_option(verbose_option(json_option(click.pass_obj(function)))))


def log_to_stderr(given: CliState) -> None:
    """Plain lines, unless the application has set up logging of its own."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if given.is_verbose:
        logging.getLogger("pgqueue").setLevel(logging.DEBUG)


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """The option may stand before and after the command's name; what is said later wins."""
    given = ctx.ensure_object(CliState)
    if value is not None:
        setattr(given, str(parameter.name), value)


def _show_traceback(error: Exception, given: CliState) -> None:
    if given.is_verbose:
        from pgqueue.redaction import redacted

        lines = "".join(traceback.format_exception(error))
        click.echo(harmless(redacted(lines)), err=True)


def _survive_odd_characters() -> None:
    """A file name or an error must not end a command that only wants to show it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
