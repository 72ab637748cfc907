"""Settle: write the outcome of an attempt, if the lease is still ours.

Every write of a worker begins at the fence (:mod:`pgqueue.statements.fencing`), which deletes the
leases.  Everything else is derived from the deleted leases, so a worker that has lost its lease
changes nothing.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Float,
    FromClause,
    Integer,
    Select,
    SmallInteger,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    extract,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.sql.selectable import CTE, LateralFromClause, TableValuedAlias

from pgqueue.statements import fencing
from pgqueue.statements.follow_ups import follow_up_messages
from pgqueue.statements.tables import (
    AS_IT_STANDS,
    CANCELLED,
    FAILED,
    NEWLINE,
    PLACE,
    SUCCEEDED,
    among,
    array_parameter,
    clock,
    count_rows,
    dead_letters,
    deleted_records,
    document,
    equal,
    has_key_of_period,
    job_attempts,
    jobs,
    key_after_success,
    leases,
    limits,
    message_queue,
    pg,
    seconds,
    unreadable_jobs,
    waiting_messages,
)
from pgqueue.statements.transactions import CHECK_CONSTRAINTS

MOST_SNOOZES = literal_column("32767", Integer)
HALF = literal_column("CAST(0.5 AS FLOAT)", Float)
SHORTEST_PAUSE = literal_column("CAST(5 AS FLOAT)", Float)
LONGEST_PAUSE = literal_column("CAST(60 AS FLOAT)", Float)
BURNED = literal_column("1", SmallInteger)
ONE_ATTEMPT = cast(literal_column("1"), SmallInteger)
KEPT = cast(literal_column("0"), SmallInteger)
ONE = literal_column("1", Integer)
SPACE = cast(literal_column("' '", Text), Text)
"""After the name of a limit in a key."""
VERDICT = (
    column("target_id", BigInteger),
    column("message_id", BigInteger),
    column("attempt", SmallInteger),
    column("ending", Text),
    column("delay", Float),
    column("give_up_after", Float),
    column("burned", SmallInteger),
    column("crashed", SmallInteger),
    column("snoozed", SmallInteger),
    column("max_interruptions", SmallInteger),
    column("max_unreadable", Float),
    column("result", JSONB),
    column("end", Text),
    column("error_type", Text),
    column("error", Text),
    column("traceback", Text),
)
"""How an attempt has ended, as its worker says it."""
ERROR = ("error_type", "error", "traceback")
LAST_INTERRUPTION = literal_column("' The job has reached max_interruptions = '", Text)


@cache
def settle() -> Executable:
    """Settle a batch of attempts, each as its document says; returns those that were ours."""
    given = document("verdicts", *VERDICT)
    gone = fencing.deleted_leases(given)
    same_lease = and_(*equal(given, gone, ("target_id", "message_id", "attempt")))
    # A crash of the child process counts as a crash of the worker: the job is then claimed alone.
    crashes = (gone.c.crashes + given.c.crashed).label("crashes")
    others = [column for column in gone.c if column.name != "crashes"]
    unreadable = _unreadable_since(given)
    too_late = _is_too_late(given, gone)
    as_given = (given.c[name] for name in ("snoozed", "max_interruptions", "result", *ERROR))
    verdict = (*as_given, *_verdict_or_wait(given, unreadable.c.since, too_late))
    ours = gone.join(given, same_lease).outerjoin(unreadable, true())
    return write_verdicts(select(*others, crashes, *verdict).select_from(ours).cte("lease"))


@cache
def settle_succeeded() -> Executable:
    """The common case of :func:`settle`, with less work: success without a result.

    Returns one row: how many were ours; which of them ended as cancelled; and, if not all were
    ours, which were.  The arrays are sent as text: psycopg would adapt each item.
    """
    job = _succeeded_jobs(fencing.deleted_leases(_given_successes()))
    ours = count_rows()
    cancelled = pg.jsonb_agg(job.c.id).filter(job.c.outcome == CANCELLED)
    settled = case((ours != bindparam("expected", type_=Integer), pg.jsonb_agg(job.c.id)))
    return (
        select(ours, cast(cancelled, Text), cast(settled, Text))
        .select_from(job)
        .add_cte(_dead_letters_of(job))
    )


@cache
def settle_one_success() -> Executable:
    """End one successful attempt in its handler's transaction; no row if it was not ours."""
    job = _succeeded_jobs(fencing.deleted_lease())
    return select(job.c.id, job.c.outcome).add_cte(_dead_letters_of(job))


