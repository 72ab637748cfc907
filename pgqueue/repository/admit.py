"""Admit: move jobs that wait for room in their limits to ``message_queue``.

An admission is one transaction, and all admissions of a database run one at a time.  Only an
admission raises the number of places held under a key, so that number never exceeds the capacity.

A place is held as long as its job has a message in ``message_queue`` or a lease.  Every statement
that replaces a message by a lease, or a lease by a message, does both at once.  An admission reads
both in one snapshot, so a held place never looks free.

Only an admission writes the token buckets of rates.  It reads them after the places.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm import Session

from pgqueue.repository.deadlines import meta_after_admission
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import DISPATCHED, each_in_key
from pgqueue.repository.reading import moment, readable, span
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CTID,
    NEWLINE,
    PLACE,
    among,
    array_of,
    array_parameter,
    clock,
    count_rows,
    document,
    equal,
    jobs,
    leases,
    limit_buckets,
    limit_places,
    limits,
    lock_key,
    message_queue,
    pg,
    seconds,
    text_parameter,
    waiting_messages,
    wake_up_call,
)
from pgqueue.repository.workers import NOTHING_PAUSED, Paused
from pgqueue.rules import admission
from pgqueue.rules.admission import Buckets, Place, Rule, Waiting
from pgqueue.rules.limits import SEPARATOR, Limit, name_of

LANE = ("limit_keys", "queue", "priority")
"""The columns of a lane: the primary key of a waiting message without its time and its job."""
DECLARED = ("declared", "is_strict", "skips_failed", "period", "burst", "is_fair")
"""The columns that hold what the code declares of a limit."""
PAUSED = array_parameter("paused", sa.Text)
PAUSED_TASKS = array_parameter("paused_tasks", sa.Text)
ONE = sa.literal_column("1", sa.Integer)
JOB_IDS = pg.unnest(array_parameter("job_ids", sa.BigInteger))
SHOWN_KEYS, SHOWN_HOLDERS = 200, 5
"""How many keys of limits operators see with the jobs that hold their places, and how many jobs."""
MOST_OF_KEY, MOST_COUNTED = 1000, 20_000
"""How many of the jobs that wait for the same keys operators see counted, and how many of all."""


@cache
def serialize_admissions() -> sa.Executable:
    """Wait for the transaction that admits, and keep others out until this one ends.

    A separate statement: the next one then sees what the other transaction has committed.
    """
    return sa.select(
        pg.pg_advisory_xact_lock(sa.literal_column(str(lock_key("admission")), sa.BigInteger))
    )


@cache
def rules() -> sa.Executable:
    """The limits that are in force."""
    burst = sa.func.coalesce(limits.c.burst, ONE)
    flags = (limits.c.is_strict, limits.c.skips_failed)
    columns = (limits.c.name, _capacity(), *flags, limits.c.period, burst, limits.c.is_fair)
    return sa.select(*map(readable, columns)).where(_is_in_force())


@cache
def first_waiting() -> sa.Executable:
    """The first jobs of the next lanes, and the seconds until each job is due.

    Reads only jobs of these queues and tasks; a lane without such jobs has a row with NULL.  The
    statement steps from lane to lane in the index, so a lane with a million jobs takes no longer
    than a lane with ten.
    """
    lanes = _lanes().limit(sa.bindparam("most_lanes", type_=sa.Integer)).subquery("lane")
    first = (
        sa.select(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .where(
            *equal(waiting_messages, lanes, LANE),
            lanes.c.queue == sa.any_(array_parameter("queues", sa.Text)),
            waiting_messages.c.task == sa.any_(array_parameter("tasks", sa.Text)),
        )
        .order_by(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .limit(sa.bindparam("most_of_lane", type_=sa.Integer))
        .lateral("first")
    )
    seconds_left = sa.func.extract("epoch", first.c.run_at - pg.statement_timestamp())
    return (
        sa.select(*(lanes.c[name] for name in LANE), *map(readable, first.c), seconds_left)
        .select_from(lanes.outerjoin(first, sa.true()))
        .order_by(*(lanes.c[name] for name in LANE))
    )


@cache
def places_under() -> sa.Executable:
    """All places under these keys, and whether they are held."""
    keys = document("keys", sa.column("key", sa.Text))
    place = limit_places.c
    places = sa.select(place.limit_key, place.job_id).join_from(
        keys, limit_places, place.limit_key == keys.c.key
    )
    return _with_state(places.subquery("place"))


@cache
def buckets() -> sa.Executable:
    """When the token bucket of each key is full again, NULL if it is full; and the time now."""
    keys = document("keys", sa.column("key", sa.Text))
    bucket = limit_buckets.c
    times = (moment(bucket.full_at), moment(pg.statement_timestamp()))
    return sa.select(keys.c.key, *times).join_from(
        keys, limit_buckets, bucket.limit_key == keys.c.key, isouter=True
    )


@cache
def write_buckets() -> sa.Executable:
    """Write when token buckets are full again."""
    given = document(
        "given", sa.column("limit_key", sa.Text), sa.column("full_at", sa.DateTime(timezone=True))
    )
    rows = sa.select(given.c.limit_key, given.c.full_at).order_by(given.c.limit_key)
    new = pg_insert(limit_buckets).from_select(["limit_key", "full_at"], rows)
    return new.on_conflict_do_update(
        index_elements=[limit_buckets.c.limit_key], set_={"full_at": new.excluded.full_at}
    )


@cache
def delete_full_buckets() -> sa.Executable:
    """Delete some rows of full buckets: a bucket without a row counts as full."""
    full = (
        sa.select(limit_buckets.c.limit_key)
        .where(limit_buckets.c.full_at <= pg.statement_timestamp())
        .order_by(limit_buckets.c.full_at)
        .limit(sa.bindparam("most", type_=sa.Integer))
    )
    return sa.delete(limit_buckets).where(limit_buckets.c.limit_key == among(full))


@cache
def places_after() -> sa.Executable:
    """Some places in the order of their keys, and whether they are held."""
    place = limit_places.c
    after = sa.tuple_(text_parameter("after_key"), sa.bindparam("after_id", type_=sa.BigInteger))
    some = (
        sa.select(place.limit_key, place.job_id)
        .where(sa.tuple_(place.limit_key, place.job_id) > after)
        .order_by(place.limit_key, place.job_id)
        .limit(sa.bindparam("most", type_=sa.Integer))
        .subquery("place")
    )
    return _with_state(some)


@cache
def add_places() -> sa.Executable:
    """Give jobs that were just admitted more places."""
    more = document("more", sa.column("limit_key", sa.Text), sa.column("job_id", sa.BigInteger))
    rows = sa.select(more.c.limit_key, more.c.job_id).order_by(more.c.limit_key, more.c.job_id)
    return (
        pg_insert(limit_places).from_select(["limit_key", "job_id"], rows).on_conflict_do_nothing()
    )


@cache
def delete_places() -> sa.Executable:
    """Delete places that were found free: only an admission could make them held again."""
    free = document("free", sa.column("limit_key", sa.Text), sa.column("job_id", sa.BigInteger))
    place = limit_places.c
    return sa.delete(limit_places).where(
        place.limit_key == free.c.limit_key, place.job_id == free.c.job_id
    )


@cache
def lock_admitted() -> sa.Executable:
    """Lock these jobs and their messages; skips rows that other transactions have locked."""
    job = _locked_jobs().cte("job")
    unlocked = _message_of(job, message_queue.c.id).with_for_update(skip_locked=True)
    message = unlocked.lateral("message")
    return sa.select(job.c.id).select_from(job.join(message, sa.true()))


@cache
def send_back() -> sa.Executable:
    """Make admitted jobs that cannot start now wait again; their places become free.

    The rows are locked, so no worker can start the jobs.  A job with a lease that a crash has left
    is not moved.
    """
    job = _locked_jobs().cte("job")
    ctid: sa.ColumnElement[Any] = sa.literal_column("message_queue.ctid").label("ctid")
    later = sa.or_(message_queue.c.run_at > pg.statement_timestamp(), _is_paused(message_queue))
    leased = sa.exists().where(leases.c.target_id == message_queue.c.target_id)
    message = _message_of(job, ctid).where(later, ~leased).lateral("message")
    ctids = sa.select(message.c.ctid).select_from(job.join(message, sa.true()))
    gone = sa.delete(message_queue).where(among(ctids) == CTID).returning(message_queue).cte("gone")
    names = ("queue", "priority", "run_at", "target_id", "task", "attempt", "crashes")
    rows = sa.select(job.c.limit_keys, *(gone.c[name] for name in names)).join_from(
        gone, job, job.c.id == gone.c.target_id
    )
    waiting = sa.insert(waiting_messages).from_select(["limit_keys", *names], rows).cte("waiting")
    key = pg.unnest(pg.string_to_array(job.c.limit_keys, NEWLINE)).label("limit_key")
    left = (
        sa.select(key, job.c.id)
        .join_from(gone, job, job.c.id == gone.c.target_id)
        .subquery("left_")
    )
    place = limit_places.c
    places = sa.delete(limit_places).where(
        place.limit_key == left.c.limit_key, place.job_id == left.c.id
    )
    return sa.select(gone.c.target_id).add_cte(waiting, places.cte("places"))


@cache
def admit(*, notify: bool) -> sa.Executable:
    """Move these jobs to ``message_queue``, with a place under each key; returns the moved jobs.

    Skips jobs whose rows other transactions have locked.  Moved jobs become due now.  If they kept
    their due time, claims would find them late, because the cursors may have passed that time.
    Their messages are ``alone``, so that no worker prefetches them: a job must not hold a place
    while it waits in a busy worker.
    """
    ready = _locked_jobs().cte("ready")
    same_place = equal(waiting_messages, ready, (*LANE, "run_at"))
    taken = (
        sa.delete(waiting_messages)
        .where(*same_place, waiting_messages.c.target_id == ready.c.id)
        .returning(waiting_messages, clock().label("admitted_at"))
        .cte("taken")
    )
    admitted_at = taken.c.admitted_at
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id)
        .values(run_at=admitted_at, meta=meta_after_admission(admitted_at))
        .returning(*DISPATCHED, taken.c.attempt, taken.c.crashes)
        .cte("job")
    )
    names = ("queue", "priority", "run_at", "id", "task", "attempt", "crashes")
    rows = sa.select(*(job.c[name] for name in names), sa.true()).order_by(job.c.run_at)
    columns = [*("target_id" if name == "id" else name for name in names), "alone"]
    message = sa.insert(message_queue).from_select(columns, rows).cte("message")
    woken = sa.select(wake_up_call() if notify else sa.true()).scalar_subquery()
    key = pg.unnest(pg.string_to_array(taken.c.limit_keys, NEWLINE))
    places = pg_insert(limit_places).from_select(
        ["limit_key", "job_id"], sa.select(key, taken.c.target_id)
    )
    return sa.select(job.c.id, woken).add_cte(
        message, places.on_conflict_do_nothing().cte("places")
    )


@cache
def free_to_admit() -> sa.Executable:
    """Which of these jobs are unfinished and not locked by another transaction."""
    ready = _locked_jobs().cte("ready")
    return sa.select(ready.c.id)


@cache
def drop_useless() -> sa.Executable:
    """Delete waiting messages whose jobs have ended or are gone, as a claim does with messages.

    Code of the previous version and plain SQL may cancel or delete a job and leave its waiting
    message.  If this message is the first of a strict key, it would block the others for ever.
    """
    given = document("given", sa.column("limit_keys", sa.Text), sa.column("job_id", sa.BigInteger))
    job = sa.select(jobs.c.id).where(jobs.c.id == given.c.job_id, jobs.c.outcome.is_(None))
    useless = sa.select(given).where(job.scalar_subquery().is_(None)).cte("useless")
    message = (
        sa.select(CTID)
        .select_from(waiting_messages)
        .where(
            waiting_messages.c.limit_keys == useless.c.limit_keys,
            waiting_messages.c.target_id == useless.c.job_id,
        )
        .with_for_update(skip_locked=True)
        .lateral("message")
    )
    ctids = sa.select(message.c.ctid).select_from(useless.join(message, sa.true()))
    return sa.delete(waiting_messages).where(among(ctids) == CTID)


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


def _lanes() -> sa.Select[*tuple[Any, ...]]:
    """The lanes after the one in the parameters, each found by one step in the index."""
    after = sa.tuple_(
        text_parameter("after_keys"),
        text_parameter("after_queue"),
        sa.bindparam("after_priority", type_=sa.SmallInteger),
    )
    columns = [waiting_messages.c[name] for name in LANE]
    ordered = sa.select(*columns).order_by(*columns).limit(ONE)
    lane = ordered.where(sa.tuple_(*columns) > after).subquery("first_lane").select()
    lanes = lane.cte("lanes", recursive=True)
    behind = sa.tuple_(*columns) > sa.tuple_(*(lanes.c[name] for name in LANE))
    following = ordered.where(behind).lateral("following")
    step: sa.Select[*tuple[Any, ...]] = sa.select(following).select_from(
        lanes.join(following, sa.true())
    )
    return sa.select(lanes.union_all(step))


def _with_state(place: sa.Subquery | sa.FromClause) -> sa.Select[*tuple[Any, ...]]:
    """Places, and whether their jobs hold them, may go back and have started.

    The joins are outer joins, because a job may have been deleted.
    """
    job = (
        sa.select(jobs.c.queue, jobs.c.priority, jobs.c.run_at, jobs.c.limit_keys)
        .where(jobs.c.id == place.c.job_id)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    message = (
        sa.select(*(message_queue.c[name] for name in ("run_at", "queue", "task")))
        .where(*equal(message_queue, job, PLACE), message_queue.c.target_id == place.c.job_id)
        .limit(ONE)
        .lateral("message")
    )
    leased = sa.exists().where(leases.c.target_id == place.c.job_id)
    later = message.c.run_at > pg.statement_timestamp()
    return sa.select(
        place.c.limit_key,
        place.c.job_id,
        sa.or_(leased, message.c.run_at.is_not(None)).label("is_held"),
        sa.case(
            (leased, sa.false()),
            else_=sa.func.coalesce(sa.or_(later, _is_paused(message)), sa.false()),
        ),
        job.c.limit_keys,
        leased.label("has_started"),
        job.c.queue,
        job.c.priority,
    ).select_from(place.outerjoin(job, sa.true()).outerjoin(message, sa.true()))


def _held(places: sa.Select[Any]) -> sa.Subquery:
    """Those of these places that are held, without the second places under a fair limit's name."""
    state = _with_state(places.subquery("place")).subquery("state")
    is_second = sa.exists().where(limits.c.name == state.c.limit_key, limits.c.is_fair)
    return (
        sa.select(state.c.limit_key, state.c.job_id)
        .where(state.c.is_held, ~is_second)
        .subquery("held")
    )


