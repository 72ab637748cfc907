"""What a loop that reads rows does with a row that it cannot process."""

import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from psycopg.errors import QueryCanceled
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.worker.outage import is_away, is_filtered, words_of
from pgqueue.worker.reconnecting import BROKEN, lacks_right

logger = redaction.logger(__name__)

FIRST_REST = 0.5
LONGEST_REST = 5.0
"""Seconds for which a row that has failed is left alone; the first, doubled with each failure."""

MOST_NAMED = 100
"""Rows that the log names, of those that fail."""
FORGET_AFTER = 3600.0
"""Seconds after a failure when the row counts as one that has never failed."""

RESOURCES = "53"
"""The first characters of the SQLSTATEs for a full disk or memory."""

REFUSALS = ("22", "23", "P0")
"""The same for an impossible value, a violated constraint, and RAISE EXCEPTION."""


class Failure(NamedTuple):
    """The last failure of a row."""

    message: str
    again_at: float
    rest: float


class RowGuard:
    """Keeps a loop that reads rows going when a row fails.

    Each row is processed in a block ``with guard.row(key, words)``, in a transaction of its own.
    An error of the block is logged once for each reason, and the row rests; the caller skips rows
    for which :meth:`rests` is true.  Of the application's code, SystemExit and CancelledError are
    errors of the row too.  Only an error that no row can cause leaves the block.
    """

    def __init__(self) -> None:
        self._failures: dict[Hashable, Failure] = {}

    def rests(self, key: Hashable) -> bool:
        """Whether a row has failed so lately that it is not tried again yet."""
        failure = self._failures.get(key)
        return failure is not None and time.monotonic() < failure.again_at

    @property
    def have_failed(self) -> bool:
        """Whether any row has failed and was not processed since."""
        return bool(self._failures)

    def has_failed(self, key: Hashable) -> bool:
        """Whether a row failed when it was tried last."""
        return key in self._failures

    @contextmanager
    def row(self, key: Hashable, words: str) -> Iterator[None]:
        """Process one row; ``words`` say what cannot be done with it, for the log."""
        try:
            yield
        except BaseException as error:
            if not may_be_of_row(error):
                if _may_be_of_all(error):
                    self._note(key, "")  # the next pass begins with other rows
                raise
            self.failed(key, words, error)
        else:
            self.succeeded(key)

    def failed(self, key: Hashable, words: str, error: BaseException) -> None:
        """Note and log the failure of a row."""
        cause = words_of(error) if isinstance(error, DBAPIError) else str(error)
        message = f"{words}: {type(error).__name__}: {cause}"
        before = self._failures.get(key)
        is_news = before is None or before.message != message
        is_news = is_news and len(self._failures) < MOST_NAMED
        logger.log(logging.ERROR if is_news else logging.DEBUG, "%s", message)
        self._note(key, message)

    def succeeded(self, key: Hashable) -> None:
        """Forget the failures of a row."""
        self._failures.pop(key, None)

    def _note(self, key: Hashable, message: str) -> None:
        before, now = self._failures.pop(key, None), time.monotonic()
        rest = FIRST_REST if before is None else min(2 * before.rest, LONGEST_REST)
        self._failures[key] = Failure(message, now + rest, rest)  # last: the first is the oldest
        while self._failures[oldest := next(iter(self._failures))].again_at < now - FORGET_AFTER:
            del self._failures[oldest]  # another worker may have processed it


def may_be_of_row(error: BaseException) -> bool:
    """Whether one row may be the reason of an error: any but a lost connection or a right or room
    that the server lacks for all rows."""
    if not isinstance(error, BROKEN):
        return True
    return isinstance(error, DBAPIError) and not is_away(error) and not _may_be_of_all(error)


def is_refusal_of_row(error: DBAPIError) -> bool:
    """Whether a constraint refuses a value, or a trigger raises an error of its own."""
    return sqlstate_of(error)[:2] in REFUSALS


def _may_be_of_all(error: BaseException) -> bool:
    """Whether the reason of a refusal is a setting, a right or a resource, as far as it says."""
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return False
    is_refused = lacks_right(error) or is_filtered(error)
    lacks_room = sqlstate_of(error)[:2] == RESOURCES
    return is_refused or isinstance(error.orig, QueryCanceled) or lacks_room
