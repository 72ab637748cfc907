"""Pages of jobs, which are fast beside millions of waiting or ended jobs.

Waiting jobs come in the order in which they start, which is that of the key: no index finds the
newest of a million messages.  All other jobs come by their ids, the newest first.

No index finds the jobs with an argument, a tag or an error, nor those that have succeeded.  Such a
list is read in windows, each of some thousand rows, until a page is full.  If that takes too long,
the page says how far the search has come, and the next one goes on from there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

from pgqueue.errors import OptionError
from pgqueue.models import STATES, UNFINISHED, Job, JobStatus
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.listing import job_ids
from pgqueue.repository.messages import waiting_pairs
from pgqueue.repository.reading import EPOCH, moment, readable
from pgqueue.repository.tables import (
    Executor,
    array_of,
    array_parameter,
    batch_jobs,
    dead_letters,
    jobs,
    leases,
    message_queue,
    pg,
)

PENDING_ONLY = frozenset({JobStatus.PENDING})

WINDOW = 1000
"""How many rows a list reads first; the next windows are larger if this was quick."""
LARGEST_WINDOW = 16_000
"""A larger one could take much longer than the one before, where rows are not in memory."""
GROWTH = 4
QUICK = 0.02
"""A window should take so many seconds."""
PATIENCE = timedelta(milliseconds=30)
NEAR = 32
"""How many jobs in a row are read to find out what is there."""
DISORDER = timedelta(minutes=1)
"""By how much the times of jobs may contradict the order of their ids."""
LAST_ID = 2**63 - 1
LAST_MICROSECOND = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)

ALWAYS_BEFORE = sa.literal_column("timestamptz '-infinity'", sa.DateTime(timezone=True))
ALWAYS_AFTER = sa.literal_column("timestamptz 'infinity'", sa.DateTime(timezone=True))

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


def list_pending(
    which: JobFilter, start: "Position", end: "Position | None", *, limit: int
) -> sa.Executable:
    """The next jobs to start, after one position and up to another; each with its position.

    At most ``limit`` messages of each queue and priority are read, unless a filter passes over
    more of them.
    """
    message = message_queue.c
    # A probe by key for each message: as joins, these could read all of both tables.
    is_pending = (
        sa.select(sa.and_(jobs.c.outcome.is_(None), *STATES[JobStatus.PENDING].conditions))
        .where(jobs.c.id == message.target_id)
        .correlate_except(jobs, leases)
        .scalar_subquery()
        .is_(sa.true())
    )
    more = [is_pending, *which.words(message_queue, message.target_id)]
    rows = _messages(which, start, end, more, [message.target_id], limit=limit)
    found = rows.subquery("found")
    position = (found.c.priority, found.c.run_at, found.c.id)
    return (
        sa.select(*map(readable, SHOWN), moment(found.c.run_at), found.c.id)
        .join(found, found.c.target_id == Job.id)
        .order_by(*position)
    )


def pending_window(which: JobFilter, start: "Position", *, size: int) -> sa.Executable:
    """The position of the message that comes so many after this position, whatever its job."""
    words = which.words_of_place(message_queue)
    last = _messages(which, start, None, words, [], limit=size).offset(size - 1).subquery("last")
    return sa.select(last.c.priority, moment(last.c.run_at), last.c.id)


def _messages(
    which: JobFilter,
    start: "Position",
    end: "Position | None",
    words: Sequence[sa.ColumnElement[bool]],
    columns: Sequence[sa.ColumnElement[Any]],
    *,
    limit: int,
) -> sa.Select[*tuple[Any, ...]]:
    """The positions of the next messages behind one position and up to another, in their order."""
    pair, message = waiting_pairs(), message_queue.c
    position = sa.tuple_(message.run_at, message.id)
    # Of the queue and priority of the position, only what is behind it.
    first = ALWAYS_BEFORE if which.are_due is not False else pg.statement_timestamp()
    bounds = [pair.c.priority >= _priority(start), position > _in_pair(start, pair, first)]
    if end is not None:
        bounds += [pair.c.priority <= _priority(end), position <= _in_pair(end, pair, ALWAYS_AFTER)]
    each = (
        sa.select(message.priority, message.run_at, message.id, *columns)
        .where(message.queue == pair.c.queue, message.priority == pair.c.priority)
        .where(*bounds, *words)
        .order_by(message.run_at, message.id)
        .limit(limit)
        .lateral("each")
    )
    return (
        sa.select(each)
        .select_from(pair.join(each, sa.true()))
        .order_by(each.c.priority, each.c.run_at, each.c.id)
        .limit(limit)
    )


def _priority(position: "Position") -> sa.ColumnElement[int]:
    return sa.literal(position.priority, sa.SmallInteger)


def _in_pair(position: "Position", pair: sa.CTE, otherwise: sa.ColumnElement[Any]) -> sa.Tuple:
    """A position among the messages of a queue and priority; for another priority, a time."""
    run_at: sa.ColumnElement[Any] = sa.cast(position.run_at, sa.DateTime(timezone=True))
    if otherwise is not ALWAYS_AFTER:
        run_at = sa.func.greatest(run_at, otherwise)
    at = sa.case((pair.c.priority == _priority(position), run_at), else_=otherwise)
    return sa.tuple_(at, sa.literal(position.message_id, sa.BigInteger))


@cache
def id_below(table: sa.Table) -> sa.Executable:
    """The id of the row that comes so many below another id."""
    id = jobs.c.id if table is jobs else table.c.job_id
    rows = sa.select(id).where(id < _bound("before")).order_by(id.desc())
    return rows.offset(_bound("size") - sa.literal_column("1", sa.BigInteger)).limit(1)


@cache
def ids_of_batch() -> sa.Executable:
    id = batch_jobs.c.job_id
    of_batch = batch_jobs.c.batch_id == _bound("batch_id")
    bounds = [edge(id, type_=sa.BigInteger) for edge in (pg.min, pg.max)]
    return sa.select(*bounds).where(of_batch)


@cache
def time_of() -> sa.Executable:
    """When the first job from this id on was enqueued."""
    behind = jobs.c.id >= _bound("job_id")
    return sa.select(moment(jobs.c.created_at)).where(behind).order_by(jobs.c.id).limit(1)


@cache
def newest_id() -> sa.Executable:
    """The present time, and the highest id below another one."""
    newest = pg.max(jobs.c.id, type_=sa.BigInteger)
    return sa.select(moment(pg.statement_timestamp()), newest).where(jobs.c.id < _bound("before"))


@cache
def highest_before() -> sa.Executable:
    """The highest of these ids at which one of the next jobs was enqueued before a time."""
    ids = pg.unnest(array_parameter("ids", sa.BigInteger))
    given = sa.select(ids.label("id")).subquery("given")
    near = (
        sa.select(jobs.c.created_at)
        .where(jobs.c.id >= given.c.id, jobs.c.id < _bound("before"))
        .order_by(jobs.c.id)
        .limit(sa.literal_column(str(NEAR)))
        .lateral("near")
    )
    time = sa.DateTime(timezone=True)
    at = sa.cast(sa.bindparam("at", type_=time), time)
    return (
        sa.select(given.c.id)
        .select_from(given.join(near, near.c.created_at < at))
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


class Position(NamedTuple):
    """A position in the order of claims, behind which a page of waiting jobs begins."""

    priority: int = 0
    microseconds: int = 0
    """The ``run_at`` of the last message, since 1970."""
    message_id: int = 0
    before: int = 0
    """Only jobs with a smaller id; 0 for any."""

    def moved_to(self, priority: int, run_at: datetime, message_id: int) -> "Position":
        """Another position in the same list."""
        return Position(
            priority, (run_at - EPOCH) // timedelta(microseconds=1), message_id, self.before
        )

    @property
    def run_at(self) -> datetime:
        return EPOCH + timedelta(microseconds=min(self.microseconds, LAST_MICROSECOND))


PageStart = int | Position
"""Where a page begins: below an id, or behind a position."""


def page_start(text: str) -> PageStart:
    """Read what :func:`words_of` has written; raises ValueError."""
    if re.fullmatch("[0-9](/[0-9]{1,18}){3}", text):
        return Position(*map(int, text.split("/")))
    if text.isdecimal() and 0 < int(text) <= LAST_ID:
        return int(text)
    raise ValueError(text)


def words_of(start: PageStart) -> str:
    return str(start) if isinstance(start, int) else "/".join(map(str, start))


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, in the order of the list."""

    jobs: Sequence[JobLine]
    next_start: PageStart | None
    """Where the next page begins; None on the last page."""
    searched_to: datetime | None = None
    """If the search has stopped before the page was full: when the last job that it has read was
    enqueued; in a list of waiting jobs, when it is due."""


