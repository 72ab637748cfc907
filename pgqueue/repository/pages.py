"""Pages of jobs, which are fast beside millions of waiting or ended jobs.

Pages are in the order of ids, the newest jobs first, with two exceptions.  No index finds the
newest of a million messages, so waiting jobs come in the order in which they start, which is that
of the key.  And no index finds the newest succeeded jobs beneath a million that wait: if none of
the newest jobs has succeeded, a page continues further down, and the next page goes on in both
places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from pgqueue.errors import OptionError
from pgqueue.models import Job, JobStatus
from pgqueue.repository.listing import JobFilter, job_ids
from pgqueue.repository.messages import waiting_pairs
from pgqueue.repository.reading import EPOCH, moment, readable
from pgqueue.repository.tables import (
    SUCCEEDED,
    array_of,
    array_parameter,
    jobs,
    leases,
    message_queue,
    pg,
)

PENDING_ONLY = frozenset({JobStatus.PENDING})
SUCCEEDED_ONLY = frozenset({JobStatus.SUCCEEDED})

STRETCH = 2000
"""How many of the newest ids a page of succeeded jobs reads before it looks further down."""
NEAR = 32
"""How many jobs in a row are read to find out whether jobs have succeeded there."""
LAST_ID = 2**63 - 1
LAST_MICROSECOND = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)

SHOWN: tuple[Any, ...] = (
    Job.id,
    Job.status,
    Job.task,
    Job.queue,
    Job.priority,
    Job.attempts,
    Job.max_attempts,
    Job.run_at,
    Job.created_at,
    Job.started_at,
    Job.finished_at,
    Job.last_error,
)
"""No arguments and results, which may be large and secret."""


def list_jobs(which: JobFilter, *, limit: int) -> sa.Executable:
    """The newest matching jobs, by descending id."""
    found = job_ids(which, limit=limit, newest_first=True).subquery("found")
    return (
        sa.select(*map(readable, SHOWN)).join(found, found.c.id == Job.id).order_by(Job.id.desc())
    )


def list_pending(which: JobFilter, start: "Place", *, limit: int) -> sa.Executable:
    """The next jobs to start, after this place; each with its place.

    At most ``limit`` messages of each queue and priority are read, unless a filter passes over
    more of them.
    """
    pair, message = waiting_pairs(), message_queue.c
    # In the order of the key; of the queue and priority of the place, only what is behind it.
    priority = sa.literal(start.priority, sa.SmallInteger)
    first_of_all = sa.literal_column("timestamptz '-infinity'", sa.DateTime(timezone=True))
    is_behind = sa.tuple_(message.run_at, message.id) > sa.tuple_(
        sa.case((pair.c.priority == priority, start.run_at), else_=first_of_all),
        sa.literal(start.message_id, sa.BigInteger),
    )
    # A probe by key for each message: as joins, these could read all of both tables.
    leased = sa.exists().where(leases.c.target_id == jobs.c.id)
    is_pending = (
        sa.select(sa.and_(jobs.c.outcome.is_(None), ~leased))
        .where(jobs.c.id == message.target_id)
        .correlate_except(jobs, leases)
        .scalar_subquery()
        .is_(sa.true())
    )
    first = (
        sa.select(message.priority, message.run_at, message.id, message.target_id)
        .where(message.queue == pair.c.queue, message.priority == pair.c.priority)
        .where(is_behind, is_pending, *which.words(message_queue, message.target_id))
        .order_by(message.run_at, message.id)
        .limit(limit)
        .lateral("first")
    )
    found = (
        sa.select(first)
        .select_from(pair.join(first, sa.true()))
        .where(pair.c.priority >= priority)
        .order_by(first.c.priority, first.c.run_at, first.c.id)
        .limit(limit)
        .subquery("found")
    )
    place = (found.c.priority, found.c.run_at, found.c.id)
    return (
        sa.select(*map(readable, SHOWN), moment(found.c.run_at), found.c.id)
        .join(found, found.c.target_id == Job.id)
        .order_by(*place)
    )


@cache
def newest_id() -> sa.Executable:
    return sa.select(pg.max(jobs.c.id, type_=sa.BigInteger)).where(jobs.c.id < _bound("before"))


@cache
def succeeded_near() -> sa.Executable:
    """The highest of these ids at which one of the next jobs has succeeded."""
    ids = pg.unnest(array_parameter("ids", sa.BigInteger))
    given = sa.select(ids.label("id")).subquery("given")
    near = (
        sa.select(jobs.c.outcome)
        .where(jobs.c.id >= given.c.id, jobs.c.id < _bound("before"))
        .order_by(jobs.c.id)
        .limit(sa.literal_column(str(NEAR)))
        .lateral("near")
    )
    return (
        sa.select(given.c.id)
        .select_from(given.join(near, near.c.outcome == SUCCEEDED))
        .order_by(given.c.id.desc())
        .limit(1)
    )


def _bound(name: str) -> sa.ColumnElement[int]:
    return sa.bindparam(name, type_=sa.BigInteger)


class JobLine(NamedTuple):
    """A job in a list."""

    id: int
    status: JobStatus
    task: str
    queue: str
    priority: int
    attempts: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    last_error: str | None


class Place(NamedTuple):
    """A place in the order of claims, behind which a page of waiting jobs begins."""

    priority: int = 0
    microseconds: int = 0
    """The ``run_at`` of the last message, since 1970."""
    message_id: int = 0
    before: int = 0
    """Only jobs with a smaller id; 0 for any."""

    @property
    def run_at(self) -> datetime:
        return EPOCH + timedelta(microseconds=min(self.microseconds, LAST_MICROSECOND))


class Gap(NamedTuple):
    """The ids that pages of succeeded jobs have not read: from ``lowest`` to below ``before``, and
    those below ``older``."""

    before: int
    lowest: int
    older: int


PageStart = int | Place | Gap
"""Where a page begins: below an id, or in a list that is not in the order of ids."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, in the order of the list."""

    jobs: Sequence[JobLine]
    next_start: PageStart | None
    """Where the next page begins; None on the last page."""


