"""Rescue: give back the leases of dead workers, and delete rows that are no longer needed.

Attempts end here only for workers that are declared dead or no longer exist.
:mod:`pgqueue.worker.rescuer` decides which workers are dead, by the time it has observed them.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
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
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.statements.settling import free_among, write_verdicts
from pgqueue.statements.tables import (
    clock,
    crash_words,
    leases,
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

    Skips leases that another rescuer works on.
    """
    # A transaction that has locked one job's row must not keep all others from being rescued.
    orphans = orphaned_leases().order_by(leases.c.target_id)
    unlocked = orphans.with_for_update(of=leases, skip_locked=True).cte("any_orphan")
    orphan = free_among(unlocked).limit(LIMIT).cte("orphan")
    lease = (
        delete(leases)
        .where(leases.c.target_id == orphan.c.target_id)
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


def catalog(name: str, *columns: str) -> TableClause:
    return table(name, *map(column, columns), schema="pg_catalog")


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