Start = TypeVar("Start", bound=PageStart)


class Windows(Protocol[Start]):
    """A list in parts, each from a start to an end."""

    def end(self, start: Start, size: int) -> Start | None:
        """The end of a part of so many rows; None if the list has fewer."""

    def read(self, start: Start, end: Start | None, limit: int) -> Sequence[tuple[JobLine, Start]]:
        """The first matching jobs of a part, each with its position."""

    def time_of(self, end: Start) -> datetime | None:
        """How far the search has come."""


class Ids:
    """Jobs by descending ids; a part ends at the id of a row of ``table``."""

    def __init__(self, executor: Executor, which: JobFilter) -> None:
        self._executor, self._which = executor, which
        self._table = _table_of_windows(which)

    def end(self, start: int, size: int) -> int | None:
        if self._table is None:
            return None
        parameters = {"before": start, "size": size}
        end: int | None = self._executor.execute(id_below(self._table), parameters).scalar()
        return None if end is None or end <= (self._which.after or 0) else end

    def read(self, start: int, end: int | None, limit: int) -> Sequence[tuple[JobLine, int]]:
        after = self._which.after if end is None else end - 1
        rows = list_jobs(replace(self._which, before=start, after=after), limit=limit)
        return [(JobLine(*row), row.id) for row in self._executor.execute(rows)]

    def time_of(self, end: int) -> datetime | None:
        return self._executor.execute(time_of(), {"job_id": end}).scalar()


