"""Pending jobs in the order of claims, which is that of the key of ``message_queue``."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.models import STATES, Job, JobStatus
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.job_line import JobLine, columns_of_line
from pgqueue.repository.messages import waiting_pairs
from pgqueue.repository.reading import EPOCH, moment
from pgqueue.repository.tables import Executor, jobs, leases, message_queue, pg

LAST_MICROSECOND = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)

ALWAYS_BEFORE = sa.literal_column("timestamptz '-infinity'", sa.DateTime(timezone=True))
ALWAYS_AFTER = sa.literal_column("timestamptz 'infinity'", sa.DateTime(timezone=True))


class Position(NamedTuple):
    """A position in the order of claims, behind which a page of pending jobs begins.

    It names no queue: it stands behind the messages of all queues that are claimed before it.
    """

    priority: int = 0
    microseconds: int = 0
    """The ``run_at`` of the last message, in microseconds since 1970."""
    message_id: int = 0
    before: int | None = None
    """Only jobs with a smaller id."""

    def moved_to(self, priority: int, run_at: datetime, message_id: int) -> "Position":
        """Another position in the same list."""
        return Position(
            priority, (run_at - EPOCH) // timedelta(microseconds=1), message_id, self.before
        )

    @property
    def run_at(self) -> datetime:
        return EPOCH + timedelta(microseconds=min(self.microseconds, LAST_MICROSECOND))


class ClaimOrder:
    """The pending jobs of a filter, in windows from a position to another."""

    def __init__(self, executor: Executor, which: JobFilter) -> None:
        self._executor, self._which = executor, which
        clauses = which.clauses(message_queue, message_queue.c.target_id)
        self._every_message_fits = len(clauses) == len(which.clauses_of_position(message_queue))

    def end(self, start: Position, size: int) -> Position | None:
        if self._every_message_fits:
            return None
        row = self._executor.execute(end_of_window(self._which, start, size=size)).first()
        return None if row is None else start.moved_to(*row)

    def read(
        self, start: Position, end: Position | None, limit: int
    ) -> Sequence[tuple[JobLine, Position]]:
        rows = self._executor.execute(list_pending(self._which, start, end, limit=limit)).all()
        lines = [(JobLine(*row[:-2]), row[-2:]) for row in rows]
        return [(line, start.moved_to(line.priority, *position)) for line, position in lines]

    def searched_to(self, end: Position) -> datetime:
        return end.run_at


def list_pending(
    which: JobFilter, start: Position, end: Position | None, *, limit: int
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
    clauses = [is_pending, *which.clauses(message_queue, message.target_id)]
    rows = _next_messages(which, start, end, clauses, [message.target_id], limit=limit)
    found = rows.subquery("found")
    position = (found.c.priority, found.c.run_at, found.c.id)
    return (
        sa.select(*columns_of_line(), moment(found.c.run_at), found.c.id)
        .join(found, found.c.target_id == Job.id)
        .order_by(*position)
    )


def end_of_window(which: JobFilter, start: Position, *, size: int) -> sa.Executable:
    """The position of the message that comes so many after this position, whatever its job."""
    clauses = which.clauses_of_position(message_queue)
    messages = _next_messages(which, start, None, clauses, [], limit=size)
    last = messages.offset(size - 1).subquery("last")
    return sa.select(last.c.priority, moment(last.c.run_at), last.c.id)


def _next_messages(
    which: JobFilter,
    start: Position,
    end: Position | None,
    clauses: Sequence[sa.ColumnElement[bool]],
    columns: Sequence[sa.ColumnElement[Any]],
    *,
    limit: int,
) -> sa.Select[*tuple[Any, ...]]:
    """The next messages behind one position and up to another, in the order of claims."""
    pair, message = waiting_pairs(), message_queue.c
    position = sa.tuple_(message.run_at, message.id)
    # A bound holds for the messages of its priority, in all queues; those of another priority are
    # bounded by a time alone.
    earliest = ALWAYS_BEFORE if which.are_due is not False else pg.statement_timestamp()
    first = sa.func.greatest(_run_at(start), earliest)
    behind = sa.case((pair.c.priority == _priority(start), first), else_=earliest)
    bounds = [pair.c.priority >= _priority(start), position > sa.tuple_(behind, _message_id(start))]
    if end is not None:
        last = sa.case((pair.c.priority == _priority(end), _run_at(end)), else_=ALWAYS_AFTER)
        bounds += [pair.c.priority <= _priority(end), position <= sa.tuple_(last, _message_id(end))]
    each = (
        sa.select(message.priority, message.run_at, message.id, *columns)
        .where(message.queue == pair.c.queue, message.priority == pair.c.priority)
        .where(*bounds, *clauses)
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


def _priority(position: Position) -> sa.ColumnElement[int]:
    return sa.literal(position.priority, sa.SmallInteger)


def _run_at(position: Position) -> sa.ColumnElement[datetime]:
    return sa.cast(position.run_at, sa.DateTime(timezone=True))


def _message_id(position: Position) -> sa.ColumnElement[int]:
    return sa.literal(position.message_id, sa.BigInteger)
