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
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.deadlines import meta_after_admission
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import DISPATCHED
from pgqueue.repository.reading import moment
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
    given_ids,
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
ADMITTED = "admitted"
"""The word of a notification that there are messages, and no other jobs that wait to be admitted.
"""
PAUSED = array_parameter("paused", sa.Text)
PAUSED_TASKS = array_parameter("paused_tasks", sa.Text)
ONE = sa.literal_column("1", sa.Integer)


@cache
def serialize_admissions() -> sa.Executable:
    """Wait for the transaction that admits, and keep others out until this one ends; returns the
    session of the server.

    A separate statement: the next one then sees what the other transaction has committed.
    """
    lock = sa.literal_column(str(lock_key("admission")), sa.BigInteger)
    session = (pg.pg_backend_pid(), moment(pg.pg_postmaster_start_time()))
    return sa.select(pg.pg_advisory_xact_lock(lock), *session)


@cache
def first_waiting() -> sa.Executable:
    """The first jobs of the next lanes, and the seconds until each job is due.

    Reads only jobs of these queues and tasks; a lane without such jobs has a row with the time now.
    The statement steps from lane to lane in the index, so a lane with a million jobs takes no
    longer than a lane with ten.
    """
    lane = _lanes().limit(sa.bindparam("most_lanes", type_=sa.Integer)).subquery("lane")
    return _with_first_jobs(lane, lane.c.queue == sa.any_(array_parameter("queues", sa.Text)))


@cache
def first_in_lanes() -> sa.Executable:
    """The same of some lanes, each from its cursor on, which is a time and a job."""
    lane = document(
        "lane",
        sa.column("limit_keys", sa.Text),
        sa.column("queue", sa.Text),
        sa.column("priority", sa.SmallInteger),
        sa.column("run_at", sa.DateTime(timezone=True)),
        sa.column("target_id", sa.BigInteger),
    )
    key = sa.tuple_(waiting_messages.c.run_at, waiting_messages.c.target_id)
    is_served = lane.c.queue == sa.any_(array_parameter("queues", sa.Text))
    return _with_first_jobs(lane, is_served, key >= sa.tuple_(lane.c.run_at, lane.c.target_id))


@cache
def new_lanes() -> sa.Executable:
    """The first lane between each two of the known lanes, and the first behind the last of them.

    Found by a range of the index, so that the dead entries of the known lanes are not read.  The
    known lanes are sorted here: Python may compare texts otherwise.
    """
    known = document(
        "known",
        sa.column("limit_keys", sa.Text),
        sa.column("queue", sa.Text),
        sa.column("priority", sa.SmallInteger),
    )
    columns = [known.c[name] for name in LANE]
    following = [
        pg.lead(column).over(order_by=columns).label(f"next_{column.name}") for column in columns
    ]
    gap = sa.select(*columns, *following).cte("gap")
    of_message = [waiting_messages.c[name] for name in LANE]
    first = sa.select(*of_message).order_by(*of_message).limit(ONE)
    behind = sa.tuple_(*of_message) > sa.tuple_(*(gap.c[name] for name in LANE))
    before = sa.tuple_(*of_message) < sa.tuple_(*(gap.c[f"next_{name}"] for name in LANE))
    between = first.where(behind, before).lateral("between_")
    last = first.where(behind).lateral("last_")
    return sa.union_all(
        sa.select(between).select_from(gap.join(between, sa.true())),
        sa.select(last).select_from(gap.join(last, gap.c.next_queue.is_(None))),
    )


@cache
def places_under() -> sa.Executable:
    """The known places under these keys, those after the last known one, and whether they are held.

    A known place is found by its whole key: a scan of all places of a key steps over dead index
    entries.
    """
    keys = document("keys", sa.column("key", sa.Text), sa.column("after", sa.BigInteger))
    known = document("known", sa.column("key", sa.Text), sa.column("id", sa.BigInteger))
    new = _places_of(keys, limit_places.c.id > keys.c.after, name="new")
    old = _places_of(known, limit_places.c.id == known.c.id, name="old")
    return with_state(
        sa.union_all(
            sa.select(keys.c.key.label("limit_key"), new).select_from(keys.join(new, sa.true())),
            sa.select(known.c.key, old).select_from(known.join(old, sa.true())),
        ).subquery("place")
    )


