"""Admit: move jobs that wait for room in their limits to ``message_queue``.

An admission is one transaction, and all admissions of a database run one at a time.  Only an
admission raises the number of places held under a key, so that number never exceeds the capacity.

A place is held as long as its job has a message in ``message_queue`` or a lease.  Every statement
that replaces a message by a lease, or a lease by a message, does both at once.  An admission reads
both in one snapshot, so a held place never looks free.

Only an admission writes the token buckets of rates.  It reads them after the places.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    DateTime,
    Executable,
    Float,
    FromClause,
    Integer,
    Select,
    SmallInteger,
    Subquery,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.sql.selectable import CTE

from pgqueue.statements.enqueueing import DISPATCHED
from pgqueue.statements.reading import moment, readable, span
from pgqueue.statements.starting import meta_after_admission
from pgqueue.statements.tables import (
    AS_IT_STANDS,
    CTID,
    NEWLINE,
    PLACE,
    among,
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

LANE = ("limit_keys", "queue", "priority")
"""The columns of a lane: the primary key of a waiting message without its time and its job."""
DECLARED = ("declared", "is_strict", "skips_failed", "period", "burst", "is_fair")
"""The columns that hold what the code declares of a limit."""
PAUSED = array_parameter("paused", Text)
PAUSED_TASKS = array_parameter("paused_tasks", Text)
ONE = literal_column("1", Integer)
JOB_IDS = pg.unnest(array_parameter("job_ids", BigInteger))


@cache
def serialize_admissions() -> Executable:
    """Wait for the transaction that admits, and keep others out until this one ends.

    A separate statement: the next one then sees what the other transaction has committed.
    """
    return select(pg.pg_advisory_xact_lock(literal_column(str(lock_key("admission")), BigInteger)))


@cache
def rules() -> Executable:
    """The limits that are in force."""
    burst = func.coalesce(limits.c.burst, ONE)
    flags = (limits.c.is_strict, limits.c.skips_failed)
    columns = (limits.c.name, _capacity(), *flags, limits.c.period, burst, limits.c.is_fair)
    return select(*map(readable, columns)).where(_is_in_force())


@cache
def first_waiting() -> Executable:
    """The first jobs of the next lanes, and the seconds until each job is due.

    Reads only jobs of these queues and tasks; a lane without such jobs has a row with NULL.  The
    statement steps from lane to lane in the index, so a lane with a million jobs takes no longer
    than a lane with ten.
    """
    lanes = _lanes().limit(bindparam("most_lanes", type_=Integer)).subquery("lane")
    first = (
        select(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .where(
            *equal(waiting_messages, lanes, LANE),
            lanes.c.queue == any_(array_parameter("queues", Text)),
            waiting_messages.c.task == any_(array_parameter("tasks", Text)),
        )
        .order_by(waiting_messages.c.run_at, waiting_messages.c.target_id)
        .limit(bindparam("most_of_lane", type_=Integer))
        .lateral("first")
    )
    seconds_left = func.extract("epoch", first.c.run_at - pg.statement_timestamp())
    return (
        select(*(lanes.c[name] for name in LANE), *map(readable, first.c), seconds_left)
        .select_from(lanes.outerjoin(first, true()))
        .order_by(*(lanes.c[name] for name in LANE))
    )


@cache
def places_under() -> Executable:
    """All places under these keys, and whether they are held."""
    keys = document("keys", column("key", Text))
    place = limit_places.c
    places = select(place.limit_key, place.job_id).join_from(
        keys, limit_places, place.limit_key == keys.c.key
    )
    return _with_state(places.subquery("place"))


@cache
def buckets() -> Executable:
    """When the token bucket of each key is full again, NULL if it is full; and the time now."""
    keys = document("keys", column("key", Text))
    bucket = limit_buckets.c
    times = (moment(bucket.full_at), moment(pg.statement_timestamp()))
    return select(keys.c.key, *times).join_from(
        keys, limit_buckets, bucket.limit_key == keys.c.key, isouter=True
    )


@cache
def write_buckets() -> Executable:
    """Write when token buckets are full again."""
    given = document("given", column("limit_key", Text), column("full_at", DateTime(timezone=True)))
    rows = select(given.c.limit_key, given.c.full_at).order_by(given.c.limit_key)
    new = insert_or_skip(limit_buckets).from_select(["limit_key", "full_at"], rows)
    return new.on_conflict_do_update(
        index_elements=[limit_buckets.c.limit_key], set_={"full_at": new.excluded.full_at}
    )


@cache
def delete_full_buckets() -> Executable:
    """Delete some rows of full buckets: a bucket without a row counts as full."""
    full = (
        select(limit_buckets.c.limit_key)
        .where(limit_buckets.c.full_at <= pg.statement_timestamp())
        .order_by(limit_buckets.c.full_at)
        .limit(bindparam("most", type_=Integer))
    )
    return delete(limit_buckets).where(limit_buckets.c.limit_key == among(full))


@cache
def places_after() -> Executable:
    """Some places in the order of their keys, and whether they are held."""
    place = limit_places.c
    after = tuple_(text_parameter("after_key"), bindparam("after_id", type_=BigInteger))
    some = (
        select(place.limit_key, place.job_id)
        .where(tuple_(place.limit_key, place.job_id) > after)
        .order_by(place.limit_key, place.job_id)
        .limit(bindparam("most", type_=Integer))
        .subquery("place")
    )
    return _with_state(some)


@cache
def add_places() -> Executable:
    """Give jobs that were just admitted more places."""
    more = document("more", column("limit_key", Text), column("job_id", BigInteger))
    rows = select(more.c.limit_key, more.c.job_id).order_by(more.c.limit_key, more.c.job_id)
    return (
        insert_or_skip(limit_places)
        .from_select(["limit_key", "job_id"], rows)
        .on_conflict_do_nothing()
    )


@cache
def delete_places() -> Executable:
    """Delete places that were found free: only an admission could make them held again."""
    free = document("free", column("limit_key", Text), column("job_id", BigInteger))
    place = limit_places.c
    return delete(limit_places).where(
        place.limit_key == free.c.limit_key, place.job_id == free.c.job_id
    )


@cache
def lock_admitted() -> Executable:
    """Lock these jobs and their messages; skips rows that other transactions have locked."""
    job = _locked_jobs().cte("job")
    unlocked = _message_of(job, message_queue.c.id).with_for_update(skip_locked=True)
    message = unlocked.lateral("message")
    return select(job.c.id).select_from(job.join(message, true()))


@cache
def send_back() -> Executable:
    """Make admitted jobs that cannot start now wait again; their places become free.

    The rows are locked, so no worker can start the jobs.  A job with a lease that a crash has left
    is not moved.
    """
    job = _locked_jobs().cte("job")
    ctid: ColumnElement[Any] = literal_column("message_queue.ctid").label("ctid")
    later = or_(message_queue.c.run_at > pg.statement_timestamp(), _is_paused(message_queue))
    leased = exists().where(leases.c.target_id == message_queue.c.target_id)
    message = _message_of(job, ctid).where(later, ~leased).lateral("message")
    ctids = select(message.c.ctid).select_from(job.join(message, true()))
    gone = delete(message_queue).where(among(ctids) == CTID).returning(message_queue).cte("gone")
    names = ("queue", "priority", "run_at", "target_id", "task", "attempt", "crashes")
    rows = select(job.c.limit_keys, *(gone.c[name] for name in names)).join_from(
        gone, job, job.c.id == gone.c.target_id
    )
    waiting = insert(waiting_messages).from_select(["limit_keys", *names], rows).cte("waiting")
    return select(gone.c.target_id).add_cte(waiting, _places_left_by(gone, job))


@cache
def admit(*, notify: bool) -> Executable:
    """Move these jobs to ``message_queue``, with a place under each key; returns the moved jobs.

    Skips jobs whose rows other transactions have locked.  Moved jobs become due now.  If they kept
    their due time, claims would find them late, because the cursors may have passed that time.
    Their messages are ``alone``, so that no worker prefetches them: a job must not hold a place
    while it waits in a busy worker.
    """
    ready = _locked_jobs().cte("ready")
    same_place = equal(waiting_messages, ready, (*LANE, "run_at"))
    taken = (
        delete(waiting_messages)
        .where(*same_place, waiting_messages.c.target_id == ready.c.id)
        .returning(waiting_messages, clock().label("admitted_at"))
        .cte("taken")
    )
    admitted_at = taken.c.admitted_at
    job = (
        update(jobs)
        .where(jobs.c.id == taken.c.target_id)
        .values(run_at=admitted_at, meta=meta_after_admission(admitted_at))
        .returning(*DISPATCHED, taken.c.attempt, taken.c.crashes)
        .cte("job")
    )
    names = ("queue", "priority", "run_at", "id", "task", "attempt", "crashes")
    rows = select(*(job.c[name] for name in names), true()).order_by(job.c.run_at)
    columns = [*("target_id" if name == "id" else name for name in names), "alone"]
    message = insert(message_queue).from_select(columns, rows).cte("message")
    woken = select(wake_up_call() if notify else true()).scalar_subquery()
    return select(job.c.id, woken).add_cte(message, _places_of(taken))


@cache
def free_to_admit() -> Executable:
    """Which of these jobs are unfinished and not locked by another transaction."""
    ready = _locked_jobs().cte("ready")
    return select(ready.c.id)


@cache
def drop_useless() -> Executable:
    """Delete waiting messages whose jobs have ended or are gone, as a claim does with messages.

    Code of the previous version and plain SQL may cancel or delete a job and leave its waiting
    message.  If this message is the first of a strict key, it would block the others for ever.
    """
    given = document("given", column("limit_keys", Text), column("job_id", BigInteger))
    job = select(jobs.c.id).where(jobs.c.id == given.c.job_id, jobs.c.outcome.is_(None))
    useless = select(given).where(job.scalar_subquery().is_(None)).cte("useless")
    message = (
        select(CTID)
        .select_from(waiting_messages)
        .where(
            waiting_messages.c.limit_keys == useless.c.limit_keys,
            waiting_messages.c.target_id == useless.c.job_id,
        )
        .with_for_update(skip_locked=True)
        .lateral("message")
    )
    ctids = select(message.c.ctid).select_from(useless.join(message, true()))
    return delete(waiting_messages).where(among(ctids) == CTID)


@cache
def declare() -> Executable:
    """Write the limits of a worker's code, if they differ from those in the table."""
    new = _declared()
    return new.on_conflict_do_update(
        index_elements=[limits.c.name],
        set_={**{name: new.excluded[name] for name in DECLARED}, "declared_at": clock()},
        where=or_(*(limits.c[name].is_distinct_from(new.excluded[name]) for name in DECLARED)),
    )


