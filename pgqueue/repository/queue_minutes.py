"""How many jobs the queues had, by queue and minute, and how many go in and out."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.buckets import bucket_of, first_bucket, in_all_buckets
from pgqueue.repository.messages import waiting_pairs
from pgqueue.repository.reading import moment, span
from pgqueue.repository.tables import (
    Executor,
    array_of,
    array_parameter,
    count_rows,
    document,
    jobs,
    leases,
    lock_key,
    message_queue,
    pg,
    queue_minutes,
    waiting_messages,
)
from pgqueue.repository.task_minutes import (
    MINUTE,
    MOST,
    as_count,
    delete_old,
    delete_to_fold,
    folded_at,
    plus,
)

ALL = sa.literal_column("''", sa.Text)
"""The queue of a row that each count writes, also if there are no jobs: no queue has this name."""
COUNTS = ("waiting", "due", "blocked", "running")
ZERO = sa.literal_column("0", sa.Integer)
NOW = pg.statement_timestamp()
REMEMBERED: sa.ColumnElement[Any] = sa.literal_column("interval '10 minutes'")
"""For so long a queue is counted after its last job: then the charts have its end."""
WRITTEN_LATE: sa.ColumnElement[Any] = sa.literal_column("interval '15 seconds'")
"""For so long after the end of a minute workers may still add to it."""
REMAINS_TRUE = timedelta(minutes=1)
FLOW_MINUTES = 5
"""Whole minutes over which the jobs that go in and out are counted."""


@cache
def try_lock() -> sa.Executable:
    """Take the lock of the worker that counts, held until its connection ends.

    The lock saves work: two workers that count at once write the same numbers.
    """
    return sa.select(
        pg.pg_try_advisory_lock(sa.literal_column(str(lock_key("depths")), sa.BigInteger))
    )


@cache
def count_queues() -> sa.Executable:
    """Count the jobs of all queues and write the numbers of this minute.

    Reads all messages, waiting messages and leases.  In the order of the keys, as
    :func:`add_started`: other orders could deadlock.
    """
    is_due, waits_only_for_limits = message_queue.c.run_at <= NOW, waiting_messages.c.run_at <= NOW
    nothing = sa.cast(sa.null(), sa.DateTime(timezone=True))
    mark = queue_minutes.c
    counted = sa.func.coalesce(mark.waiting + mark.blocked + mark.running, ZERO)
    had_jobs = counted + mark.started > ZERO
    parts = sa.union_all(
        sa.select(
            message_queue.c.queue,
            count_rows().label("waiting"),
            count_rows().filter(is_due).label("due"),
            ZERO.label("blocked"),
            ZERO.label("running"),
            pg.min(message_queue.c.run_at).filter(is_due).label("oldest"),
        ).group_by(message_queue.c.queue),
        sa.select(
            waiting_messages.c.queue,
            count_rows().filter(~waits_only_for_limits),
            ZERO,
            count_rows().filter(waits_only_for_limits),
            ZERO,
            nothing,
        ).group_by(waiting_messages.c.queue),
        sa.select(jobs.c.queue, ZERO, ZERO, ZERO, count_rows(), nothing)
        .join_from(leases, jobs, jobs.c.id == leases.c.target_id)
        .group_by(jobs.c.queue),
        sa.select(ALL, ZERO, ZERO, ZERO, ZERO, nothing),
        # A queue that is empty now.
        sa.select(mark.queue, ZERO, ZERO, ZERO, ZERO, nothing)
        .where(mark.at > NOW - REMEMBERED, had_jobs)
        .group_by(mark.queue),
    ).subquery("part")
    age = sa.cast(sa.extract("epoch", NOW - pg.min(parts.c.oldest)), sa.Integer)
    columns = ["at", "queue", "counted_at", *COUNTS, "oldest_due_s"]
    rows = (
        sa.select(
            _minute(NOW),
            parts.c.queue,
            NOW,
            *(sa.cast(pg.sum(parts.c[name]), sa.Integer) for name in COUNTS),
            age,
        )
        .group_by(parts.c.queue)
        .order_by(parts.c.queue)
    )
    new = pg_insert(queue_minutes).from_select(columns, rows)
    return new.on_conflict_do_update(
        index_elements=[queue_minutes.c.at, queue_minutes.c.queue],
        set_={name: new.excluded[name] for name in columns[2:]},
    )


@cache
def add_started() -> sa.Executable:
    """Add claimed jobs to the rows of some minutes, in the order of their keys."""
    given = document(
        "given",
        sa.column("minute", sa.Double),
        sa.column("queue", sa.Text),
        sa.column("started", sa.Integer),
    )
    at = pg.to_timestamp(given.c.minute, type_=sa.DateTime(timezone=True))
    rows = sa.select(at, given.c.queue, given.c.started).order_by(at, given.c.queue)
    new = pg_insert(queue_minutes).from_select(["at", "queue", "started"], rows)
    return new.on_conflict_do_update(
        index_elements=[queue_minutes.c.at, queue_minutes.c.queue],
        set_={"started": plus(queue_minutes.c.started, new.excluded.started)},
    )


@cache
def last_counts() -> sa.Executable:
    """The last count of all queues, which one statement has written.

    A row of the future, which a clock that was wrong has left, is none.
    """
    mark = queue_minutes.c
    counted = mark.counted_at.is_not(None)
    last = sa.select(pg.max(mark.at)).where(mark.at <= NOW, counted).scalar_subquery()
    second: sa.ColumnElement[Any] = sa.literal_column("interval '1 second'")
    return (
        sa.select(
            mark.queue,
            moment(mark.counted_at),
            span(NOW - mark.counted_at),
            *(mark[name] for name in COUNTS),
            span(sa.cast(mark.oldest_due_s, sa.Double) * second),
        )
        .where(mark.at == last, mark.counted_at.is_not(None))
        .order_by(mark.queue)
    )


@cache
def flows() -> sa.Executable:
    """By queue, over the last whole minutes: how much the backlog has grown, how many jobs were
    claimed, and in how many minutes; no row if fewer than two of the minutes were counted.

    The numbers of jobs are those at the end of the first and the last minute, so the jobs claimed
    in the first are left out.  A queue without a row had no jobs then.
    """
    mark = queue_minutes.c
    minutes_before: sa.ColumnElement[Any] = sa.literal_column(
        f"interval '{FLOW_MINUTES + 1} minutes'"
    )
    end = _minute(NOW - WRITTEN_LATE)
    begin = end - minutes_before
    is_whole = sa.and_(mark.at >= begin, mark.at < end)
    bound = (
        sa.select(pg.min(mark.at).label("first"), pg.max(mark.at).label("last"))
        .where(is_whole, mark.counted_at.is_not(None))
        .subquery("bound")
    )
    backlog = mark.due + mark.blocked
    grown = [pg.sum(backlog).filter(mark.at == bound.c[name]) for name in ("last", "first")]
    last, first = (sa.func.coalesce(each, sa.cast(ZERO, sa.BigInteger)) for each in grown)
    started = pg.sum(mark.started).filter(mark.at > bound.c.first, mark.at <= bound.c.last)
    minutes = sa.extract("epoch", pg.max(bound.c.last) - pg.max(bound.c.first))
    return (
        sa.select(
            mark.queue,
            last - first,
            sa.func.coalesce(started, sa.cast(ZERO, sa.BigInteger)),
            sa.cast(minutes, sa.Double),
        )
        .select_from(queue_minutes.join(bound, sa.true()))
        .where(is_whole, bound.c.last > bound.c.first)
        .group_by(mark.queue)
    )


@cache
def first_due() -> sa.Executable:
    """The first due message of each queue and priority, by one probe of the key for each."""
    pair, message = waiting_pairs(), message_queue.c
    first = (
        sa.select(message.task, message.run_at)
        .where(
            message.queue == pair.c.queue,
            message.priority == pair.c.priority,
            message.run_at <= NOW,
        )
        .order_by(message.run_at, message.id)
        .limit(1)
        .lateral("first")
    )
    return (
        sa.select(pair.c.queue, first.c.task, span(NOW - first.c.run_at))
        .select_from(pair.join(first, sa.true()))
        .order_by(pair.c.queue, first.c.run_at)
    )


@cache
def depth_series(*, of_queues: bool) -> sa.Executable:
    """By part of a time, the most jobs that these queues or all had in a minute, and those that
    were claimed."""
    mark = queue_minutes.c
    minutes = sa.select(mark.at, *(pg.sum(mark[name]).label(name) for name in COUNTS))
    minutes = minutes.add_columns(
        pg.max(mark.oldest_due_s).label("oldest"), pg.sum(mark.started).label("started")
    )
    conditions = [mark.at >= first_bucket()]
    if of_queues:
        conditions.append(mark.queue == sa.any_(array_parameter("queues", sa.Text)))
    minute = minutes.where(*conditions).group_by(mark.at).subquery("minute")
    number = bucket_of(minute.c.at)
    most = (pg.max(minute.c[name]).label(name) for name in (*COUNTS, "oldest"))
    started = sa.cast(pg.sum(minute.c.started), sa.BigInteger).label("started")
    return in_all_buckets(sa.select(number, *most, started).group_by(number).subquery("sums"))


@cache
def prune_queue_minutes() -> sa.Executable:
    return delete_old(queue_minutes)


@cache
def fold_queue_minutes() -> sa.Executable:
    """Fold some old minutes into rows of ten or an hour, with the largest numbers of jobs; returns
    how many.
    """
    most = ("counted_at", *COUNTS, "oldest_due_s")
    gone = delete_to_fold(queue_minutes).returning(queue_minutes).cte("gone")
    at, name = folded_at(gone.c.at), gone.c.queue
    started = as_count(pg.sum(gone.c.started, type_=sa.BigInteger))
    rows = sa.select(at, name, *(pg.max(gone.c[each]) for each in most), started)
    new = pg_insert(queue_minutes).from_select(
        ["at", "queue", *most, "started"], rows.group_by(at, name).order_by(at, name)
    )
    both = {each: sa.func.greatest(queue_minutes.c[each], new.excluded[each]) for each in most}
    folded = new.on_conflict_do_update(
        index_elements=[queue_minutes.c.at, queue_minutes.c.queue],
        set_={**both, "started": plus(queue_minutes.c.started, new.excluded.started)},
    )
    return sa.select(count_rows()).select_from(gone).add_cte(folded.cte("folded"))


def _minute(at: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The beginning of the minute, whatever time zone the session has."""
    return pg.date_trunc(
        sa.literal_column("'minute'", sa.Text), at, sa.literal_column("'UTC'", sa.Text)
    )