@cache
def buckets() -> sa.Executable:
    """When the token bucket of each key is full again, NULL if it is full; and the time now."""
    keys = document("keys", sa.column("key", sa.Text))
    bucket = limit_buckets.c
    newest = (
        sa.select(bucket.full_at)
        .where(bucket.limit_key == keys.c.key)
        .order_by(bucket.limit_key.desc(), bucket.full_at.desc())
        .limit(ONE)
        .lateral("newest")
    )
    times = (moment(newest.c.full_at), moment(pg.statement_timestamp()))
    return sa.select(keys.c.key, *times).select_from(keys.outerjoin(newest, sa.true()))


@cache
def write_buckets() -> sa.Executable:
    """Write when token buckets are full again, and delete what they had before."""
    given = document(
        "given",
        sa.column("limit_key", sa.Text),
        sa.column("before", sa.DateTime(timezone=True)),
        sa.column("full_at", sa.DateTime(timezone=True)),
    )
    bucket = limit_buckets.c
    gone = sa.delete(limit_buckets).where(
        bucket.limit_key == given.c.limit_key, bucket.full_at == given.c.before
    )
    rows = sa.select(given.c.limit_key, given.c.full_at).order_by(given.c.limit_key)
    new = pg_insert(limit_buckets).from_select(["limit_key", "full_at"], rows)
    return new.on_conflict_do_nothing().add_cte(gone.cte("gone"))


@cache
def delete_full_buckets() -> sa.Executable:
    """Delete some rows of full buckets: a bucket without a row counts as full.

    Only admissions write buckets, and this is in one: no row moves meanwhile.
    """
    full = (
        sa.select(CTID)
        .select_from(limit_buckets)
        .where(limit_buckets.c.full_at <= pg.statement_timestamp())
        .order_by(limit_buckets.c.full_at)
        .limit(sa.bindparam("most", type_=sa.Integer))
    )
    return sa.delete(limit_buckets).where(among(full) == CTID)


@cache
def places_after() -> sa.Executable:
    """Some places in the order of their keys, and whether they are held."""
    place = limit_places.c
    after = sa.tuple_(text_parameter("after_key"), sa.bindparam("after_id", type_=sa.BigInteger))
    some = (
        sa.select(limit_places)
        .where(sa.tuple_(place.limit_key, place.id) > after)
        .order_by(place.limit_key, place.id)
        .limit(sa.bindparam("most", type_=sa.Integer))
        .subquery("place")
    )
    return with_state(some)


@cache
def add_places() -> sa.Executable:
    """Give jobs that were just admitted more places."""
    more = document("more", sa.column("limit_key", sa.Text), sa.column("job_id", sa.BigInteger))
    rows = sa.select(more.c.limit_key, more.c.job_id).order_by(more.c.limit_key, more.c.job_id)
    return sa.insert(limit_places).from_select(["limit_key", "job_id"], rows)


@cache
def delete_places() -> sa.Executable:
    """Delete places that were found free: only an admission could make them held again."""
    free = document("free", sa.column("key", sa.Text), sa.column("id", sa.BigInteger))
    place = _places_of(free, limit_places.c.id == free.c.id, CTID, name="place")
    ctids = sa.select(place.c.ctid).select_from(free.join(place, sa.true()))
    return sa.delete(limit_places).where(among(ctids) == CTID)


@cache
def lock_admitted() -> sa.Executable:
    """Lock these jobs and their messages; skips rows that other transactions have locked."""
    job = _locked_jobs().cte("job")
    unlocked = _message_of(job, message_queue.c.id).with_for_update(skip_locked=True)
    message = unlocked.lateral("message")
    return sa.select(job.c.id).select_from(job.join(message, sa.true()))


