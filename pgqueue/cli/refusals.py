"""What went wrong, in one line for the person at the keyboard."""

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from pgqueue.errors import PgQueueError


def words_for(error: Exception) -> str | None:
    """One line that says what happened and what to do; None when it is a mistake of ours."""
    match error:
        case PgQueueError():
            return _one_line(error)
        case OperationalError() | InterfaceError():
            return (
                f"The database does not answer: {_one_line(error.orig).rstrip('.')}. "
                "Check that the server runs, and the URL."
            )
        case DBAPIError():
            return f"The database refuses: {_one_line(error.orig)}"
        case ArgumentError():
            return f"{_one_line(error)}. A URL looks like postgresql://user@host/database."
        case OSError():
            return _one_line(error)
    return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