def _is_paused(message: sa.FromClause) -> sa.ColumnElement[bool]:
    return sa.or_(message.c.queue == sa.any_(PAUSED), message.c.task == sa.any_(PAUSED_TASKS))


def _locked_jobs() -> sa.Select[*tuple[Any, ...]]:
    """Those of these jobs that are unfinished, and the place of their messages.

    Locks the jobs, and skips jobs that other transactions have locked.
    """
    given = JOB_IDS.table_valued(sa.column("id", sa.BigInteger)).render_derived(name="given")
    job = (
        sa.select(jobs.c.id, jobs.c.limit_keys, jobs.c.queue, jobs.c.priority, jobs.c.run_at)
        .where(jobs.c.id == given.c.id, jobs.c.outcome.is_(None))
        .with_for_update(key_share=True, skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    return sa.select(job).select_from(given.join(job, sa.true()))


def _message_of(job: sa.CTE, column: sa.ColumnElement[Any]) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(column)
        .select_from(message_queue)
        .where(*equal(message_queue, job, PLACE), message_queue.c.target_id == job.c.id)
    )


class LaneKey(NamedTuple):
    """The jobs that are admitted in the order of their times."""

    limit_keys: str
    queue: str
    priority: int


FIRST_LANE = LaneKey("", "", -1)
"""Before all lanes."""
FIRST_PLACE = ("", 0)
"""Before all places."""


class Lanes(NamedTuple):
    """Some lanes, and the first jobs in them."""

    number: int
    """How many lanes were read."""
    last: LaneKey | None
    """The last lane that was read; None if there was none."""
    are_all: bool
    """Whether there are no lanes after them."""
    lanes: dict[LaneKey, list[Waiting]]
    """The first jobs of each lane that has any for this worker."""
    seconds_to_next: float | None
    """How long until the next of these jobs is due; None if all are due."""


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


class Admissions:
    """The jobs that wait for room in their limits, behind one Session or Connection."""

    def __init__(self, executor: Session | sa.Connection) -> None:
        self._executor = executor

    def serialize(self) -> None:
        """Wait until no other transaction admits; none does until this one ends."""
        self._executor.execute(serialize_admissions())

    def rules(self) -> dict[str, Rule]:
        """The limits in force: by name, and by key for keys with a capacity of their own."""
        in_force = {name: Rule(*rest) for name, *rest in self._fetch(rules(), {})}
        name_of_key = {key: name_of(key) for key in in_force if name_of(key) != key}
        for key, name in name_of_key.items():
            rule, capacity = in_force.get(name, in_force[key]), in_force[key].capacity
            capacity = min(capacity, 1) if rule.is_strict else capacity
            in_force[key] = replace(rule, capacity=capacity)
        return in_force

    def first_waiting(
        self, after: LaneKey, *, queues: Sequence[str], tasks: str, lanes: int, of_lane: int
    ) -> Lanes:
        """The first jobs of the lanes that follow ``after``."""
        parameters = {
            "after_keys": after.limit_keys,
            "after_queue": after.queue,
            "after_priority": after.priority,
            "queues": array_of(queues),
            "tasks": tasks,
            "most_lanes": lanes,
            "most_of_lane": of_lane,
        }
        found: dict[LaneKey, list[Waiting]] = {}
        later: list[float] = []
        number, last, keys = 0, None, tuple[str, ...]()
        for *lane, run_at, job_id, seconds_left in self._fetch(first_waiting(), parameters):
            if lane != last:
                number, last = number + 1, lane
                key, keys = LaneKey(*lane), tuple(lane[0].split(SEPARATOR))
            if job_id is None:
                continue
            is_due = seconds_left <= 0
            job = Waiting(keys, key.priority, run_at, job_id, is_due, key.queue)
            found.setdefault(key, []).append(job)
            if not is_due:
                later.append(float(seconds_left))
        up_to = LaneKey(*last) if last else None
        return Lanes(number, up_to, number < lanes, found, min(later, default=None))

    def places_under(self, keys: Iterable[str], *, paused: Paused) -> list[Place]:
        """All places under these keys."""
        documents = json.dumps([{"key": key} for key in keys])
        return self._places(places_under(), {"keys": documents, **_pause_of(paused)})

    def buckets(self, keys: Iterable[str]) -> Buckets:
        """The token buckets of these keys; there must be at least one key."""
        documents = json.dumps([{"key": key} for key in keys])
        rows = self._fetch(buckets(), {"keys": documents})
        return Buckets(rows[0][2], {key: full_at for key, full_at, _ in rows if full_at})

    def write_buckets(self, full_at: Mapping[str, datetime]) -> None:
        """Write when token buckets are full again."""
        buckets = [{"limit_key": key, "full_at": at.isoformat()} for key, at in full_at.items()]
        self._executor.execute(write_buckets(), {"given": json.dumps(buckets)})

    def delete_full_buckets(self, *, most: int) -> None:
        self._executor.execute(delete_full_buckets(), {"most": most})

    def places_after(self, place: tuple[str, int], *, most: int) -> list[Place]:
        """The next places after this one, in the order of their keys."""
        after = {"after_key": place[0], "after_id": place[1]}
        return self._places(places_after(), {**after, "most": most, **_pause_of(NOTHING_PAUSED)})

    def add_places(self, places: Iterable[tuple[str, int]]) -> None:
        """Give jobs that were just admitted more places, by their keys and ids."""
        more = [{"limit_key": key, "job_id": job_id} for key, job_id in places]
        self._executor.execute(add_places(), {"more": json.dumps(more)})

    def delete_places(self, places: Iterable[Place]) -> None:
        """Delete places that are free."""
        free = [{"limit_key": place.key, "job_id": place.job_id} for place in places]
        self._executor.execute(delete_places(), {"free": json.dumps(free)})

    def send_back(self, job_ids: Sequence[int], *, paused: Paused) -> set[int]:
        """Make admitted jobs that cannot start now wait again; returns the jobs sent back.

        Locks the jobs first: the next statement then sees every lease that others have written.
        """
        ids = {"job_ids": _array(job_ids)}
        locked = [row[0] for row in self._fetch(lock_admitted(), ids)]
        parameters = {"job_ids": _array(locked), **_pause_of(paused)}
        return {row[0] for row in self._fetch(send_back(), parameters)}

    def admit(self, job_ids: Sequence[int], *, notify: bool) -> set[int]:
        """Move jobs to the message queue; returns those that no other transaction had locked."""
        rows = self._fetch(admit(notify=notify), {"job_ids": _array(job_ids)})
        return {row[0] for row in rows}

    def free(self, jobs: Sequence[Waiting]) -> set[int]:
        """Which of these jobs no other transaction has locked."""
        ids = {"job_ids": _array([job.job_id for job in jobs])}
        return {row[0] for row in self._fetch(free_to_admit(), ids)}

    def drop_useless(self, waiting: Iterable[Waiting]) -> None:
        """Delete those of these waiting messages whose jobs have ended or are gone."""
        messages = [
            {"limit_keys": SEPARATOR.join(job.limit_keys), "job_id": job.job_id} for job in waiting
        ]
        self._executor.execute(drop_useless(), {"given": json.dumps(messages)})

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
        counts = self._executor.execute(held_by_key(), _pause_of(NOTHING_PAUSED))
        held = _by_name(row._tuple() for row in counts)
        return [
            LimitState(name, declared, capacity, is_set, held[name], waiting[name], *kind)
            for name, declared, capacity, is_set, *kind in rows
        ]

    def holders(self) -> list[LimitHolder]:
        """Jobs that hold places: the first five under each key, of the first 200 keys."""
        rows = self._executor.execute(holders(), _pause_of(NOTHING_PAUSED))
        return [LimitHolder(*row) for row in rows]

    def undeclared(self) -> dict[str, int]:
        """How many jobs wait for each limit that no worker has declared: no worker admits them."""
        declared = self.rules()
        waiting = sorted(self._waiting().items())
        return {
            name: count for name, count in waiting if name not in declared and name_of(name) == name
        }

    def skipped(
        self, queues: Sequence[str], *, tasks: str, paused: Paused, longer_than: timedelta
    ) -> list[Waiting]:
        """The first jobs of lanes that were due so long ago, although their limits have room now.

        Locks nothing and reads all lanes, of these queues and tasks.
        """
        in_force, after, found = self.rules(), FIRST_LANE, list[Waiting]()
        given = Counter[str]()  # room that the jobs found so far would take
        while True:
            page = self.first_waiting(after, queues=queues, tasks=tasks, lanes=1000, of_lane=1)
            jobs = [job for [job] in page.lanes.values() if job.is_due]
            if jobs:
                keys = {key for job in jobs for key in job.limit_keys}
                fair = {name for name, _ in admission.fair_names(jobs, in_force)}
                places = self.places_under(sorted(keys | fair), paused=paused)
                buckets = self.buckets(sorted(keys))
                held = admission.held_by_key(places, buckets, in_force) + given
                turns = admission.Turns(
                    admission.ready_by_group(places, in_force), 1, buckets.full_at
                )
                ids = set(admission.to_admit(jobs, held, in_force, most=len(jobs), turns=turns))
                chosen = [job for job in jobs if job.job_id in ids]
                given.update(key for job in chosen for key in job.limit_keys)
                found += [job for job in chosen if job.run_at < buckets.now - longer_than]
            if page.are_all or page.last is None:
                return found
            after = page.last

    def _waiting(self) -> Counter[str]:
        """How many jobs wait for each limit, by name and by key."""
        return _by_name(row._tuple() for row in self._executor.execute(waiting_by_keys()))

    def _places(self, statement: sa.Executable, parameters: dict[str, Any]) -> list[Place]:
        return [
            Place(key, job_id, is_held, may_go_back, tuple((keys or "").split(SEPARATOR)), *rest)
            for key, job_id, is_held, may_go_back, keys, *rest in self._fetch(statement, parameters)
        ]

    def _fetch(self, statement: sa.Executable, parameters: dict[str, Any]) -> Sequence[Any]:
        return fetch(self._executor, statement, parameters)


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


def _pause_of(paused: Paused) -> dict[str, str]:
    return {"paused": array_of(paused.queues), "paused_tasks": array_of(paused.tasks)}


def _array(job_ids: Sequence[int]) -> str:
    return array_of(map(str, job_ids))