@cache
def declare_new() -> Executable:
    """Write limits that no worker has declared.  An operator's role may not change others."""
    return _declared().on_conflict_do_nothing()


@cache
def are_declared() -> Executable:
    """Whether any limit was ever declared."""
    return select(exists(select(limits.c.name)))


@cache
def set_capacity() -> Executable:
    """Change the capacity of a limit; NULL means the capacity in the code."""
    capacity = cast(bindparam("new_capacity", type_=Integer), Integer)
    return (
        update(limits)
        .where(limits.c.name == text_parameter("limit_name"))
        .values(capacity=capacity)
        .returning(limits.c.name)
    )


@cache
def set_capacity_of_key() -> Executable:
    """Write the capacity of one key of a limit as a separate row; NULL means that of the limit."""
    capacity = cast(bindparam("new_capacity", type_=Integer), Integer)
    declared = [limits.c[name] for name in DECLARED]
    row = select(text_parameter("key"), capacity, *declared).where(
        limits.c.name == text_parameter("limit_name")
    )
    new = insert_or_skip(limits).from_select(["name", "capacity", *DECLARED], row)
    return new.on_conflict_do_update(
        index_elements=[limits.c.name], set_={"capacity": new.excluded.capacity}
    )


@cache
def all_limits() -> Executable:
    is_set = limits.c.capacity.is_not(None)
    rate = (span(limits.c.period), limits.c.burst)
    row = select(limits.c.name, limits.c.declared, _capacity(), is_set, *rate, limits.c.is_fair)
    return row.where(_is_in_force()).order_by(limits.c.name)


