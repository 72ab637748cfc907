"""How attempts have ended, by task and minute."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, Insert, aggregate_order_by
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.buckets import bucket_of, first_bucket, in_all_buckets
from pgqueue.repository.tables import (
    Executor,
    count_rows,
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
LARGEST = sa.literal_column("2147483647", sa.BigInteger)
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
    return _added(new)


def _added(new: Insert) -> Insert:
    """Add the numbers of rows that there are already."""
    numbers = {name: plus(task_minutes.c[name], new.excluded[name]) for name in ENDED}
    durations = {name: _sum(task_minutes.c[name], new.excluded[name]) for name in DURATIONS}
    return new.on_conflict_do_update(
        index_elements=[task_minutes.c.at, task_minutes.c.task], set_={**numbers, **durations}
    )


def plus(left: sa.ColumnElement[Any], right: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The sum of two counts, of which either may be missing; at most what the column takes."""
    one, other = (sa.cast(sa.func.coalesce(each, NONE), sa.BigInteger) for each in (left, right))
    return as_count(one + other)


def as_count(number: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.cast(sa.func.least(number, LARGEST), sa.Integer)


def _sum(left: sa.ColumnElement[Any], right: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The sums of the numbers at the same place of two arrays, of which one may be longer."""
    pair = _unnested(left, right)
    both = plus(pair.c.first, pair.c.second)
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
    now = pg.statement_timestamp()
    conditions = [task_minutes.c.at > now - span, task_minutes.c.at <= now]
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
def fold_task_minutes() -> sa.Executable:
    """Add some old minutes to rows of ten or an hour; returns how many.

    Here and not in Python: whatever a row holds, it must not stop the worker that prunes.
    """
    gone = delete_to_fold(task_minutes).returning(task_minutes).cte("gone")
    at = folded_at(gone.c.at).label("at")
    numbers = (as_count(pg.sum(gone.c[name], type_=sa.BigInteger)).label(name) for name in ENDED)
    sums = sa.select(at, gone.c.task, *numbers).group_by(at, gone.c.task).cte("sums")
    both = {name: _arrays_of(gone, name) for name in DURATIONS}
    empty = sa.cast(sa.literal_column("'{}'"), ARRAY(sa.Integer))
    joined: Any = sums
    for arrays in both.values():
        is_same = sa.and_(arrays.c.at == sums.c.at, arrays.c.task == sums.c.task)
        joined = joined.outerjoin(arrays, is_same)
    rows = (
        sa.select(*sums.c, *(sa.func.coalesce(both[name].c.sums, empty) for name in DURATIONS))
        .select_from(joined)
        .order_by(sums.c.at, sums.c.task)
    )
    folded = _added(pg_insert(task_minutes).from_select(["at", "task", *ENDED, *DURATIONS], rows))
    return sa.select(count_rows()).select_from(gone).add_cte(folded.cte("folded"))


def _arrays_of(gone: sa.CTE, name: str) -> sa.CTE:
    """By new time and task, the sums of the numbers at the same place of an array."""
    item = (
        pg.unnest(gone.c[name])
        .table_valued(sa.column("number", sa.Integer), with_ordinality="place")
        .render_derived(name=f"of_{name}")
    )
    at, place = folded_at(gone.c.at).label("at"), item.c.place
    number = as_count(pg.sum(sa.func.coalesce(item.c.number, NONE), type_=sa.BigInteger))
    sums = (
        sa.select(at, gone.c.task, place, number.label("number"))
        .select_from(gone.join(item, sa.true()))
        .group_by(at, gone.c.task, place)
        .subquery()
    )
    array = pg.array_agg(aggregate_order_by(sums.c.number, sums.c.place), type_=ARRAY(sa.Integer))
    arrays = sa.select(sums.c.at, sums.c.task, array.label("sums"))
    return arrays.group_by(sums.c.at, sums.c.task).cte(f"sums_of_{name}")


def delete_old(minutes: sa.Table) -> sa.Delete:
    """Delete some of the rows whose time is over, and of those of the future, which a clock that
    was wrong has left."""
    now = pg.statement_timestamp()
    is_over = minutes.c.at < now - _interval(KEPT)
    return _delete_some(minutes, sa.or_(is_over, minutes.c.at > now + _interval(ALONE)))


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

    def __init__(self, executor: Executor) -> None:
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
        folded = self._executor.execute(fold_task_minutes()).scalar_one()
        return bool(result.rowcount >= MOST or folded >= MOST)


def _filled(*histograms: Sequence[int]) -> list[Sequence[int]]:
    """The buckets up to the last one that is not empty in all of them."""
    filled = [
        number for number, counts in enumerate(zip(*histograms, strict=True), 1) if any(counts)
    ]
    return [each[: max(filled, default=0)] for each in histograms]