class QueueCount(NamedTuple):
    """The jobs of a queue when they were counted last."""

    waiting: int
    """Pending jobs, also those that are not due."""
    due: int
    blocked: int
    running: int
    oldest_due: timedelta | None
    """How long the oldest due job had been due, without blocked jobs; None if none was."""

    @property
    def backlog(self) -> int:
        """The jobs that are due or blocked."""
        return self.due + self.blocked


class LastCount(NamedTuple):
    """The last count of all queues."""

    counted_at: datetime
    age: timedelta
    """How long ago it was."""
    queues: Mapping[str, QueueCount]
    """Queues that are missing have no unfinished jobs."""

    @property
    def is_old(self) -> bool:
        """Whether no worker has counted for a minute: the numbers may be quite other ones now."""
        return self.age > REMAINS_TRUE


class FirstDue(NamedTuple):
    """The job of a queue and priority that is the next to start."""

    queue: str
    task: str
    since: timedelta
    """How long it has been due."""


@dataclass(frozen=True, slots=True)
class QueueFlow:
    """The jobs that go into the backlog of a queue, and out of it, in a minute.

    The backlog consists of the jobs that are due or blocked.  ``out_per_minute`` counts the jobs
    that workers have claimed.  ``in_per_minute`` is this number plus the growth of the backlog:
    new jobs, scheduled jobs and retries when they become due, and released jobs, less the jobs that
    were cancelled while they waited, but not below zero.  Each retry counts again, in both.
    """

    in_per_minute: float
    out_per_minute: float

    def empty_in(self, backlog: int) -> timedelta | None:
        """When a backlog is empty if this goes on; None if it does not shrink."""
        shrinks = self.out_per_minute - self.in_per_minute
        if not backlog:
            return timedelta(0)
        return timedelta(minutes=backlog / shrinks) if shrinks > 0 else None


