"""Pages of jobs, which are fast beside millions of waiting or ended jobs.

Pending jobs come in the order in which they start (:class:`ClaimOrder`): no index finds the newest
of a million messages.  All other jobs come by their ids, the newest first (:class:`IdOrder`).

No index finds the jobs with an argument, a tag or an error, nor those that have succeeded.  Such a
list is read in windows, each of some thousand rows, until a page is full.  If that takes too long,
the page says how far the search has come, and the next one goes on from there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic
from typing import Protocol, TypeVar

from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.repository.claim_order import ClaimOrder, Position
from pgqueue.repository.conditions import LAST_ID, JobFilter
from pgqueue.repository.id_bounds import IdBounds
from pgqueue.repository.id_order import IdOrder
from pgqueue.repository.job_line import JobLine
from pgqueue.repository.tables import Executor

PENDING_ONLY = frozenset({JobStatus.PENDING})

FIRST_WINDOW = 1000
"""How many rows a list reads first; the next windows are larger if this was quick."""
LARGEST_WINDOW = 16_000
"""A larger one could take much longer than the one before, where rows are not in memory."""
GROWTH = 4
"""How many times larger than a window the next one may be."""
QUICK = 0.02
"""How many seconds a window should take."""
PATIENCE = timedelta(milliseconds=30)

PageStart = int | Position
"""Where a page begins: below an id, or behind a position."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, in the order of the list."""

    jobs: Sequence[JobLine]
    next_start: PageStart | None
    """Where the next page begins; None on the last page."""
    searched_to: datetime | None = None
    """If the search has stopped before the page was full: when the last job that it has read was
    enqueued; in a list of pending jobs, when it is due."""


class Pages:
    """Pages of jobs behind one Session or Connection.

    ``patience``: how long a page is searched, by default :data:`PATIENCE`; at least one window is.
    """

    def __init__(self, executor: Executor, *, patience: timedelta | None = None) -> None:
        self._executor = executor
        self._patience = (PATIENCE if patience is None else patience).total_seconds()

    def page(self, which: JobFilter, *, limit: int, start: PageStart | None = None) -> JobPage:
        """The next matching jobs; reads one more, to know whether there is another page.

        ``start``: an id, or the ``next_start`` of another page.  Raises OptionError if that page
        was of a list in another order.
        """
        before = start.before if isinstance(start, Position) else start
        if before is not None:
            which = which.between(before=before)
        if which.error is not None and not which.statuses:
            # Only failed jobs have the fingerprint of an error, and far fewer rows are theirs.
            which = replace(which, statuses=frozenset({JobStatus.FAILED}))
        bounded = IdBounds(self._executor).added_to(which)
        if bounded.statuses == PENDING_ONLY:
            position = start if isinstance(start, Position) else Position(before=which.before)
            return self._searched(ClaimOrder(self._executor, bounded), position, limit)
        if isinstance(start, Position):
            raise OptionError("the page before was of a list with another status")
        newest = LAST_ID if bounded.before is None else bounded.before
        return self._searched(IdOrder(self._executor, bounded), newest, limit)

    def _searched(self, windows: "Windows[Start]", start: "Start", limit: int) -> JobPage:
        """Read windows until the page is full, the list ends, or the patience does."""
        found: list[tuple[JobLine, Start]] = []
        size, began = FIRST_WINDOW, monotonic()
        while True:
            opened = monotonic()
            end = windows.end(start, size)
            found += windows.read(start, end, limit + 1 - len(found))
            lines = [line for line, _ in found[:limit]]
            if len(found) > limit:
                return JobPage(lines, found[limit - 1][1])
            if end is None:
                return JobPage(lines, None)
            if (now := monotonic()) - began > self._patience:
                return JobPage(lines, end, windows.searched_to(end))
            start = end
            size = round(size * min(GROWTH, QUICK / (now - opened)))
            size = min(max(size, FIRST_WINDOW), LARGEST_WINDOW)


Start = TypeVar("Start", bound=PageStart)


class Windows(Protocol[Start]):
    """A list in windows, each from a start to an end."""

    def end(self, start: Start, size: int) -> Start | None:
        """The end of a window of so many rows; None if the list has fewer, or needs no windows."""

    def read(self, start: Start, end: Start | None, limit: int) -> Sequence[tuple[JobLine, Start]]:
        """The first matching jobs of a window, each with where the list goes on behind it."""

    def searched_to(self, end: Start) -> datetime | None:
        """How far the search has come: see :attr:`JobPage.searched_to`."""


def page_start(text: str) -> PageStart:
    """Read what :func:`text_of_start` has written; raises ValueError."""
    if re.fullmatch("[0-9](/[0-9]{1,18}){3}", text):
        priority, microseconds, message_id, before = map(int, text.split("/"))
        return Position(priority, microseconds, message_id, before or None)
    if text.isdecimal() and 0 < int(text) <= LAST_ID:
        return int(text)
    raise ValueError(text)


def text_of_start(start: PageStart) -> str:
    """Write where a page begins, as for an address; a bound that is missing is 0."""
    return str(start) if isinstance(start, int) else "/".join(str(part or 0) for part in start)
