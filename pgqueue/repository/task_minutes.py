"""How attempts have ended, by task and minute."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from itertools import zip_longest
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
from pgqueue.rules.histogram import MOST_BUCKETS, about, percentile

ENDED = ("succeeded", "failed", "retried", "cancelled", "other")
DURATIONS = ("ran", "waited")
NONE = sa.literal_column("0", sa.Integer)
MINUTE = 60

KEPT = timedelta(days=7)
"""How long a minute is kept, alone or in an hour."""
ALONE, IN_TENS = timedelta(hours=3), timedelta(hours=25)
"""Until this age a minute has a row of its own; then ten have one, and then an hour has one.

So a chart of a day has ten minutes in each part, one of a week an hour, and both read few rows."""
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


@cache
def ended_lately(*, of_task: bool) -> sa.Executable:
    """By task, how many attempts have ended in which way, how many ran for how long, and how many
    jobs waited for how long.

    The buckets by their numbers: to unnest the arrays takes three times as long.
    """
    span = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    conditions = [task_minutes.c.at > pg.statement_timestamp() - span]
    if of_task:
        conditions.append(task_minutes.c.task == text_parameter("task"))
    buckets = [sa.literal_column(str(place), sa.Integer) for place in range(1, MOST_BUCKETS + 1)]
    numbers: list[sa.ColumnElement[Any]] = [task_minutes.c[name] for name in ENDED]
    numbers += [task_minutes.c[name][bucket] for name in DURATIONS for bucket in buckets]
    none = sa.cast(NONE, sa.BigInteger)
    sums = (sa.func.coalesce(pg.sum(number, type_=sa.BigInteger), none) for number in numbers)
    return (
        sa.select(task_minutes.c.task, *sums)
        .where(*conditions)
        .group_by(task_minutes.c.task)
        .order_by(task_minutes.c.task)
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


@cache
def take_to_fold() -> sa.Executable:
    """Delete some minutes that are not alone any more, and return them with their new times."""
    gone = delete_to_fold(task_minutes)
    new_minute = sa.cast(pg.date_part("epoch", folded_at(task_minutes.c.at)), sa.BigInteger)
    names = ("task", *ENDED, *DURATIONS)
    return gone.returning(
        (new_minute // MINUTE).label("minute"), *(task_minutes.c[name] for name in names)
    )


def delete_old(minutes: sa.Table) -> sa.Delete:
    """Delete some of the rows whose time is over."""
    return _delete_some(minutes, minutes.c.at < pg.statement_timestamp() - _interval(KEPT))


def delete_to_fold(minutes: sa.Table) -> sa.Delete:
    """Delete some of the rows that belong into others."""
    is_old = minutes.c.at < pg.statement_timestamp() - _interval(ALONE)
    return _delete_some(minutes, is_old, minutes.c.at != folded_at(minutes.c.at))


def folded_at(at: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The time of the row into which a minute belongs, if it is old enough."""
    is_in_tens = at >= pg.statement_timestamp() - _interval(IN_TENS)
    tens, hour = _interval(timedelta(minutes=10)), _interval(timedelta(hours=1))
    return bucket_of(at, sa.case((is_in_tens, tens), else_=hour))


def _delete_some(minutes: sa.Table, *conditions: sa.ColumnElement[bool]) -> sa.Delete:
    keys = list(minutes.primary_key)
    old = (
        sa.select(*keys)
        .where(*conditions)
        .order_by(minutes.c.at)
        .limit(sa.literal_column(str(MOST)))
        .with_for_update(skip_locked=True)
        .cte("old")
    )
    return sa.delete(minutes).where(*equal(minutes, old, (key.name for key in keys)))


def _interval(span: timedelta) -> sa.ColumnElement[Any]:
    return sa.literal_column(f"interval '{span.total_seconds():g} seconds'")


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

        Old minutes are together in one row, so a long time begins up to an hour too late.
        """
        parameters = {"seconds": span.total_seconds(), "task": task}
        if task is None:
            del parameters["task"]
        found = []
        rows = self._executor.execute(ended_lately(of_task=task is not None), parameters)
        for name, *numbers in rows:
            ended, buckets = numbers[: len(ENDED)], numbers[len(ENDED) :]
            ran, waited = _filled(buckets[:MOST_BUCKETS], buckets[MOST_BUCKETS:])
            found.append(
                TaskStatistics(
                    name,
                    sum(ended),
                    **dict(zip(ENDED, ended, strict=True)),
                    wait_p50=percentile(waited, 0.5),
                    wait_p95=percentile(waited, 0.95),
                    run_p50=percentile(ran, 0.5),
                    run_p95=percentile(ran, 0.95),
                    waited=waited,
                    ran=ran,
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
        """Delete some minutes whose time is over, and fold some old ones into tens and hours;
        whether there may be more."""
        result: Any = self._executor.execute(prune_task_minutes())
        taken = [dict(row) for row in self._executor.execute(take_to_fold()).mappings()]
        folded: dict[tuple[int, str], dict[str, Any]] = {}
        for row in taken:
            key = (row["minute"], row["task"])
            folded[key] = _both(folded[key], row) if key in folded else row
        self.add(folded.values())
        return bool(result.rowcount >= MOST or len(taken) >= MOST)


def _filled(*histograms: Sequence[int]) -> list[Sequence[int]]:
    """The buckets up to the last one that is not empty in all of them."""
    filled = [
        number for number, counts in enumerate(zip(*histograms, strict=True), 1) if any(counts)
    ]
    return [each[: max(filled, default=0)] for each in histograms]


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of two rows of the same minute and task."""
    numbers = {name: first[name] + second[name] for name in ENDED}
    durations = {
        name: [sum(pair) for pair in zip_longest(first[name], second[name], fillvalue=0)]
        for name in DURATIONS
    }
    return {**first, **numbers, **durations}
