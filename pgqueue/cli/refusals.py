"""What went wrong, in one line for the person at the keyboard."""

import re

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from pgqueue.connecting import advice
from pgqueue.errors import PgQueueError
from pgqueue.redaction import redacted
from pgqueue.terminal import harmless


def words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None when it is a mistake of ours."""
    match error:
        case PgQueueError():
            return one_line(error)
        case OperationalError() | InterfaceError():
            # libpq ends with a question that is the reader's next step, and ours says it better.
            if getattr(error.orig, "sqlstate", None) is not None:
                return _refused(error)
            found = one_line(error.orig).partition(" Is the server running")[0].rstrip(".")
            return f"No connection to the database: {found}. {advice(found)}"
        case DBAPIError():
            return _refused(error)
        case ArgumentError():
            return f"{one_line(error)}. A URL looks like postgresql://user@host/database."
        case BrokenPipeError():
            return None
        case OSError():
            return one_line(error)
    return None


def _refused(error: DBAPIError) -> str:
    return f"The database refuses: {_WHERE.split(one_line(error.orig))[0].rstrip('.')}."


_WHERE = re.compile(r" LINE \d+:")
"""Where in the statement, which nobody at the keyboard has written."""


def one_line(error: object) -> str:
    """What an error says, fit for a terminal and a log: one line, no commands, no passwords."""
    return harmless(redacted(" ".join(str(error).split())))
