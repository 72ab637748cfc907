"""What went wrong, in one line for the person at the keyboard."""

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from pgqueue.errors import PgQueueError


def words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None when it is a mistake of ours."""
    match error:
        case PgQueueError():
            return _one_line(error)
        case OperationalError() | InterfaceError():
            # libpq ends with a question that is the reader's next step, and ours says it better.
            found = _one_line(error.orig).partition(" Is the server running")[0].rstrip(".")
            return f"The database does not answer: {found}. Check the URL, and that it runs."
        case DBAPIError():
            return f"The database refuses: {_one_line(error.orig)}"
        case ArgumentError():
            return f"{_one_line(error)}. A URL looks like postgresql://user@host/database."
        case BrokenPipeError():
            return None
        case OSError():
            return _one_line(error)
    return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
