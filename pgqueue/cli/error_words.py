"""What a command prints of an error."""

import traceback

import click
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from pgqueue.checks import shown
from pgqueue.cli.app_loader import CliState
from pgqueue.errors import PgQueueError
from pgqueue.redaction import redacted
from pgqueue.terminal import harmless, one_line
from pgqueue.worker.outage import MORE_CONNECTIONS, is_crowded


def words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None for a bug of ours."""
    match error:
        case click.ClickException():
            return error.format_message()
        case OperationalError() | InterfaceError() if getattr(error.orig, "sqlstate", None) is None:
            remedy = f"; {MORE_CONNECTIONS}" if is_crowded(error.orig) else ""
            return f"No connection to the database: {one_line(error.orig)}{remedy}"
        case DBAPIError():
            return f"The database refuses: {one_line(error.orig)}"
        case ArgumentError():
            return f"{one_line(error)}. A URL looks like postgresql://user@host/database."
        case UnicodeEncodeError():  # bytes of the command line that are no UTF-8
            return f"{shown(error.object)} is no text that PostgreSQL can store"
        case BrokenPipeError():
            return None
        case PgQueueError() | OSError():
            return one_line(error)
    return None


def show_traceback(error: Exception, given: CliState) -> None:
    """Print the traceback on stderr, if -v asks for it."""
    if given.is_verbose:
        lines = "".join(traceback.format_exception(error))
        click.echo(harmless(redacted(lines)), err=True)