class Pages:
    """Pages of jobs behind one Session or Connection."""

    def __init__(self, executor: Session | sa.Connection) -> None:
        self._executor = executor

    def page(self, which: JobFilter, *, limit: int, start: PageStart | None = None) -> JobPage:
        """The next matching jobs; reads one more, to know whether there is another page.

        ``start``: an id, or the ``next_start`` of another page.  Raises OptionError if that page
        was of a list in another order.
        """
        if isinstance(start, int):
            which, start = replace(which, before=start), None
        match start:
            case None | Place() if which.statuses == PENDING_ONLY:
                return self._pending(which, start or Place(before=which.before or 0), limit)
            case Gap() if which.statuses == SUCCEEDED_ONLY:
                return self._beside_gap(which, start, limit)
            case None if which.statuses == SUCCEEDED_ONLY:
                return self._succeeded(which, limit)
            case None:
                return _page(self._newest(which, limit + 1), limit)
        raise OptionError("the page before was of a list with another status")

    def _newest(self, which: JobFilter, limit: int) -> list[JobLine]:
        return [JobLine(*row) for row in self._executor.execute(list_jobs(which, limit=limit))]

    def _pending(self, which: JobFilter, start: Place, limit: int) -> JobPage:
        which = replace(which, before=start.before or None)
        rows = self._executor.execute(list_pending(which, start, limit=limit + 1)).all()
        shown = [JobLine(*row[:-2]) for row in rows[:limit]]
        if len(rows) <= limit:
            return JobPage(shown, None)
        run_at, message_id = rows[limit - 1][-2:]
        since = (run_at - EPOCH) // timedelta(microseconds=1)
        return JobPage(shown, Place(shown[-1].priority, since, message_id, start.before))

    def _succeeded(self, which: JobFilter, limit: int) -> JobPage:
        """The first page: of the newest stretch only, if enough jobs have succeeded there."""
        before, after = which.before or LAST_ID, which.after or 0
        floor = self._end_of_stretch(before, after + 1)
        found = self._newest(replace(which, after=floor - 1) if floor else which, limit + 1)
        if floor is None or len(found) > limit:
            return _page(found, limit)
        lowest = self._succeeded_below(floor, after) or floor
        return self._beside_gap(which, Gap(before, lowest, lowest), limit)

    def _beside_gap(self, which: JobFilter, gap: Gap, limit: int) -> JobPage:
        """Jobs of the newest stretch of the gap; if they are too few, also some further down."""
        before, lowest, older = gap
        floor = self._end_of_stretch(before, lowest) if older else None
        stretch = replace(which, before=before, after=(floor or lowest) - 1)
        found = self._newest(stretch, limit + 1)
        if len(found) > limit:
            return JobPage(found[:limit], Gap(found[limit - 1].id, lowest, older))
        rest = self._newest(replace(which, before=older), limit + 1 - len(found))
        both = [*found, *rest]
        shown = both[:limit]
        if len(both) <= limit:
            older = 0  # nothing is left there
        elif len(shown) > len(found):
            older = shown[-1].id
        return JobPage(shown, Gap(floor, lowest, older) if floor else older or None)

    def _end_of_stretch(self, before: int, lowest: int) -> int | None:
        """The lowest id of the newest stretch; None if it has all ids down to the lowest."""
        newest = self._executor.execute(newest_id(), {"before": before}).scalar()
        floor = 0 if newest is None else newest - STRETCH
        return floor if floor > lowest else None

    def _succeeded_below(self, before: int, after: int) -> int | None:
        """An id below which jobs have succeeded, found by bisecting; None if there is none.

        Reads only some jobs, so that those that have succeeded may also be above.
        """
        ids: Sequence[int] = [max(before - 2**n, after + 1) for n in range(before.bit_length() + 1)]
        while True:
            parameters = {"ids": array_of(map(str, ids)), "before": before}
            low = self._executor.execute(succeeded_near(), parameters).scalar()
            if low is None:
                return None
            high = min((id for id in ids if id > low), default=before)
            if high - low <= STRETCH:
                return high
            ids = range(low, high, (high - low) // NEAR + 1)


def _page(found: Sequence[JobLine], limit: int) -> JobPage:
    """A page in the order of ids, of which one job more was read."""
    return JobPage(found[:limit], found[limit - 1].id if len(found) > limit else None)