class Places:
    """Pending jobs in the order of claims."""

    def __init__(self, executor: Executor, which: JobFilter) -> None:
        self._executor, self._which = executor, which
        words = which.words(message_queue, message_queue.c.target_id)
        self._every_message_fits = len(words) == len(which.words_of_place(message_queue))

    def end(self, start: Position, size: int) -> Position | None:
        if self._every_message_fits:
            return None
        row = self._executor.execute(pending_window(self._which, start, size=size)).first()
        return None if row is None else start.moved_to(*row)

    def read(
        self, start: Position, end: Position | None, limit: int
    ) -> Sequence[tuple[JobLine, Position]]:
        rows = self._executor.execute(list_pending(self._which, start, end, limit=limit)).all()
        lines = [(JobLine(*row[:-2]), row[-2:]) for row in rows]
        return [(line, start.moved_to(line.priority, *position)) for line, position in lines]

    def time_of(self, end: Position) -> datetime:
        return end.run_at


def _table_of_windows(which: JobFilter) -> sa.Table | None:
    """The table whose rows a list passes over; None if an index finds its jobs, or few are read."""
    if not which.statuses or JobStatus.SUCCEEDED in which.statuses:
        return jobs
    # No index finds the newest messages: they are all read.
    are_few = which.statuses.issubset(UNFINISHED) or not which.words_of_row()
    return None if are_few else dead_letters


class Pages:
    """Pages of jobs behind one Session or Connection.

    ``patience``: how long a page is searched, by default :data:`PATIENCE`; at least one part is.
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
        if before:
            which = replace(which, before=min(before, which.before or before))
        if which.error is not None and not which.statuses:
            which = replace(which, statuses=frozenset({JobStatus.FAILED}))
        asked, which = which, self._narrowed(which)
        if which.statuses == PENDING_ONLY:
            position = start if isinstance(start, Position) else Position(before=asked.before or 0)
            return self._searched(Places(self._executor, which), position, limit)
        if isinstance(start, Position):
            raise OptionError("the page before was of a list with another status")
        return self._searched(Ids(self._executor, which), which.before or LAST_ID, limit)

    def _searched(self, windows: Windows[Start], start: Start, limit: int) -> JobPage:
        """Read windows until the page is full, the list ends, or the patience does."""
        found: list[tuple[JobLine, Start]] = []
        size, began = WINDOW, monotonic()
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
                return JobPage(lines, end, windows.time_of(end))
            start = end
            size = round(size * min(GROWTH, QUICK / (now - opened)))
            size = min(max(size, WINDOW), LARGEST_WINDOW)

    def _narrowed(self, which: JobFilter) -> JobFilter:
        """Bound the ids of a list by its batch, and by the times of the jobs."""
        after, before = which.after or 0, which.before or LAST_ID
        if which.batch is not None:
            bounds = self._executor.execute(ids_of_batch(), {"batch_id": which.batch}).one()
            lowest, highest = (1, 0) if bounds[0] is None else bounds
            after, before = max(after, lowest - 1), min(before, highest + 1)
        if which.created_after is not None or which.created_before is not None:
            now, newest = self._executor.execute(newest_id(), {"before": before}).one()
            before = (newest or 0) + 1
            if (since := _at(which.created_after, now)) is not None:
                low, _ = self._bisected(before, after, since - DISORDER)
                after = max(after, low - 1)
            if (until := _at(which.created_before, now)) is not None:
                _, before = self._bisected(before, after, until + DISORDER)
        return replace(which, after=after or None, before=None if before == LAST_ID else before)

    def _bisected(self, before: int, after: int, at: datetime) -> tuple[int, int]:
        """Two ids near each other: jobs near the first one were enqueued before a time, and the
        probes above the second one have found none.

        The first id is 0 if no probe has found one.
        """
        ids: Sequence[int] = [max(before - 2**n, after + 1) for n in range(before.bit_length() + 1)]
        high = before
        while True:
            parameters = {"ids": array_of(map(str, ids)), "before": before, "at": at}
            low = self._executor.execute(highest_before(), parameters).scalar()
            if low is None:
                return 0, min(ids)
            high = min((id for id in ids if id > low), default=high)
            if high - low <= WINDOW:
                return low, high
            ids = range(low, high, (high - low) // NEAR + 1)


def _at(time: datetime | timedelta | None, now: datetime) -> datetime | None:
    return now - time if isinstance(time, timedelta) else time
