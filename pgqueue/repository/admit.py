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
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.deadlines import meta_after_admission
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import DISPATCHED
from pgqueue.repository.reading import moment, readable
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CTID,
    NEWLINE,
    POSITION,
    Executor,
    among,
    array_of,
    array_parameter,
    clock,
    document,
    equal,
    jobs,
    leases,
    limit_buckets,
    limit_places,
    lock_key,
    message_queue,
    pg,
    sees_all,
    text_parameter,
    waiting_messages,
    wake_up_call,
)
from pgqueue.repository.workers import NOTHING_PAUSED, Paused
from pgqueue.rules import admission
from pgqueue.rules.admission import Buckets, Place, Rules, WaitingJob
from pgqueue.rules.limits import SEPARATOR

LANE = ("limit_keys", "queue", "priority")
"""The columns of a lane: the primary key of a waiting message without its time and its job."""
PAUSED = array_parameter("paused", sa.Text)
PAUSED_TASKS = array_parameter("paused_tasks", sa.Text)
ONE = sa.literal_column("1", sa.Integer)
JOB_IDS = pg.unnest(array_parameter("job_ids", sa.BigInteger))


@cache
def serialize_admissions() -> sa.Executable:
    """Wait for the transaction that admits, and keep others out until this one ends.

    A separate statement: the next one then sees what the other transaction has committed.
    """
    return sa.select(
        pg.pg_advisory_xact_lock(sa.literal_column(str(lock_key("admission")), sa.BigInteger))
    )


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
    return with_state(places.subquery("place"))


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
    return with_state(some)


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
    message = _message_of(job, ctid).where(later, ~leased, sees_all(leases)).lateral("message")
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
    Workers prefetch them as other jobs: a job holds its place from here on, in a message as in a
    worker.
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
    alone = sa.or_(job.c.max_attempts == 1, job.c.crashes > 0)
    rows = sa.select(*(job.c[name] for name in names), alone).order_by(job.c.run_at)
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
    is_gone = sa.and_(job.scalar_subquery().is_(None), sees_all(jobs))
    useless = sa.select(given).where(is_gone).cte("useless")
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