@cache
def delete_succeeded() -> Executable:
    """Delete jobs that have succeeded and are not kept; returns those that were deleted.

    Leaves other jobs to the ordinary settle: those that are not ours, were asked to cancel, or keep
    the key of a period.  Locks the leases before the jobs, as everywhere, so that a cancel that was
    requested meanwhile is seen.
    """
    given = _given_successes()
    ours = (
        select(leases.c.target_id)
        .where(fencing.is_ours(given.c.target_id, given.c.message_id, given.c.attempt))
        .with_for_update()
        .offset(AS_IT_STANDS)
        .lateral("ours")
    )
    lease = select(ours.c.target_id).select_from(given.join(ours, true())).cte("lease")
    job = (
        delete(jobs)
        .where(
            jobs.c.id == lease.c.target_id,
            jobs.c.outcome.is_(None),
            jobs.c.cancel_requested_at.is_(None),
            has_key_of_period().is_not(true()),
        )
        .returning(jobs.c.id)
        .cte("job")
    )
    ids = among(select(job.c.id))
    gone = delete(leases).where(leases.c.target_id == ids).cte("gone")
    return select(job.c.id).add_cte(gone, *deleted_records(job))


def check_constraints() -> Executable:
    """Check deferred constraints, such as a foreign key to a job that was just deleted."""
    return text(CHECK_CONSTRAINTS)


@cache
def free_jobs() -> Executable:
    """Which of these jobs no other transaction has locked at this moment."""
    ids = pg.unnest(array_parameter("target_ids", BigInteger))
    given = ids.table_valued(column("target_id", BigInteger)).render_derived(name="given")
    return free_among(given)


def free_among(given: FromClause) -> Select[Any]:
    """Those of these jobs that can be updated without waiting for another transaction.

    Another transaction may have cancelled a job and not committed yet.  Locks the free jobs, with
    one probe by key for each.  A deleted job counts as free.
    """
    job = select(jobs.c.id).where(jobs.c.id == given.c.target_id)
    unlocked = job.with_for_update(key_share=True, skip_locked=True).offset(AS_IT_STANDS)
    free = unlocked.lateral("free")
    return (
        select(given.c.target_id)
        .select_from(given.outerjoin(free, true()))
        .where(or_(free.c.id.is_not(None), job.scalar_subquery().is_(None)))
    )


_KEY_ARRAYS = (("target_ids", BigInteger), ("message_ids", BigInteger), ("attempts", SmallInteger))


def _given_successes() -> TableValuedAlias:
    return (
        # unnest with several arrays is syntax, and takes no schema name.
        func.unnest(*(array_parameter(name, kind) for name, kind in _KEY_ARRAYS))
        .table_valued(
            column("target_id", BigInteger),
            column("message_id", BigInteger),
            column("attempt", SmallInteger),
        )
        .render_derived(name="given")
    )