@cache
def held_by_key() -> Executable:
    """How many places are held under each key.  Reads all places."""
    state = _with_state(select(limit_places).subquery("place")).subquery("state")
    return (
        select(state.c.limit_key, count_rows()).where(state.c.is_held).group_by(state.c.limit_key)
    )


@cache
def waiting_by_keys() -> Executable:
    """How many jobs wait under the same keys.  Reads all waiting messages."""
    keys = waiting_messages.c.limit_keys
    return select(keys, count_rows()).group_by(keys)


def _declared() -> Insert:
    given = document(
        "given",
        column("name", Text),
        column("declared", Integer),
        column("is_strict", Boolean),
        column("skips_failed", Boolean),
        column("period", Float),
        column("burst", Integer),
        column("is_fair", Boolean),
    )
    period = seconds(given.c.period)
    declared = (period if name == "period" else given.c[name] for name in DECLARED)
    rows = select(given.c.name, *declared).order_by(given.c.name)
    return insert_or_skip(limits).from_select(["name", *DECLARED], rows)


def _capacity() -> ColumnElement[int]:
    """The capacity in force; at most 1 for a strict limit, whatever capacity was set."""
    capacity = func.coalesce(limits.c.capacity, limits.c.declared)
    return case((limits.c.is_strict, func.least(capacity, ONE)), else_=capacity)


