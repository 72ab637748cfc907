"""Limits: what workers have declared, the capacities that operators set, and what is under them."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.admit import ONE, pause_of, with_state
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import each_in_key
from pgqueue.repository.reading import readable, span
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    Executor,
    clock,
    count_rows,
    document,
    jobs,
    limit_places,
    limits,
    pg,
    seconds,
    text_parameter,
    waiting_messages,
)
from pgqueue.repository.workers import NOTHING_PAUSED
from pgqueue.rules.admission import LimitRule
from pgqueue.rules.limits import SEPARATOR, Limit, has_own_capacity, name_of, rate_in_words

DECLARED = ("declared", "is_strict", "skips_failed", "period", "burst", "is_fair")
"""The columns that hold what the code declares of a limit."""
SHOWN_KEYS, SHOWN_HOLDERS = 200, 5
"""How many keys of limits operators see with the jobs that hold their places, and how many jobs."""
MOST_OF_KEY, MOST_COUNTED = 1000, 20_000
"""How many of the jobs that wait for the same keys operators see counted, and how many of all."""


@cache
def rules() -> sa.Executable:
    """The limits that are in force."""
    burst = sa.func.coalesce(limits.c.burst, ONE)
    flags = (limits.c.is_strict, limits.c.skips_failed)
    columns = (limits.c.name, _capacity(), *flags, limits.c.period, burst, limits.c.is_fair)
    return sa.select(*map(readable, columns)).where(_is_in_force())


@cache
def declare() -> sa.Executable:
    """Write the limits of a worker's code, if they differ from those in the table."""
    new = _declared()
    return new.on_conflict_do_update(
        index_elements=[limits.c.name],
        set_={**{name: new.excluded[name] for name in DECLARED}, "declared_at": clock()},
        where=sa.or_(*(limits.c[name].is_distinct_from(new.excluded[name]) for name in DECLARED)),
    )


@cache
def declare_new() -> sa.Executable:
    """Write limits that no worker has declared.  An operator's role may not change others."""
    return _declared().on_conflict_do_nothing()


@cache
def are_declared() -> sa.Executable:
    """Whether any limit was ever declared."""
    return sa.select(sa.exists(sa.select(limits.c.name)))


@cache
def set_capacity() -> sa.Executable:
    """Change the capacity of a limit; NULL means the capacity in the code."""
    capacity = sa.cast(sa.bindparam("new_capacity", type_=sa.Integer), sa.Integer)
    return (
        sa.update(limits)
        .where(limits.c.name == text_parameter("limit_name"))
        .values(capacity=capacity)
        .returning(limits.c.name)
    )


@cache
def set_capacity_of_key() -> sa.Executable:
    """Write the capacity of one key of a limit as a separate row; NULL means that of the limit."""
    capacity = sa.cast(sa.bindparam("new_capacity", type_=sa.Integer), sa.Integer)
    declared = [limits.c[name] for name in DECLARED]
    row = sa.select(text_parameter("key"), capacity, *declared).where(
        limits.c.name == text_parameter("limit_name")
    )
    new = pg_insert(limits).from_select(["name", "capacity", *DECLARED], row)
    return new.on_conflict_do_update(
        index_elements=[limits.c.name], set_={"capacity": new.excluded.capacity}
    )


@cache
def all_limits() -> sa.Executable:
    is_set = limits.c.capacity.is_not(None)
    rate = (span(limits.c.period), limits.c.burst)
    row = sa.select(limits.c.name, limits.c.declared, _capacity(), is_set, *rate, limits.c.is_fair)
    return row.where(_is_in_force()).order_by(limits.c.name)


@cache
def held_by_key() -> sa.Executable:
    """How many places are held under each key.  Reads all places."""
    held = _held(sa.select(limit_places))
    return sa.select(held.c.limit_key, count_rows()).group_by(held.c.limit_key)


