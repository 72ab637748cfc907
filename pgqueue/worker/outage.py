"""An outage: what the lines of one worker know together of a database that is away."""

import logging
import time
from threading import Lock

from sqlalchemy.exc import DBAPIError

from pgqueue import redaction

logger = redaction.logger(__name__)

REPEAT = 30.0
"""Seconds after which an outage is told again, or a refused statement; in between, only at the
level of debug."""

READ_ONLY = "25006"
"""The server answers again, and is a standby now, or was told to take no writes."""

AWAY = ("08", READ_ONLY, "57")
"""SQLSTATEs by their first characters: no connection, read-only, an operator.  Not 53, a full disk
or too little memory: some statements work all the same, and it would seem over at each of them."""

CROWDED = ("too many clients", "connection slots", "too many connections")
"""What one connection is refused with while others work; it comes without an SQLSTATE."""


class Outage:
    """Told once by whoever meets it first, and its end once: not by each line of the worker."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._began_at: float | None = None
        self._ended_at = float("-inf")
        self._told_at = float("-inf")
        self._is_read_only = False

    def is_met(self, error: Exception, *, name: str, opened_at: float) -> None:
        """A line has met it on a connection that was opened at this time."""
        now, said, is_read_only = time.monotonic(), words_of(error), _state(error) == READ_ONLY
        with self._lock:
            # A connection from before the end of an outage has broken in it, and is found late.
            is_new = self._began_at is None and opened_at > self._ended_at
            if is_new:
                self._began_at = now
            has_changed = is_read_only and not self._is_read_only
            is_due = self._began_at is not None and now - self._told_at >= REPEAT
            if is_news := is_new or has_changed or is_due:
                self._told_at, self._is_read_only = now, is_read_only
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "waiting for the database: %s (%s)", said, name)

    def is_over(self, *, asked_at: float) -> None:
        """A line has had an answer to what it asked at this time."""
        if self._began_at is None:
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
    if any(words in str(error) for words in CROWDED):
        return False
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return True
    state = _state(error)
    return state is None or state.startswith(AWAY)


def _state(error: Exception) -> str | None:
    return getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None


def words_of(error: Exception) -> str:
    """In one line: libpq says some things in three."""
    said = str(error.orig if isinstance(error, DBAPIError) else error)
    return " ".join(said.split()).rstrip(".")
