"""An outage: the state that all connections of a worker share while the database is away."""

import logging
import time
from threading import Lock

from psycopg.errors import InsufficientPrivilege
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.errors import RowsHidden

logger = redaction.logger(__name__)

REPEAT = 30.0
"""Seconds after which an outage or a refused statement is logged again; in between, only at the
level DEBUG."""

HEARTBEAT = "heartbeat"
"""The name of the connection that writes heartbeats."""

READ_ONLY = "25006"
"""The server answers again, but is a standby now, or is set to refuse writes."""

AWAY = ("08", READ_ONLY, "57")
"""SQLSTATEs by their first characters: no connection, read-only, operator intervention.  Not 53,
disk full or out of memory: some statements still work, and each would seem to end the outage."""

CROWDED = ("too many clients", "connection slots", "too many connections")
"""Messages for a connection refused while others work; they have no SQLSTATE."""


MORE_CONNECTIONS = (
    "a worker needs four connections, up to ten while it prunes, admits and fires schedules, and "
    "one for each transactional handler that runs: raise the CONNECTION LIMIT of the role or the "
    "database, or max_connections"
)


class Outage:
    """Logs the beginning and the end of each outage once per worker, not per connection."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._began_at: float | None = None
        self._ended_at = float("-inf")
        self._logged_at = float("-inf")
        self._is_read_only = False

    def record_error(self, error: Exception, *, name: str, opened_at: float) -> None:
        """Record an error on a connection opened at ``opened_at``, or whose opening began then."""
        now, message, is_read_only = (
            time.monotonic(),
            words_of(error),
            sqlstate_of(error) == READ_ONLY,
        )
        with self._lock:
            # A connection opened before an outage ended has broken in it, or could not be opened
            # in it, and is noticed late.
            is_new = self._began_at is None and opened_at > self._ended_at
            if is_new:
                self._began_at = now
            has_changed = is_read_only and not self._is_read_only
            is_due = self._began_at is not None and now - self._logged_at >= REPEAT
            if is_news := is_new or has_changed or is_due:
                self._logged_at, self._is_read_only = now, is_read_only
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "waiting for the database: %s (%s)", message, name)

    def record_answer(self, *, asked_at: float, name: str) -> None:
        """Record an answer of the database to a statement sent at ``asked_at``.

        A database that refuses to write still answers reads, so only a heartbeat, which always
        writes, shows that it writes again.
        """
        if self._began_at is None or (self._is_read_only and name != HEARTBEAT):
            return
        with self._lock:
            began_at = self._began_at
            if began_at is None or asked_at < began_at:
                return
            self._began_at, self._ended_at = None, time.monotonic()
            self._is_read_only = False
        logger.warning("the database answers again, after %.1f s", self._ended_at - began_at)


def is_away(error: Exception) -> bool:
    """Whether the database is away, and has not merely refused a statement."""
    if is_crowded(error) or is_filtered(error):
        return False
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return True
    state = sqlstate_of(error)
    return not state or state.startswith(AWAY)


def is_filtered(error: Exception) -> bool:
    """Whether row security hides rows from this role; the server's message may be translated."""
    if isinstance(error, RowsHidden):
        return True
    refused = error.orig if isinstance(error, DBAPIError) else None
    if not isinstance(refused, InsufficientPrivilege):
        return False
    return refused.diag.source_function == "check_enable_rls"


def is_crowded(error: object) -> bool:
    """Whether a connection was refused because there are as many as the server allows."""
    return any(words in str(error) for words in CROWDED)


def words_of(error: Exception) -> str:
    """The error's message in one line: some messages of libpq have three."""
    message = str(error.orig if isinstance(error, DBAPIError) else error)
    return " ".join(message.split()).rstrip(".")