@cache
def send_back() -> sa.Executable:
    """Make admitted jobs that cannot start now wait again; so their places are free.

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
    return sa.select(gone.c.target_id).add_cte(waiting)


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
    woken = sa.select(wake_up_call(ADMITTED) if notify else sa.true()).scalar_subquery()
    key = pg.unnest(pg.string_to_array(taken.c.limit_keys, NEWLINE))
    places = sa.insert(limit_places).from_select(
        ["limit_key", "job_id"], sa.select(key, taken.c.target_id)
    )
    return sa.select(job.c.id, woken).add_cte(message, places.cte("places"))


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


def _places_of(
    given: sa.TableValuedAlias,
    condition: sa.ColumnElement[bool],
    *columns: sa.ColumnElement[Any],
    name: str,
) -> sa.sql.selectable.LateralFromClause:
    """The places of a key.  OFFSET keeps the planner from a scan of all places: it does not know
    how many dead entries the index has."""
    return (
        sa.select(*(columns or (limit_places.c.id, limit_places.c.job_id)))
        .select_from(limit_places)
        .where(limit_places.c.limit_key == given.c.key, condition)
        .offset(AS_IT_STANDS)
        .lateral(name)
    )


def _with_first_jobs(
    lane: sa.Subquery | sa.TableValuedAlias, *are_read: sa.ColumnElement[bool]
) -> sa.Select[*tuple[Any, ...]]:
    """These lanes with the first of the jobs that are to be read."""
    first = (
        sa.select(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .where(
            *equal(waiting_messages, lane, LANE),
            *are_read,
            waiting_messages.c.task == sa.any_(array_parameter("tasks", sa.Text)),
        )
        .order_by(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .limit(sa.bindparam("most_of_lane", type_=sa.Integer))
        .lateral("first")
    )
    now = pg.statement_timestamp()
    run_at = sa.func.coalesce(first.c.run_at, now)
    order = [lane.c[name] for name in LANE]
    return (
        sa.select(*order, moment(run_at), first.c.target_id, sa.extract("epoch", run_at - now))
        .select_from(lane.outerjoin(first, sa.true()))
        .order_by(*order, first.c.run_at, first.c.target_id)
    )


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
    # OFFSET keeps the planner from a scan of all leases, which steps over dead index entries.
    lease = (
        sa.select(leases.c.target_id)
        .where(leases.c.target_id == place.c.job_id)
        .offset(AS_IT_STANDS)
        .lateral("lease")
    )
    leased = lease.c.target_id.is_not(None)
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
        place.c.id,
    ).select_from(
        place.outerjoin(job, sa.true()).outerjoin(message, sa.true()).outerjoin(lease, sa.true())
    )


def _is_paused(message: sa.FromClause) -> sa.ColumnElement[bool]:
    return sa.or_(message.c.queue == sa.any_(PAUSED), message.c.task == sa.any_(PAUSED_TASKS))


def _locked_jobs() -> sa.Select[*tuple[Any, ...]]:
    """Those of these jobs that are unfinished, and the place of their messages.

    Locks the jobs, and skips jobs that other transactions have locked.
    """
    given = given_ids("job_ids")
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
QUIET = 1
"""Seconds for which a cursor stays behind the time of the database: a transaction that is about to
commit may have inserted a job that is due now."""


class FirstRead(NamedTuple):
    """The first job that a read of a lane has found; without a job, the time of the read."""

    run_at: datetime
    job_id: int | None
    seconds_left: Decimal

    def cursor(self) -> tuple[str, int]:
        """The time and the job with which the next read of the lane may begin."""
        if self.job_id is not None and self.seconds_left <= -QUIET:
            return self.run_at.isoformat(), self.job_id
        quiet_until = self.run_at - timedelta(seconds=float(self.seconds_left) + QUIET)
        return quiet_until.isoformat(), 0


PlacesOfKey = tuple[int, tuple[int, ...]]
"""The places of a key in the last read: the greatest id of all that were ever read, and the ids of
those that were there.  Plain tuples, which the garbage collector does not visit."""
NEVER_READ: PlacesOfKey = (0, ())
NONE_KNOWN: Mapping[str, PlacesOfKey] = {}


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
    reads: dict[LaneKey, FirstRead]
    """What was first in each lane."""
    seconds_to_due: dict[LaneKey, float]
    """How long until the next of these jobs is due, for each lane with such a job."""


class Admissions:
    """The jobs that wait for room in their limits, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def serialize(self) -> object:
        """Wait until no other transaction admits; none does until this one ends.

        Returns the session of the server, which is another one after a failover or a crash.
        """
        [(_, *session)] = self._fetch(serialize_admissions(), {})
        return tuple(session)

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
        page = _lanes_of(self._fetch(first_waiting(), parameters))
        return page._replace(are_all=page.number < lanes)

    def first_in_lanes(
        self,
        lanes: Mapping[LaneKey, FirstRead | None],
        *,
        queues: Sequence[str],
        tasks: str,
        of_lane: int,
    ) -> Lanes:
        """The first jobs of these lanes, each from where its last read has begun."""
        documents = []
        for (limit_keys, queue, priority), read in lanes.items():
            run_at, job_id = ("-infinity", 0) if read is None else read.cursor()
            documents.append(
                {
                    "limit_keys": limit_keys,
                    "queue": queue,
                    "priority": priority,
                    "run_at": run_at,
                    "target_id": job_id,
                }
            )
        parameters = {
            "lane": json.dumps(documents),
            "queues": array_of(queues),
            "tasks": tasks,
            "most_of_lane": of_lane,
        }
        return _lanes_of(self._fetch(first_in_lanes(), parameters))

    def new_lanes(self, known: Iterable[LaneKey]) -> list[LaneKey]:
        """Some of the lanes that are not known; none if all are."""
        lanes = json.dumps([lane._asdict() for lane in (FIRST_LANE, *known)])
        return [LaneKey(*row) for row in self._fetch(new_lanes(), {"known": lanes})]

    def places_under(
        self, keys: Iterable[str], *, paused: Paused, known: Mapping[str, PlacesOfKey] = NONE_KNOWN
    ) -> list[Place]:
        """All places under these keys.

        ``known``: the places that the same session of the server has read in an earlier admission.
        """
        after, ids = [], []
        for key in keys:
            last, there = known.get(key, NEVER_READ)
            after.append({"key": key, "after": last})
            ids += [{"key": key, "id": each} for each in there]
        documents = {"keys": json.dumps(after), "known": json.dumps(ids)}
        return self._places(places_under(), {**documents, **pause_of(paused)})

    def buckets(self, keys: Iterable[str]) -> Buckets:
        """The token buckets of these keys; there must be at least one key."""
        documents = json.dumps([{"key": key} for key in keys])
        rows = self._fetch(buckets(), {"keys": documents})
        return Buckets(rows[0][2], {key: full_at for key, full_at, _ in rows if full_at})

    def write_buckets(self, full_at: Mapping[str, datetime], *, before: Buckets) -> None:
        """Write when token buckets are full again; ``before``: what was read of them."""
        were = before.full_at
        buckets = [
            {
                "limit_key": key,
                "before": were[key].isoformat() if key in were else None,
                "full_at": at.isoformat(),
            }
            for key, at in full_at.items()
            if at != were.get(key)
        ]
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
        free = [{"key": place.key, "id": place.id} for place in places]
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


