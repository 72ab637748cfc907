"""How attempts have ended, by task and minute."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm import Session

from pgqueue.repository.buckets import bucket_of, first_bucket, in_all_buckets
from pgqueue.repository.tables import (
    document,
    equal,
    pg,
    seconds,
    task_minutes,
    text_parameter,
)
from pgqueue.rules.histogram import about, percentile

ENDED = ("succeeded", "failed", "retried", "cancelled", "other")
DURATIONS = ("ran", "waited")
NONE = sa.literal_column("0", sa.Integer)
MINUTE = 60

KEPT = timedelta(days=7)
"""How long a minute is kept."""
MOST = 10_000
"""Rows that one statement deletes."""


@cache
def add_minutes() -> sa.Executable:
    """Add to the rows of some minutes.

    In the order of their keys: two workers that add to the same rows in opposite orders would
    deadlock.
    """
    given = document(
        "given",
        sa.column("minute", sa.Double),
        sa.column("task", sa.Text),
        *(sa.column(name, sa.Integer) for name in ENDED),
        *(sa.column(name, ARRAY(sa.Integer)) for name in DURATIONS),
    )
    at = pg.to_timestamp(given.c.minute, type_=sa.DateTime(timezone=True))
    columns = ["at", "task", *ENDED, *DURATIONS]
    rows = sa.select(at, *(given.c[name] for name in columns[1:])).order_by(at, given.c.task)
    new = pg_insert(task_minutes).from_select(columns, rows)
    numbers = {name: task_minutes.c[name] + new.excluded[name] for name in ENDED}
    durations = {name: _sum(task_minutes.c[name], new.excluded[name]) for name in DURATIONS}
    return new.on_conflict_do_update(
        index_elements=[task_minutes.c.at, task_minutes.c.task], set_={**numbers, **durations}
    )


def _sum(left: sa.ColumnElement[Any], right: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The sums of the numbers at the same place of two arrays, of which one may be longer."""
    pair = _unnested(left, right)
    both = sa.func.coalesce(pair.c.first, NONE) + sa.func.coalesce(pair.c.second, NONE)
    sums = sa.select(both).select_from(pair).order_by(pair.c.place)
    return sa.func.array(sums.correlate_except(pair).scalar_subquery())


def _unnested(*arrays: sa.ColumnElement[Any]) -> sa.TableValuedAlias:
    names = [sa.column(name, sa.Integer) for name in ("first", "second")]
    # unnest with several arrays is syntax, and takes no schema name.
    rows = sa.func.unnest(*arrays).table_valued(*names, with_ordinality="place")
    return rows.render_derived(name="pair")


def _lately(*, of_task: bool) -> list[sa.ColumnElement[bool]]:
    span = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    conditions = [task_minutes.c.at > pg.statement_timestamp() - span]
    return [*conditions, task_minutes.c.task == text_parameter("task")] if of_task else conditions


@cache
def ended_lately(*, of_task: bool) -> sa.Executable:
    """By task, how many attempts have ended in which way."""
    sums = (sa.cast(pg.sum(task_minutes.c[name]), sa.BigInteger) for name in ENDED)
    return (
        sa.select(task_minutes.c.task, *sums)
        .where(*_lately(of_task=of_task))
        .group_by(task_minutes.c.task)
        .order_by(task_minutes.c.task)
    )


@cache
def durations_lately(*, of_task: bool) -> sa.Executable:
    """By task and bucket, how many attempts ran so long, and how many jobs waited so long.

    Of some of the minutes, evenly spread, because each minute and task has many buckets.
    """
    pair = _unnested(task_minutes.c.ran, task_minutes.c.waited)
    minute = sa.cast(pg.date_part("epoch", task_minutes.c.at), sa.BigInteger) // MINUTE
    is_read = minute % sa.bindparam("one_in", type_=sa.BigInteger) == NONE
    sums = (sa.cast(pg.sum(pair.c[name]), sa.BigInteger) for name in ("first", "second"))
    return (
        sa.select(task_minutes.c.task, pair.c.place, *sums)
        .select_from(task_minutes.join(pair, sa.true()))
        .where(*_lately(of_task=of_task), is_read)
        .group_by(task_minutes.c.task, pair.c.place)
        .order_by(task_minutes.c.task, pair.c.place)
    )