def with_state(place: sa.Subquery | sa.FromClause) -> sa.Select[*tuple[Any, ...]]:
    """Places, and whether their jobs hold them, may go back and have started.

    The joins are outer joins, because a job may have been deleted.  A place counts as held while
    row security hides what would hold it.
    """
    job = (
        sa.select(jobs.c.queue, jobs.c.priority, jobs.c.run_at, jobs.c.limit_keys)
        .where(jobs.c.id == place.c.job_id)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    message = (
        sa.select(*(message_queue.c[name] for name in ("run_at", "queue", "task")))
        .where(*equal(message_queue, job, POSITION), message_queue.c.target_id == place.c.job_id)
        .limit(ONE)
        .lateral("message")
    )
    leased = sa.exists().where(leases.c.target_id == place.c.job_id)
    later = message.c.run_at > pg.statement_timestamp()
    return sa.select(
        place.c.limit_key,
        place.c.job_id,
        sa.or_(
            leased,
            message.c.run_at.is_not(None),
            sa.not_(sees_all(jobs, leases, message_queue)),
        ).label("is_held"),
        sa.case(
            (leased, sa.false()),
            else_=sa.func.coalesce(sa.or_(later, _is_paused(message)), sa.false()),
        ),
        job.c.limit_keys,
        leased.label("has_started"),
        job.c.queue,
        job.c.priority,
    ).select_from(place.outerjoin(job, sa.true()).outerjoin(message, sa.true()))


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
        .where(*equal(message_queue, job, POSITION), message_queue.c.target_id == job.c.id)
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
    lanes: dict[LaneKey, list[WaitingJob]]
    """The first jobs of each lane that has any for this worker."""
    seconds_to_next: float | None
    """How long until the next of these jobs is due; None if all are due."""


class Admissions:
    """The jobs that wait for room in their limits, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def serialize(self) -> None:
        """Wait until no other transaction admits; none does until this one ends."""
        self._executor.execute(serialize_admissions())

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
        found: dict[LaneKey, list[WaitingJob]] = {}
        later: list[float] = []
        number, last, keys = 0, None, tuple[str, ...]()
        for *lane, run_at, job_id, seconds_left in self._fetch(first_waiting(), parameters):
            if lane != last:
                number, last = number + 1, lane
                key, keys = LaneKey(*lane), tuple(lane[0].split(SEPARATOR))
            if job_id is None:
                continue
            is_due = seconds_left <= 0
            job = WaitingJob(keys, key.priority, run_at, job_id, is_due, key.queue)
            found.setdefault(key, []).append(job)
            if not is_due:
                later.append(float(seconds_left))
        up_to = LaneKey(*last) if last else None
        return Lanes(number, up_to, number < lanes, found, min(later, default=None))

    def places_under(self, keys: Iterable[str], *, paused: Paused) -> list[Place]:
        """All places under these keys."""
        documents = json.dumps([{"key": key} for key in keys])
        return self._places(places_under(), {"keys": documents, **pause_of(paused)})

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
        return self._places(places_after(), {**after, "most": most, **pause_of(NOTHING_PAUSED)})

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
        parameters = {"job_ids": _array(locked), **pause_of(paused)}
        return {row[0] for row in self._fetch(send_back(), parameters)}

    def admit(self, job_ids: Sequence[int], *, notify: bool) -> set[int]:
        """Move jobs to the message queue; returns those that no other transaction had locked."""
        rows = self._fetch(admit(notify=notify), {"job_ids": _array(job_ids)})
        return {row[0] for row in rows}

    def free(self, jobs: Sequence[WaitingJob]) -> set[int]:
        """Which of these jobs no other transaction has locked."""
        ids = {"job_ids": _array([job.job_id for job in jobs])}
        return {row[0] for row in self._fetch(free_to_admit(), ids)}

    def drop_useless(self, waiting: Iterable[WaitingJob]) -> None:
        """Delete those of these waiting messages whose jobs have ended or are gone."""
        messages = [
            {"limit_keys": SEPARATOR.join(job.limit_keys), "job_id": job.job_id} for job in waiting
        ]
        self._executor.execute(drop_useless(), {"given": json.dumps(messages)})

    def skipped(
        self,
        queues: Sequence[str],
        *,
        tasks: str,
        paused: Paused,
        rules: Rules,
        longer_than: timedelta,
    ) -> list[WaitingJob]:
        """The first jobs of lanes that were due so long ago, although their limits have room now.

        Locks nothing and reads all lanes, of these queues and tasks.
        """
        after, found = FIRST_LANE, list[WaitingJob]()
        given = Counter[str]()  # room that the jobs found so far would take
        while True:
            page = self.first_waiting(after, queues=queues, tasks=tasks, lanes=1000, of_lane=1)
            jobs = [job for [job] in page.lanes.values() if job.is_due]
            if jobs:
                keys = {key for job in jobs for key in job.limit_keys}
                fair = {name for name, _ in admission.fair_names(jobs, rules)}
                places = self.places_under(sorted(keys | fair), paused=paused)
                buckets = self.buckets(sorted(keys))
                held = admission.held_by_key(places, buckets, rules) + given
                turns = admission.Turns(admission.ready_by_group(places, rules), 1, buckets.full_at)
                ids = set(admission.to_admit(jobs, held, rules, most=len(jobs), turns=turns))
                chosen = [job for job in jobs if job.job_id in ids]
                given.update(key for job in chosen for key in job.limit_keys)
                found += [job for job in chosen if job.run_at < buckets.now - longer_than]
            if page.are_all or page.last is None:
                return found
            after = page.last

    def _places(self, statement: sa.Executable, parameters: dict[str, Any]) -> list[Place]:
        return [
            Place(key, job_id, is_held, may_go_back, tuple((keys or "").split(SEPARATOR)), *rest)
            for key, job_id, is_held, may_go_back, keys, *rest in self._fetch(statement, parameters)
        ]

    def _fetch(self, statement: sa.Executable, parameters: dict[str, Any]) -> Sequence[Any]:
        return fetch(self._executor, statement, parameters)


def pause_of(paused: Paused) -> dict[str, str]:
    return {"paused": array_of(paused.queues), "paused_tasks": array_of(paused.tasks)}


def _array(job_ids: Sequence[int]) -> str:
    return array_of(map(str, job_ids))
