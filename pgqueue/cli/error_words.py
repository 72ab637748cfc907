"""What a command prints of an error."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from pgqueue.checks import shown
from pgqueue.cli.app_loader import CliState
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.errors import PgQueueError
from pgqueue.redaction import redacted
from pgqueue.terminal import harmless, one_line
from pgqueue.worker.outage import MORE_CONNECTIONS, is_crowded


@contextmanager
def in_words(given: CliState) -> Iterator[None]:
    """Raise an error that a user can fix as a ClickException; -v prints its traceback on stderr."""
    try:
        yield
    except Exception as error:
        words = _words_for(error)
        if words is None:
            raise  # usage, an exit code, or a bug of ours, whose report needs the traceback
        if given.is_verbose:
            lines = "".join(traceback.format_exception(error))
            click.echo(harmless(redacted(lines)), err=True)
        if isinstance(error, click.ClickException):
            raise
        raise click.ClickException(words) from error


def _words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None for what is raised as it is."""
    match error:
        case click.UsageError() | BrokenPipeError():
            return None
        case click.ClickException():
            return error.format_message()
        case OperationalError() | InterfaceError() if not sqlstate_of(error):
            remedy = f"; {MORE_CONNECTIONS}" if is_crowded(error.orig) else ""
            return f"No connection to the database: {one_line(error.orig)}{remedy}"
        case DBAPIError():
            return f"The database refuses: {one_line(error.orig)}"
        case UnicodeEncodeError():  # bytes of the command line that are no UTF-8
            return f"{shown(error.object)} is no text that PostgreSQL can store"
        case PgQueueError() | OSError():
            return one_line(error)
    return None