def _lanes_of(rows: Iterable[Any]) -> Lanes:
    found: dict[LaneKey, list[WaitingJob]] = {}
    reads: dict[LaneKey, FirstRead] = {}
    later: dict[LaneKey, float] = {}
    lane: tuple[Any, ...] = ()
    key, keys, jobs = FIRST_LANE, tuple[str, ...](), list[WaitingJob]()
    for row in rows:
        run_at, job_id, seconds_left = row[3:]
        if row[:3] != lane:
            lane = row[:3]
            key, keys, jobs = LaneKey(*lane), tuple(lane[0].split(SEPARATOR)), []
            reads[key] = FirstRead(run_at, job_id, seconds_left)
            if job_id is not None:
                found[key] = jobs
        if job_id is None:
            continue
        is_due = seconds_left <= 0
        jobs.append(WaitingJob(keys, key.priority, run_at, job_id, is_due, key.queue))
        if not is_due:
            later.setdefault(key, float(seconds_left))
    return Lanes(len(reads), key if reads else None, True, found, reads, later)


def pause_of(paused: Paused) -> dict[str, str]:
    """The parameters by which places of paused queues and tasks become free.

    If all queues are paused, those places stay: no job of another queue could take them.
    """
    return {"paused": array_of(paused.queues), "paused_tasks": array_of(paused.tasks)}


def _array(job_ids: Sequence[int]) -> str:
    return array_of(map(str, job_ids))