@cache
def holders() -> sa.Executable:
    """The first jobs that hold a place under each of the first keys, found by probes of keys."""
    key = each_in_key(limit_places, "limit_key", name="key")
    shown = sa.select(key).limit(sa.literal_column(str(SHOWN_KEYS))).subquery("shown")
    places = sa.select(limit_places).join_from(
        shown, limit_places, limit_places.c.limit_key == shown.c.limit_key
    )
    held = _held(places)
    order = pg.row_number().over(partition_by=held.c.limit_key, order_by=held.c.job_id)
    place = sa.select(held, order.label("number")).subquery("numbered")
    job = (
        sa.select(jobs.c.task, jobs.c.queue)
        .where(jobs.c.id == place.c.job_id)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    return (
        sa.select(place.c.limit_key, place.c.job_id, job.c.task, job.c.queue)
        .select_from(place.join(job, sa.true()))
        .where(place.c.number <= sa.literal_column(str(SHOWN_HOLDERS), sa.BigInteger))
        .order_by(place.c.limit_key, place.c.job_id)
    )


@cache
def waiting_by_keys() -> sa.Executable:
    """How many jobs wait under the same keys.  Reads all waiting messages."""
    keys = waiting_messages.c.limit_keys
    return sa.select(keys, count_rows()).group_by(keys)


@cache
def waiting_by_first_keys() -> sa.Executable:
    """The same of the first keys, up to a number for each key and for all.  Counts one more than
    SHOWN_KEYS, MOST_OF_KEY or MOST_COUNTED if there are more."""
    key = each_in_key(waiting_messages, "limit_keys", name="key")
    first = sa.select(key).limit(sa.literal_column(str(SHOWN_KEYS + 1))).subquery("first_key")
    some = (
        sa.select(ONE)
        .where(waiting_messages.c.limit_keys == first.c.limit_keys)
        .order_by(*list(waiting_messages.primary_key)[1:])  # or a bitmap of all its jobs is made
        .limit(sa.literal_column(str(MOST_OF_KEY + 1)))
        .lateral("some")
    )
    counted = (
        sa.select(first.c.limit_keys)
        .select_from(first.join(some, sa.true()))
        .limit(sa.literal_column(str(MOST_COUNTED + 1)))
        .subquery("counted")
    )
    return sa.select(counted.c.limit_keys, count_rows()).group_by(counted.c.limit_keys)


def _declared() -> Insert:
    given = document(
        "given",
        sa.column("name", sa.Text),
        sa.column("declared", sa.Integer),
        sa.column("is_strict", sa.Boolean),
        sa.column("skips_failed", sa.Boolean),
        sa.column("period", sa.Float),
        sa.column("burst", sa.Integer),
        sa.column("is_fair", sa.Boolean),
    )
    period = seconds(given.c.period)
    declared = (period if name == "period" else given.c[name] for name in DECLARED)
    rows = sa.select(given.c.name, *declared).order_by(given.c.name)
    return pg_insert(limits).from_select(["name", *DECLARED], rows)


def _capacity() -> sa.ColumnElement[int]:
    """The capacity in force; at most 1 for a strict limit, whatever capacity was set."""
    capacity = sa.func.coalesce(limits.c.capacity, limits.c.declared)
    return sa.case((limits.c.is_strict, sa.func.least(capacity, ONE)), else_=capacity)


def _is_in_force() -> sa.ColumnElement[bool]:
    """False for the row of a key that has no capacity of its own any more."""
    is_of_key = pg.strpos(limits.c.name, sa.literal_column("' '")) > sa.literal_column("0")
    return sa.or_(~is_of_key, limits.c.capacity.is_not(None))


def _held(places: sa.Select[Any]) -> sa.Subquery:
    """Those of these places that are held, without the second places under a fair limit's name."""
    state = with_state(places.subquery("place")).subquery("state")
    is_second = sa.exists().where(limits.c.name == state.c.limit_key, limits.c.is_fair)
    return (
        sa.select(state.c.limit_key, state.c.job_id)
        .where(state.c.is_held, ~is_second)
        .subquery("held")
    )


class LimitHolder(NamedTuple):
    """A job that has a place under a key of a limit: it runs, or starts next."""

    key: str
    job_id: int
    task: str
    queue: str


class LimitState(NamedTuple):
    """A limit, and the jobs under it; a row of ``queue.limits``."""

    name: str
    declared: int
    """The capacity in the code."""
    capacity: int
    """The capacity in force."""
    is_set: bool
    """Whether the capacity was set by ``queue.set_limit``."""
    held: int
    """How many jobs have a place: they run, or start next."""
    waiting: int
    period: timedelta | None = None
    """Of a rate: the time in which ``capacity`` jobs start; None if the limit counts jobs at once.
    """
    burst: int | None = None
    is_fair: bool = False
    """Whether it stands for ``fair_by`` of a task: its keys take turns."""

    def words(self, capacity: int) -> str:
        """One of its capacities in words."""
        if not capacity:
            return "paused"
        if not has_own_capacity(capacity, is_fair=self.is_fair):
            return "in turns"
        if self.period is not None:
            return rate_in_words(capacity, self.period)
        return f"{capacity} at once"


class Limits:
    """The limits that are declared, and what is under them, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def rules(self) -> dict[str, LimitRule]:
        """The limits in force: by name, and by key for keys with a capacity of their own."""
        in_force = {name: LimitRule(*rest) for name, *rest in fetch(self._executor, rules(), {})}
        name_of_key = {key: name_of(key) for key in in_force if name_of(key) != key}
        for key, name in name_of_key.items():
            rule, capacity = in_force.get(name, in_force[key]), in_force[key].capacity
            capacity = min(capacity, 1) if rule.is_strict else capacity
            in_force[key] = replace(rule, capacity=capacity)
        return in_force

    def declare(self, limits: Iterable[Limit]) -> None:
        """Write the limits of the code."""
        self._executor.execute(declare(), _as_document(limits))

    def declare_new(self, limits: Iterable[Limit]) -> None:
        """Write those of these limits that no worker has declared."""
        self._executor.execute(declare_new(), _as_document(limits))

    def are_declared(self) -> bool:
        """Whether any worker has ever declared a limit in this database."""
        return bool(self._executor.execute(are_declared()).scalar())

    def set_capacity(self, name: str, capacity: int | None) -> bool:
        """Set a capacity, or with None that of the code; False if no limit has this name."""
        parameters = {"limit_name": name, "new_capacity": capacity}
        return self._executor.execute(set_capacity(), parameters).first() is not None

    def set_capacity_of_key(self, name: str, key: str, capacity: int | None) -> None:
        """Set the capacity of one key of a limit, or with None that of the limit."""
        parameters = {"limit_name": name, "key": key, "new_capacity": capacity}
        self._executor.execute(set_capacity_of_key(), parameters)

    def all(self) -> list[LimitState]:
        """All limits that were declared.  Reads all places and waiting messages."""
        return self._states(self._waiting())

    def at_a_glance(self) -> tuple[list[LimitState], set[str]]:
        """All limits that were declared, and those under which more jobs wait than were counted:
        of the first 200 keys, up to 1,000 of each and 20,000 in all.  Reads all places."""
        counts = self._executor.execute(waiting_by_first_keys()).all()
        states = self._states(_by_name((keys, min(count, MOST_OF_KEY)) for keys, count in counts))
        if len(counts) > SHOWN_KEYS or sum(row[1] for row in counts) > MOST_COUNTED:
            return states, {state.name for state in states}
        most = _by_name((keys, 1) for keys, count in counts if count > MOST_OF_KEY)
        return states, set(most)

    def capacities(self) -> dict[str, int]:
        """The capacities in force, by limit and key."""
        return {row.name: row[2] for row in self._executor.execute(all_limits())}

    def _states(self, waiting: Counter[str]) -> list[LimitState]:
        rows = self._executor.execute(all_limits()).all()
        counts = self._executor.execute(held_by_key(), pause_of(NOTHING_PAUSED))
        held = _by_name((key, count) for key, count in counts)
        return [
            LimitState(name, declared, capacity, is_set, held[name], waiting[name], *kind)
            for name, declared, capacity, is_set, *kind in rows
        ]

    def holders(self) -> list[LimitHolder]:
        """Jobs that hold places: the first five under each key, of the first 200 keys."""
        rows = self._executor.execute(holders(), pause_of(NOTHING_PAUSED))
        return [LimitHolder(*row) for row in rows]

    def undeclared(self) -> dict[str, int]:
        """How many jobs wait for each limit that no worker has declared: no worker admits them."""
        declared = self.rules()
        waiting = sorted(self._waiting().items())
        return {
            name: count for name, count in waiting if name not in declared and name_of(name) == name
        }

    def _waiting(self) -> Counter[str]:
        """How many jobs wait for each limit, by name and by key."""
        return _by_name((keys, count) for keys, count in self._executor.execute(waiting_by_keys()))


def _by_name(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    """The sums of what was counted under the same keys, for each limit and each key."""
    sums: Counter[str] = Counter()
    for keys, count in counts:
        for key in keys.split(SEPARATOR):
            sums.update(dict.fromkeys({key, name_of(key)}, count))
    return sums


def _as_document(limits: Iterable[Limit]) -> dict[str, str]:
    rows = [
        {
            "name": limit.name,
            "declared": limit.capacity,
            "is_strict": limit.is_strict,
            "skips_failed": limit.failed_head == "skip",
            "period": limit.per.total_seconds() if limit.per else None,
            "burst": limit.burst if limit.per else None,
            "is_fair": limit.is_fair,
        }
        for limit in limits
    ]
    return {"given": json.dumps(rows)}
