"""Error messages in one line, for the user of a command."""

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from pgqueue.errors import PgQueueError
from pgqueue.redaction import redacted
from pgqueue.terminal import harmless
from pgqueue.worker.outage import MORE_CONNECTIONS, is_crowded


def words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None for a bug of ours."""
    match error:
        case PgQueueError():
            return one_line(error)
        case OperationalError() | InterfaceError():
            if getattr(error.orig, "sqlstate", None) is None:
                remedy = f"; {MORE_CONNECTIONS}" if is_crowded(error.orig) else ""
                return f"No connection to the database: {one_line(error.orig)}{remedy}"
            return f"The database refuses: {one_line(error.orig)}"
        case DBAPIError():
            return f"The database refuses: {one_line(error.orig)}"
        case ArgumentError():
            return f"{one_line(error)}. A URL looks like postgresql://user@host/database."
        case BrokenPipeError():
            return None
        case OSError():
            return one_line(error)
    return None


def one_line(error: object) -> str:
    """An error's message for a terminal and a log: one line, no escape sequences, no passwords."""
    return harmless(redacted(" ".join(str(error).split())))