class DepthPoint(NamedTuple):
    """A part of a time in a chart: the most jobs at the end of a minute, and those claimed."""

    at: datetime
    """Its beginning."""
    waiting: int
    due: int
    blocked: int
    running: int
    oldest_due_s: int
    """Seconds for which the oldest due job had been due."""
    started: int


class QueueMinutes:
    """The minutes behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def try_lock(self) -> bool:
        """Take the lock that ends with this connection; False if another connection has it."""
        return bool(self._executor.execute(try_lock()).scalar())

    def count(self) -> None:
        """Count the jobs of all queues, and write the numbers."""
        self._executor.execute(count_queues())

    def add_started(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add claimed jobs.  A row has the keys ``minute``, in minutes since 1970, ``queue`` and
        ``started``; each minute and queue occurs once."""
        given = [{**row, "minute": row["minute"] * MINUTE} for row in rows]
        self._executor.execute(add_started(), {"given": json.dumps(given)})

    def latest(self) -> LastCount | None:
        """The last count; None if no worker has counted for a week."""
        rows = list(self._executor.execute(last_counts()))
        queues = {queue: QueueCount(*counts) for queue, _, _, *counts in rows if queue}
        return LastCount(rows[0][1], rows[0][2], queues) if rows else None

    def first_due(self) -> list[FirstDue]:
        """The next job to start of each queue and priority, if it is due; the oldest of a queue
        first.  Counts nothing."""
        return [FirstDue(*row) for row in self._executor.execute(first_due())]

    def flows(self) -> dict[str, QueueFlow]:
        """By queue, what goes in and out, on average of the last five whole minutes.

        A queue without jobs in this time is missing; all are if no worker has counted.
        """
        found = {}
        for queue, grown, started, seconds in self._executor.execute(flows()):
            minutes = seconds / MINUTE
            if queue:  # not the row of a count without jobs
                came = max(float(grown + started), 0.0)
                found[queue] = QueueFlow(came / minutes, float(started) / minutes)
        return found

    def series(
        self, span: timedelta, bucket: timedelta, queues: Iterable[str] | None = None
    ) -> list[DepthPoint]:
        """Parts of the last ``span`` of this size, whole minutes; of these queues, or of all."""
        given: dict[str, Any] = {"seconds": span.total_seconds(), "size": bucket.total_seconds()}
        statement = depth_series(of_queues=queues is not None)
        if queues is not None:
            given["queues"] = array_of(queues)
        return [DepthPoint(*row) for row in self._executor.execute(statement, given)]

    def prune(self) -> bool:
        """Delete some minutes whose time is over, and fold some old ones into tens and hours;
        whether there may be more."""
        result: Any = self._executor.execute(prune_queue_minutes())
        folded = self._executor.execute(fold_queue_minutes()).scalar_one()
        return bool(result.rowcount >= MOST or folded >= MOST)
