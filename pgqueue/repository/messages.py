"""Messages: what a message copies from its job, and when the job may start."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.repository.tables import (
    POSITION,
    array_parameter,
    blocked,
    clock,
    dependencies,
    document,
    jobs,
    json_parameter,
    leases,
    message_queue,
    pg,
    sees_all,
    stands_at_place_of,
    waiting_messages,
)


class Start(StrEnum):
    """When a job may start, as the caller of the enqueue requested."""

    NOW = "now"
    AFTER = "after"
    AT = "at"


@dataclass(frozen=True, slots=True)
class StartsAt:
    """When a job may start that was not enqueued so far: a time, or a span from the enqueue."""

    run_at: datetime | None = None
    delay: timedelta | None = None

    def expression(self) -> sa.ColumnElement[Any]:
        """What an INSERT writes; never in the past: see :func:`start_time`."""
        if self.run_at is not None:
            return sa.func.greatest(self.run_at, clock())
        return clock() + sa.literal(self.delay, sa.Interval)

    def after(self, now: datetime) -> datetime:
        """The same, if the database's clock shows ``now``."""
        if self.run_at is not None:
            return max(self.run_at, now)
        return now if self.delay is None else now + self.delay


DISPATCHED = (
    jobs.c.id,
    jobs.c.queue,
    jobs.c.priority,
    jobs.c.run_at,
    jobs.c.task,
    jobs.c.max_attempts,
)
"""The columns a message copies from its job.  A role that may only enqueue reads no arguments."""

UNDER_LIMITS = (*DISPATCHED, jobs.c.limit_keys)
"""The columns that a waiting message copies."""

MESSAGE_KEYS = {
    message_queue: (*POSITION, "id", "target_id"),
    waiting_messages: ("limit_keys", *POSITION, "target_id"),
}
"""The columns that find one message, and its job."""

MESSAGE_COLUMNS = ["queue", "priority", "run_at", "target_id", "task", "alone"]


def labels(prefix: str = "") -> dict[str, Any]:
    return {name: json_parameter(f"{prefix}{name}") for name in ("meta", "tags")}


def start_time(start: Start, prefix: str = "") -> sa.ColumnElement[Any]:
    """Never in the past: claims find a message behind their cursors late."""
    if start is Start.NOW:
        return clock()
    if start is Start.AFTER:
        return clock() + sa.cast(sa.bindparam(f"{prefix}delay", type_=sa.Interval), sa.Interval)
    moment = sa.bindparam(f"{prefix}run_at", type_=sa.DateTime(timezone=True))
    return sa.func.greatest(moment, clock())


def columns_for(*, limited: bool) -> tuple[sa.Column[Any], ...]:
    """The columns of a job that its message copies."""
    return UNDER_LIMITS if limited else DISPATCHED


def dispatch_of(job: sa.CTE, *, limited: bool, after: bool = False) -> list[sa.CTE]:
    """Insert the message of each of these jobs, or what each waits for; ``after``: other jobs."""
    if not after:
        return [(waiting_message_of if limited else message_of)(job).cte("message")]
    predecessor = pg.unnest(array_parameter("after", sa.BigInteger))
    edges = sa.insert(dependencies).from_select(
        ["job_id", "after_id"], sa.select(job.c.id, predecessor)
    )
    watched = sa.cast(sa.bindparam("waits_for", type_=sa.BigInteger), sa.BigInteger)
    node = sa.insert(blocked).from_select(["node_id", "waits_for"], sa.select(job.c.id, watched))
    return [edges.cte("edges"), node.cte("node")]


