"""Heartbeats of workers, and how other workers read them."""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Integer,
    Select,
    SmallInteger,
    Table,
    Text,
    Uuid,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import insert as insert_or_skip

from pgqueue.statements.batches import has_candidates
from pgqueue.statements.rescuing import catalog, died_lately, orphaned_leases
from pgqueue.statements.schedules import seconds_to_next_tick
from pgqueue.statements.tables import (
    clock,
    job_attempts,
    jobs,
    json_parameter,
    leases,
    paused_tasks,
    pg,
    queues,
    workers,
)

WORKER = bindparam("worker_id", type_=Uuid)
NO_QUEUES = cast(literal_column("'[]'", Text), JSONB)


@cache
def register_worker() -> Executable:
    """Insert the row of a new worker process."""
    row = insert_or_skip(workers).values(
        id=WORKER,
        hostname=bindparam("hostname", type_=Text),
        pid=bindparam("pid", type_=Integer),
        backend_pid=pg.pg_backend_pid(),
        queues=json_parameter("queues"),
        slots=bindparam("slots", type_=SmallInteger),
    )
    # The row exists if the answer to the first try was lost.
    return row.on_conflict_do_nothing()


@cache
def lock_presence() -> Executable:
    """A session-level lock, held until the connection ends, however it ends.

    Does not wait: after a reconnect the old connection may still exist for a while.
    """
    return select(pg.pg_try_advisory_lock(_lock_key(WORKER)))


@cache
def beat() -> Executable:
    """Write a heartbeat and read the other workers.  No row: this worker was declared dead.

    Uses no table but `workers`: a worker that waits for a lock on another table must not seem
    dead.  A lock that delays the heartbeats on `workers` also delays the reads, so no worker is
    declared dead meanwhile.  One row with a NULL id: there are no other workers.

    Each row also says whether the row of this worker names no queues: an operator has made it
    quiet.
    """
    beaten = (
        update(workers)
        .where(workers.c.id == WORKER, workers.c.dead_at.is_(None))
        .values(heartbeat_at=clock(), backend_pid=pg.pg_backend_pid())
        .returning((workers.c.queues == NO_QUEUES).label("is_quiet"))
        .cte("beaten")
    )
    others = _members().where(workers.c.id != WORKER).subquery("others")
    return select(beaten.c.is_quiet, others).select_from(beaten.outerjoin(others, true()))


@cache
def make_quiet() -> Executable:
    """Take all queues from the row of a live worker; its next heartbeat reads this."""
    return (
        update(workers)
        .where(workers.c.id == WORKER, workers.c.dead_at.is_(None))
        .values(queues=NO_QUEUES)
        .returning(workers.c.id)
    )


@cache
def deregister_worker() -> Executable:
    """Delete the row of a worker that has no leases left."""
    holds = exists().where(leases.c.worker_id == WORKER)
    return delete(workers).where(workers.c.id == WORKER, ~holds)


@cache
def all_workers() -> Executable:
    """Every worker not declared dead, with its last heartbeat and whether it holds its lock."""
    return _members()


def _members() -> Select[Any]:
    """Looks for the lock in the worker's backend: behind a pooler, another client may have
    inherited the lock of a dead one."""
    locks = catalog("pg_locks", "pid", "locktype", "classid", "objid", "granted")
    high_half = cast(locks.c.classid, BigInteger).op("<<")(literal_column("32"))
    lock_held = high_half.op("|")(cast(locks.c.objid, BigInteger))
    is_locked = exists().where(
        locks.c.pid == workers.c.backend_pid,
        locks.c.locktype == literal_column("'advisory'"),
        locks.c.granted,
        lock_held == _lock_key(workers.c.id),
    )
    return select(workers.c.id, workers.c.heartbeat_at, is_locked.label("is_locked")).where(
        workers.c.dead_at.is_(None)
    )


@cache
def leases_of() -> Executable:
    """The leases that this worker holds, according to the database."""
    return select(leases.c.target_id, leases.c.message_id, leases.c.attempt).where(
        leases.c.worker_id == WORKER
    )


@cache
def was_settled() -> Executable:
    """Whether a worker has settled an attempt: its lease is gone, and no rescue recorded a crash.

    NULL while a transaction that has deleted the lease is open and may still commit.
    """
    lease = select(leases.c.target_id).where(_is_the_attempt(leases, leases.c.target_id))
    stands = lease.with_for_update(skip_locked=True).exists()
    crashed = exists().where(
        _is_the_attempt(job_attempts, job_attempts.c.job_id),
        job_attempts.c.outcome == literal_column("'crashed'"),
    )
    return select(case((stands, false()), (lease.exists(), null()), else_=~crashed))


def _is_the_attempt(source: Table, job_id: ColumnElement[Any]) -> ColumnElement[bool]:
    return and_(
        job_id == bindparam("job_id", type_=BigInteger),
        source.c.message_id == bindparam("message_id", type_=BigInteger),
        source.c.attempt == bindparam("attempt", type_=SmallInteger),
        source.c.worker_id == WORKER,
    )


@cache
def terminate_backend() -> Executable:
    """End a server process of our own role; its transaction rolls back."""
    return select(pg.pg_terminate_backend(bindparam("pid", type_=Integer)))


@cache
def notices(*, running: bool, search: bool, ticks: bool = False) -> Executable:
    """What a worker must know: what is paused, and whether there is something to rescue.

    ``running``: also which of these running jobs were asked to cancel, or were already cancelled
    while they were being claimed.  ``search``: also whether dead workers have left a lease; this
    reads all leases.  ``ticks``: also how long the next tick of a schedule is away, and whether a
    batch may have ended.
    """
    ids = cast(bindparam("job_ids"), ARRAY(BigInteger))
    is_asked = or_(jobs.c.cancel_requested_at.is_not(None), jobs.c.outcome.is_not(None))
    asked = select(jobs.c.id).where(jobs.c.id == any_(ids), is_asked)
    orphans = orphaned_leases().exists()
    return select(
        _names(queues.c.name, queues.c.paused_at.is_not(None)).label("paused_queues"),
        _names(paused_tasks.c.task).label("paused_tasks"),
        func.array(asked.scalar_subquery()).label("cancelled") if running else null(),
        exists().where(died_lately()).label("has_died_lately"),
        (orphans if search else null()).label("has_orphans"),
        (seconds_to_next_tick() if ticks else null()).label("seconds_to_tick"),
        (has_candidates() if ticks else null()).label("has_batches"),
    )


def _names(name: ColumnElement[str], *conditions: ColumnElement[bool]) -> ColumnElement[str]:
    """These names, as the text of a JSON array."""
    names = func.coalesce(pg.jsonb_agg(name), literal_column("'[]'"))
    return cast(select(names).where(*conditions).scalar_subquery(), Text)


def _lock_key(worker_id: ColumnElement[Any]) -> ColumnElement[int]:
    return pg.hashtextextended(cast(worker_id, Text), literal_column("0"))