@cache
def attempt_series(*, of_task: bool) -> sa.Executable:
    """By part of a time, how many attempts of one task or all have ended in which way."""
    number = bucket_of(task_minutes.c.at)
    sums = (sa.cast(pg.sum(task_minutes.c[name]), sa.BigInteger).label(name) for name in ENDED)
    conditions = [task_minutes.c.at >= first_bucket()]
    if of_task:
        conditions.append(task_minutes.c.task == text_parameter("task"))
    ended = sa.select(number, *sums).where(*conditions).group_by(number)
    return in_all_buckets(ended.subquery("sums"))


@cache
def prune_task_minutes() -> sa.Executable:
    return delete_old(task_minutes)


def delete_old(minutes: sa.Table) -> sa.Executable:
    """Delete some of the rows whose time is over."""
    kept: sa.ColumnElement[Any] = sa.literal_column(f"interval '{KEPT.days} days'")
    keys = list(minutes.primary_key)
    old = (
        sa.select(*keys)
        .where(minutes.c.at < pg.statement_timestamp() - kept)
        .limit(sa.literal_column(str(MOST)))
        .with_for_update(skip_locked=True)
        .cte("old")
    )
    return sa.delete(minutes).where(*equal(minutes, old, (key.name for key in keys)))


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """How the attempts of one task have ended, and the times by which most of them did."""

    task: str
    ended: int
    """All attempts that have ended: the sum of the next five."""
    succeeded: int
    failed: int
    retried: int
    cancelled: int
    other: int
    wait_p50: timedelta | None
    """From the time a job was due to the start of its handler; None if nothing was measured."""
    wait_p95: timedelta | None
    run_p50: timedelta | None
    run_p95: timedelta | None
    waited: Sequence[int]
    """How many have waited for less than 1 ms, 2 ms, 4 ms and so on, each counted once."""
    ran: Sequence[int]
    """The same of the times for which handlers ran."""

    @property
    def time_used(self) -> timedelta:
        """About how long all the handlers ran together."""
        return about(self.ran)


class AttemptPoint(NamedTuple):
    """A part of a time in a chart, and how many attempts have ended in it."""

    at: datetime
    """Its beginning."""
    succeeded: int
    failed: int
    retried: int
    cancelled: int
    other: int


class TaskMinutes:
    """The minutes behind one Session or Connection."""

    def __init__(self, executor: Session | sa.Connection) -> None:
        self._executor = executor

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add to minutes.  A row has the keys ``minute``, in minutes since 1970, ``task``, ``ran``,
        ``waited`` and those of :data:`ENDED`; each minute and task occurs once."""
        given = [{**row, "minute": row["minute"] * MINUTE} for row in rows]
        self._executor.execute(add_minutes(), {"given": json.dumps(given)})

    def since(self, span: timedelta, task: str | None = None) -> list[TaskStatistics]:
        """By task, the attempts that have ended within this time.

        For more than a day, the durations are those of one minute in ten, which stand for all.
        """
        one_in = 1 if span <= timedelta(days=1) else 10
        parameters = {"seconds": span.total_seconds(), "task": task}
        if task is None:
            del parameters["task"]
        ran: dict[str, list[int]] = {}
        waited: dict[str, list[int]] = {}
        durations = durations_lately(of_task=task is not None)
        sample = {**parameters, "one_in": one_in}
        for name, _, first, second in self._executor.execute(durations, sample):
            ran.setdefault(name, []).append(one_in * (first or 0))
            waited.setdefault(name, []).append(one_in * (second or 0))
        ended = ended_lately(of_task=task is not None)
        found = []
        for name, *numbers in self._executor.execute(ended, parameters):
            waits, runs = waited.get(name, ()), ran.get(name, ())
            found.append(
                TaskStatistics(
                    name,
                    sum(numbers),
                    **dict(zip(ENDED, numbers, strict=True)),
                    wait_p50=percentile(waits, 0.5),
                    wait_p95=percentile(waits, 0.95),
                    run_p50=percentile(runs, 0.5),
                    run_p95=percentile(runs, 0.95),
                    waited=waits,
                    ran=runs,
                )
            )
        return found

    def series(
        self, span: timedelta, bucket: timedelta, task: str | None = None
    ) -> list[AttemptPoint]:
        """Parts of the last ``span`` of this size, whole minutes; of one task, or of all."""
        parameters = {"seconds": span.total_seconds(), "size": bucket.total_seconds()}
        statement = attempt_series(of_task=task is not None)
        given = parameters if task is None else {**parameters, "task": task}
        return [AttemptPoint(*row) for row in self._executor.execute(statement, given)]

    def prune(self) -> bool:
        """Delete some minutes whose time is over; whether there may be more."""
        result: Any = self._executor.execute(prune_task_minutes())
        return bool(result.rowcount >= MOST)