def dispatch_of_each(job: sa.CTE, *, limited: bool, after: bool) -> list[sa.CTE]:
    """The same for jobs of which some may have limits (``limited``), or wait for other jobs
    (``after``, in the document ``edges``), in the order of their ids."""
    edge = document(
        "edges", sa.column("job_id", sa.BigInteger), sa.column("after_id", sa.BigInteger)
    )
    free = [job.c.id.not_in(sa.select(edge.c.job_id))] if after else []
    without_limits = [job.c.limit_keys.is_(None)] if limited else []
    ready = sa.select(job).where(*free, *without_limits).order_by(job.c.id).cte("ready")
    written = [message_of(ready).cte("message")]
    if limited:
        under_limits = (
            sa.select(job).where(*free, job.c.limit_keys.is_not(None)).cte("under_limits")
        )
        written.append(waiting_message_of(under_limits).cte("waiting"))
    if after:
        rows = sa.select(edge.c.job_id, edge.c.after_id).join_from(
            edge, job, job.c.id == edge.c.job_id
        )
        edges = sa.insert(dependencies).from_select(["job_id", "after_id"], rows)
        # Each watches the node that is likely to end last.
        watched = sa.select(edge.c.job_id, pg.max(edge.c.after_id)).group_by(edge.c.job_id)
        node = sa.insert(blocked).from_select(["node_id", "waits_for"], watched)
        written += [edges.cte("edge"), node.cte("node")]
    return written


def message_of(job: sa.CTE) -> Any:
    return sa.insert(message_queue).from_select(MESSAGE_COLUMNS, message_rows(job))


def waiting_message_of(job: sa.CTE) -> Any:
    """The message of a job under limits, which waits to be admitted."""
    names = ["limit_keys", "queue", "priority", "run_at", "id", "task"]
    columns = ["target_id" if name == "id" else name for name in names]
    return sa.insert(waiting_messages).from_select(
        columns, sa.select(*(job.c[name] for name in names))
    )


def message_rows(job: sa.CTE) -> sa.Select[Any]:
    """Built from the job's own row, not from the caller's values: they cannot differ."""
    return sa.select(
        job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task, job.c.max_attempts == 1
    )


def message_in(table: sa.Table, row: sa.FromClause) -> sa.ColumnElement[Any]:
    """The table of a message, and its key, as texts that lose nothing."""
    named = {name: sa.cast(row.c[name], sa.Text) for name in MESSAGE_KEYS[table]}
    given = {"table": sa.literal_column(f"'{table.name}'", sa.Text), **named}
    parts = [(sa.literal_column(f"'{name}'", sa.Text), value) for name, value in given.items()]
    return pg.jsonb_build_object(*chain.from_iterable(parts), type_=JSONB)


def has_message_or_lease(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a job has one, or row security may hide it."""
    leased = sa.exists().where(leases.c.target_id == job_id)
    is_hidden = sa.not_(sees_all(message_queue, leases))
    return sa.or_(sa.exists().where(stands_at_place_of(job_id)), leased, is_hidden)


def is_placed(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a job has a message, a lease or a row in ``blocked``, or one may be hidden."""
    waits = sa.exists().where(blocked.c.node_id == job_id)
    return sa.or_(has_message_or_lease(job_id), waits, sa.not_(sees_all(blocked)))


def waiting_pairs() -> sa.CTE:
    """Each queue and priority with a message."""
    return each_in_key(message_queue, "queue", "priority", name="pair")


def each_in_key(table: sa.Table, *names: str, name: str, first: str | None = None) -> sa.CTE:
    """The different values of the first columns of a key, by one probe of its index for each.

    ``first``: the next column of the key, of which the first value of each is read too.
    """
    key = [table.c[column] for column in names]
    read = key if first is None else [*key, table.c[first]]
    found = sa.select(*read).order_by(*read).limit(1).cte(name, recursive=True)
    following = (
        sa.select(*read)
        .where(sa.tuple_(*key) > sa.tuple_(*(found.c[column] for column in names)))
        .order_by(*read)
        .limit(1)
        .lateral("following")
    )
    return found.union_all(sa.select(following).select_from(found.join(following, sa.true())))


NEW = "new_"
"""Begins the names of parameters: in an UPDATE, one with a column's name is added to SET."""


class FoundJob(NamedTuple):
    """A job, found together with its message."""

    id: int
    message: Mapping[str, str] | None = None
    """Of a job that waits: the table and the key of its message."""

    def stands_in(self, table: sa.Table) -> bool:
        """Whether its message is in this table."""
        return self.message is not None and self.message["table"] == table.name