def _is_in_force() -> ColumnElement[bool]:
    """False for the row of a key that has no capacity of its own any more."""
    is_of_key = pg.strpos(limits.c.name, literal_column("' '")) > literal_column("0")
    return or_(~is_of_key, limits.c.capacity.is_not(None))


def _lanes() -> Select[*tuple[Any, ...]]:
    """The lanes after the one in the parameters, each found by one step in the index."""
    after = tuple_(
        text_parameter("after_keys"),
        text_parameter("after_queue"),
        bindparam("after_priority", type_=SmallInteger),
    )
    columns = [waiting_messages.c[name] for name in LANE]
    ordered = select(*columns).order_by(*columns).limit(ONE)
    lane = ordered.where(tuple_(*columns) > after).subquery("first_lane").select()
    lanes = lane.cte("lanes", recursive=True)
    behind = tuple_(*columns) > tuple_(*(lanes.c[name] for name in LANE))
    following = ordered.where(behind).lateral("following")
    step: Select[*tuple[Any, ...]] = select(following).select_from(lanes.join(following, true()))
    return select(lanes.union_all(step))


def _with_state(place: Subquery | FromClause) -> Select[*tuple[Any, ...]]:
    """Places, and whether their jobs hold them, may go back and have started.

    The joins are outer joins, because a job may have been deleted.
    """
    job = (
        select(jobs.c.queue, jobs.c.priority, jobs.c.run_at, jobs.c.limit_keys)
        .where(jobs.c.id == place.c.job_id)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    message = (
        select(*(message_queue.c[name] for name in ("run_at", "queue", "task")))
        .where(*equal(message_queue, job, PLACE), message_queue.c.target_id == place.c.job_id)
        .limit(ONE)
        .lateral("message")
    )
    leased = exists().where(leases.c.target_id == place.c.job_id)
    later = message.c.run_at > pg.statement_timestamp()
    return select(
        place.c.limit_key,
        place.c.job_id,
        or_(leased, message.c.run_at.is_not(None)).label("is_held"),
        case((leased, false()), else_=func.coalesce(or_(later, _is_paused(message)), false())),
        job.c.limit_keys,
        leased.label("has_started"),
        job.c.queue,
        job.c.priority,
    ).select_from(place.outerjoin(job, true()).outerjoin(message, true()))


def _is_paused(message: FromClause) -> ColumnElement[bool]:
    return or_(message.c.queue == any_(PAUSED), message.c.task == any_(PAUSED_TASKS))


def _locked_jobs() -> Select[*tuple[Any, ...]]:
    """Those of these jobs that are unfinished, and the place of their messages.

    Locks the jobs, and skips jobs that other transactions have locked.
    """
    given = JOB_IDS.table_valued(column("id", BigInteger)).render_derived(name="given")
    job = (
        select(jobs.c.id, jobs.c.limit_keys, jobs.c.queue, jobs.c.priority, jobs.c.run_at)
        .where(jobs.c.id == given.c.id, jobs.c.outcome.is_(None))
        .with_for_update(key_share=True, skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("job")
    )
    return select(job).select_from(given.join(job, true()))


def _message_of(job: CTE, column: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
    return (
        select(column)
        .select_from(message_queue)
        .where(*equal(message_queue, job, PLACE), message_queue.c.target_id == job.c.id)
    )


def _places_of(taken: CTE) -> CTE:
    key = pg.unnest(pg.string_to_array(taken.c.limit_keys, NEWLINE))
    rows = select(key, taken.c.target_id)
    places = insert_or_skip(limit_places).from_select(["limit_key", "job_id"], rows)
    return places.on_conflict_do_nothing().cte("places")


def _places_left_by(gone: CTE, job: CTE) -> CTE:
    key = pg.unnest(pg.string_to_array(job.c.limit_keys, NEWLINE)).label("limit_key")
    left = (
        select(key, job.c.id).join_from(gone, job, job.c.id == gone.c.target_id).subquery("left_")
    )
    place = limit_places.c
    return (
        delete(limit_places)
        .where(and_(place.limit_key == left.c.limit_key, place.job_id == left.c.id))
        .cte("places")
    )
