"""Rescue: give back the leases of dead workers, and delete rows that are no longer needed.

Attempts end here only for workers that are declared dead or no longer exist.
:mod:`pgqueue.worker.rescuer` decides which workers are dead, by the time it has observed them.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    DateTime,
    Executable,
    Float,
    Integer,
    Select,
    SmallInteger,
    TableClause,
    Text,
    Uuid,
    and_,
    bindparam,
    cast,
    column,
    delete,
    exists,
    false,
    literal_column,
    null,
    or_,
    select,
    table,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.statements.settling import free_among, write_verdicts
from pgqueue.statements.tables import (
    AS_IT_STANDS,
    clock,
    crash_words,
    delete_unlocked,
    jobs,
    leases,
    message_queue,
    pg,
    stands_at_place_of,
    workers,
)

LIMIT = bindparam("limit", type_=Integer)


@cache
def declare_dead() -> Executable:
    """Declare a worker dead, if it has sent no heartbeat since it was last seen.

    Waits for a concurrent heartbeat and then checks again, so a worker that revives is spared.
    """
    return (
        update(workers)
        .where(
            workers.c.id == bindparam("dead_id", type_=Uuid),
            workers.c.heartbeat_at == bindparam("seen_at", type_=DateTime(timezone=True)),
            workers.c.dead_at.is_(None),
        )
        .values(dead_at=clock())
        .returning(workers.c.id)
    )


def died_lately() -> ColumnElement[bool]:
    """Whether any worker has declared this worker dead in the last ten seconds."""
    return workers.c.dead_at > clock() - literal_column("interval '10 seconds'")


def orphaned_leases() -> Select[Any]:
    """The leases of workers that are dead or no longer exist."""
    return (
        select(leases.c.target_id)
        .select_from(leases.outerjoin(workers, workers.c.id == leases.c.worker_id))
        .where(_is_orphan())
    )


@cache
def rescue_leases() -> Executable:
    """Record the attempts of dead workers as crashed; returns the jobs and their outcomes.

    Skips leases that another rescuer works on.  Leaves held leases alone: their messages become
    visible again when the transaction ends.
    """
    return _rescue(~leases.c.held)


@cache
def rescue_lost_messages() -> Executable:
    """Repair a held lease whose message is missing and whose owner is dead: damage, not a crash.

    Locks the lease first and checks the message again, so that a transaction which ended
    meanwhile is not mistaken for damage.
    """
    no_message = ~exists().where(stands_at_place_of(leases.c.target_id))
    return _rescue(and_(leases.c.held, and_(~exists().where(_is_own_message()), no_message)))


@cache
def drop_left_stamps() -> Executable:
    """Delete stamps that their jobs no longer need, even if the worker that made them lives.

    The job has ended, was deleted, or has a later message: a cancel came between the lock and the
    stamp, or the stamp came while another transaction committed the job's outcome.  A stamp that
    moves to the later message meanwhile is a new row version, and stays.
    """
    # One probe by key for each; an EXISTS could become a join that reads all jobs.
    job = select(jobs.c.id).where(jobs.c.id == leases.c.target_id, jobs.c.outcome.is_(None))
    later = exists().where(
        stands_at_place_of(leases.c.target_id), message_queue.c.id > leases.c.message_id
    )
    gone_on = and_(~exists().where(_is_own_message()), later)
    return delete_unlocked(leases, leases.c.held, or_(job.scalar_subquery().is_(None), gone_on))


@cache
def end_transactions() -> Executable:
    """End the transactions in which dead workers hold messages; returns the jobs.

    The server does not notice a frozen process, because its kernel still answers.
    """
    owner: ColumnElement[Any] = literal_column("message_queue.xmax").label("owner")
    owners = select(owner).select_from(message_queue).where(_is_own_message())
    message = owners.offset(AS_IT_STANDS).lateral("message")
    held = (
        select(leases.c.target_id, leases.c.started_at, message.c.owner)
        .select_from(
            leases.outerjoin(workers, workers.c.id == leases.c.worker_id).join(message, true())
        )
        .where(_is_orphan(), leases.c.held)
        .cte("held")
    )
    holder = _holder(held).lateral("holder")
    ended = pg.pg_terminate_backend(holder.c.pid)
    return select(held.c.target_id, ended).select_from(held.join(holder, true()))


def _is_own_message() -> ColumnElement[bool]:
    """The message for which a lease was stamped: one probe by the whole key.

    Statements probe it before :func:`stands_at_place_of`, which has no id and reads all messages
    due at the same moment: an application may have enqueued a million of them for eight o'clock.
    """
    return and_(stands_at_place_of(leases.c.target_id), message_queue.c.id == leases.c.message_id)


def _holder(held: CTE) -> Select[Any]:
    """The server process whose transaction has locked a message and was stamped for it.

    That transaction began before the stamp; any later holder of the message began after it.  The
    server hides the start times of other roles' transactions, so these processes are left alone.
    https://www.postgresql.org/docs/current/view-pg-locks.html
    """
    locks = catalog("pg_locks", "pid", "locktype", "transactionid", "granted")
    activity = catalog("pg_stat_activity", "pid", "xact_start", "usesysid")
    return (
        select(activity.c.pid)
        .select_from(locks.join(activity, activity.c.pid == locks.c.pid))
        .where(
            locks.c.locktype == literal_column("'transactionid'"),
            locks.c.transactionid == held.c.owner,
            locks.c.granted,
            activity.c.xact_start < held.c.started_at,
            pg.pg_has_role(activity.c.usesysid, "USAGE"),
        )
        .offset(AS_IT_STANDS)
    )


def catalog(name: str, *columns: str) -> TableClause:
    return table(name, *map(column, columns), schema="pg_catalog")


def _rescue(condition: ColumnElement[bool]) -> Executable:
    # A transaction that has locked one job's row must not keep all others from being rescued.
    orphans = orphaned_leases().where(condition).order_by(leases.c.target_id)
    unlocked = orphans.with_for_update(of=leases, skip_locked=True).cte("any_orphan")
    orphan = free_among(unlocked).limit(LIMIT).cte("orphan")
    lease = (
        delete(leases)
        .where(leases.c.target_id == orphan.c.target_id, condition)
        .returning(
            leases.c.target_id,
            leases.c.message_id,
            leases.c.attempt,
            (leases.c.crashes + 1).label("crashes"),
            leases.c.worker_id,
            leases.c.started_at,
            *_crashed(),
        )
        .cte("lease")
    )
    return write_verdicts(lease, "task", "queue", "lease_attempt", "max_attempts")


@cache
def forget_workers() -> Executable:
    """Delete workers that have been dead for a day and have no leases."""
    day_ago = clock() - literal_column("interval '1 day'")
    holds = exists().where(leases.c.worker_id == workers.c.id)
    return delete(workers).where(workers.c.dead_at < day_ago, ~holds)


def _is_orphan() -> ColumnElement[bool]:
    return or_(workers.c.id.is_(None), workers.c.dead_at.is_not(None))


def _crashed() -> list[Any]:
    """The outcome of every rescued attempt, in the columns that :func:`settling.settle` uses."""
    return [
        false().label("waits"),
        cast(null(), Text).label("ending"),
        cast(null(), Float).label("delay"),
        literal_column("1").label("burned"),
        literal_column("0").label("snoozed"),
        cast(null(), SmallInteger).label("max_interruptions"),
        cast(null(), JSONB).label("result"),
        *crash_words(),
        cast(null(), Text).label("traceback"),
    ]