def _succeeded_jobs(lease: CTE) -> CTE:
    return (
        update(jobs)
        .where(jobs.c.id == lease.c.target_id, jobs.c.outcome.is_(None))
        .values(
            outcome=case((jobs.c.cancel_requested_at.is_(None), SUCCEEDED), else_=CANCELLED),
            attempts=lease.c.attempt,
            last_error=null(),
            started_at=lease.c.started_at,
            finished_at=clock(),
            held_unique_key=case((jobs.c.cancel_requested_at.is_(None), key_after_success())),
        )
        .returning(jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
        .cte("job")
    )


def write_verdicts(lease: CTE, *more: str) -> Executable:
    """Apply the outcomes of these deleted leases: the only place where they are written.

    Returns each job and its outcome, and ``more`` of its columns.

    The job's row decides: a job that has ended meanwhile keeps its outcome.  Three rules hold for
    every outcome: a requested cancel takes precedence; a last attempt that was used up fails the
    job; and a job that goes on gets a message here, or a waiting message if its next start counts
    under a rate.  The follow-up of a job that fails is enqueued here.
    """
    job = (
        update(jobs)
        .where(jobs.c.id == lease.c.target_id, jobs.c.outcome.is_(None))
        .values(
            outcome=_ending(lease),
            attempts=_attempts(lease),
            snoozes=_snoozes(lease),
            interruptions=_interruptions(lease),
            run_at=_next_run_at(lease),
            result=lease.c.result,
            last_error=_last_error(lease),
            started_at=case((lease.c.burned == BURNED, lease.c.started_at)),
            finished_at=case((_ending(lease).is_not(None), clock())),
            held_unique_key=_held_key(lease),
        )
        .returning(
            *jobs.c,
            *(column.label(f"lease_{column.name}") for column in lease.c),
            _next_start_counts().label("next_start_counts"),
        )
        .cte("job")
    )
    return (
        select(job.c.id, job.c.outcome, *(job.c[name] for name in more))
        .add_cte(_next_messages_of(job), _waiting_messages_of(job))
        .add_cte(_bad_attempts_of(job), _dead_letters_of(job))
        .add_cte(follow_up_messages(job))
        .add_cte(_unreadable_jobs_of(job), _readable_jobs_of(job))
    )


def _ending(lease: CTE) -> ColumnElement[Any]:
    used_up = and_(lease.c.burned == BURNED, lease.c.attempt >= jobs.c.max_attempts)
    return case(
        (jobs.c.cancel_requested_at.is_not(None), CANCELLED),
        (lease.c.ending.is_not(None), lease.c.ending),
        (used_up, FAILED),
        (_is_last_interruption(lease), FAILED),
    )


def _held_key(lease: CTE) -> ColumnElement[Any]:
    ending = _ending(lease)
    return case(
        (ending.is_(None), jobs.c.held_unique_key), (ending == SUCCEEDED, key_after_success())
    )


def _is_last_interruption(lease: CTE) -> ColumnElement[bool]:
    """NULL, which counts as false, if the attempt was not interrupted."""
    return cast(jobs.c.interruptions, Integer) + ONE >= lease.c.max_interruptions


def _attempts(lease: CTE) -> ColumnElement[Any]:
    """At most max_attempts: the attempt that only finds the job exhausted may crash too."""
    return func.least(lease.c.attempt - 1 + lease.c.burned, jobs.c.max_attempts)


def _last_error(lease: CTE) -> ColumnElement[Any]:
    """NULL after a successful attempt; earlier attempts keep their errors on record."""
    kept = case((lease.c.ending.is_distinct_from(SUCCEEDED), jobs.c.last_error))
    interrupted = pg.concat(lease.c.error, LAST_INTERRUPTION, lease.c.max_interruptions)
    return func.coalesce(case((_is_last_interruption(lease), interrupted)), lease.c.error, kept)


def _snoozes(lease: CTE) -> ColumnElement[Any]:
    """Limited: a job that snoozes for ever must not fail when the counter reaches its maximum."""
    return func.least(cast(jobs.c.snoozes, Integer) + lease.c.snoozed, MOST_SNOOZES)


def _interruptions(lease: CTE) -> ColumnElement[Any]:
    return case(
        (lease.c.max_interruptions.is_not(None), cast(jobs.c.interruptions, Integer) + ONE),
        else_=jobs.c.interruptions,
    )


def _next_run_at(lease: CTE) -> ColumnElement[Any]:
    """Without a delay the job keeps its run_at: a new one would put it behind the backlog."""
    again = and_(_ending(lease).is_(None), lease.c.delay.is_not(None))
    return case((again, clock() + seconds(lease.c.delay)), else_=jobs.c.run_at)


def _next_messages_of(job: CTE) -> CTE:
    """The messages of jobs that go on.

    A job that crashed before, has only one attempt, or has places in limits is not claimed ahead
    of a slot.
    """
    alone = or_(job.c.lease_crashes > 0, job.c.max_attempts == 1, job.c.limit_keys.is_not(None))
    names = (*PLACE, "id", "task", "attempts", "lease_crashes")
    rows = select(*(job.c[name] for name in names), alone).where(
        job.c.outcome.is_(None), job.c.next_start_counts.is_not(true())
    )
    columns = [*PLACE, "target_id", "task", "attempt", "crashes", "alone"]
    return insert(message_queue).from_select(columns, rows).cte("next_message")


def _waiting_messages_of(job: CTE) -> CTE:
    names = ("limit_keys", *PLACE, "id", "task", "attempts", "lease_crashes")
    rows = select(*(job.c[name] for name in names)).where(
        job.c.outcome.is_(None), job.c.next_start_counts
    )
    columns = [*names[:4], "target_id", "task", "attempt", "crashes"]
    return insert(waiting_messages).from_select(columns, rows).cte("waiting_message")


def _next_start_counts() -> ColumnElement[bool | None]:
    """Whether a job is under a rate, so that it must be admitted again before it starts again.

    A job that is also under a strict limit stays where it is: others would overtake it.  CASE
    reads no limit for a job without limits.
    """
    key = pg.unnest(pg.string_to_array(jobs.c.limit_keys, NEWLINE)).column_valued("key")
    names = select(pg.split_part(key, SPACE, ONE, type_=Text))
    counts = and_(pg.bool_or(limits.c.period.is_not(None)), ~pg.bool_or(limits.c.is_strict))
    known = select(counts).where(limits.c.name == among(names))
    return case((jobs.c.limit_keys.is_not(None), known.scalar_subquery()))


def _bad_attempts_of(job: CTE) -> CTE:
    names = ("message_id", "attempt", "end", *ERROR, "worker_id", "started_at")
    rows = select(job.c.id, *(job.c[f"lease_{name}"] for name in names), clock()).where(
        job.c.lease_end.is_not(None)
    )
    columns = ["outcome" if name == "end" else name for name in names]
    attempts = insert_or_skip(job_attempts).from_select(["job_id", *columns, "finished_at"], rows)
    attempts = attempts.on_conflict_do_nothing()
    return attempts.cte("bad_attempt")


def _dead_letters_of(job: CTE) -> CTE:
    rows = select(job.c.id, job.c.outcome, job.c.queue, job.c.task, job.c.finished_at).where(
        job.c.outcome.in_([FAILED, CANCELLED])
    )
    columns = ["job_id", "outcome", "queue", "task", "finished_at"]
    letters = insert_or_skip(dead_letters).from_select(columns, rows).on_conflict_do_nothing()
    return letters.cte("letter")


def _unreadable_jobs_of(job: CTE) -> CTE:
    """Record that jobs wait because they are unreadable; a job recorded before keeps its time."""
    rows = select(job.c.id, job.c.task, job.c.lease_error).where(
        job.c.lease_waits, job.c.outcome.is_(None)
    )
    unreadable = insert_or_skip(unreadable_jobs).from_select(["job_id", "task", "reason"], rows)
    return unreadable.on_conflict_do_nothing().cte("unreadable")


def _readable_jobs_of(job: CTE) -> CTE:
    """Forget that jobs were unreadable, once an attempt has started or the job has ended.

    Probes by key: a join might read the whole table.
    """
    has_started = or_(job.c.lease_burned == BURNED, job.c.lease_snoozed == ONE)
    was_interrupted = job.c.lease_max_interruptions.is_not(None)
    ids = select(job.c.id).where(or_(has_started, was_interrupted, job.c.outcome.is_not(None)))
    return delete(unreadable_jobs).where(unreadable_jobs.c.job_id == among(ids)).cte("readable")


def _unreadable_since(given: Any) -> LateralFromClause:
    """Since when the arguments of a job have been unreadable, if that is recorded.

    OFFSET keeps the planner from joining in another order: one probe by key for each such job.
    """
    row = select(unreadable_jobs.c.since).where(
        unreadable_jobs.c.job_id == given.c.target_id, given.c.max_unreadable.is_not(None)
    )
    return row.offset(AS_IT_STANDS).lateral("met")


def _is_too_late(given: Any, lease: CTE) -> ColumnElement[bool]:
    """Whether the next attempt would start too late after the first one; NULL without a limit.

    A requeued job has older first attempts on record, so the latest one counts.  Probed by key,
    and only if there is a limit: CASE evaluates no other branch.
    """
    first = select(pg.max(job_attempts.c.started_at)).where(
        job_attempts.c.job_id == given.c.target_id, job_attempts.c.attempt == ONE_ATTEMPT
    )
    began = case(
        (lease.c.attempt == ONE_ATTEMPT, lease.c.started_at),
        else_=func.coalesce(first.scalar_subquery(), lease.c.started_at),
    )
    late = clock() + seconds(given.c.delay) > began + seconds(given.c.give_up_after)
    return case((given.c.give_up_after.is_not(None), late))


def _verdict_or_wait(
    given: Any, since: ColumnElement[Any], too_late: ColumnElement[bool]
) -> list[ColumnElement[Any]]:
    """The rest of the verdict, or a wait if the job is unreadable.

    The document says that an unreadable job fails.  Until ``max_unreadable`` has passed, the job
    waits instead: half of the time it has been unreadable, from 5 seconds to a minute.
    """
    now = pg.statement_timestamp()
    waited = now - func.coalesce(since, now)
    waits = waited < seconds(given.c.max_unreadable)
    half = cast(extract("epoch", waited), Float) * HALF
    pause = func.least(func.greatest(half, SHORTEST_PAUSE), LONGEST_PAUSE)
    return [
        waits.label("waits"),
        case((waits, pause), else_=given.c.delay).label("delay"),
        case((waits, KEPT), else_=given.c.burned).label("burned"),
        case((waits, null()), (too_late, FAILED), else_=given.c.ending).label("ending"),
        case((waits, null()), else_=given.c.end).label("end"),
    ]
