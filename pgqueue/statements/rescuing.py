"""Rescue: give back what a dead worker held.

Only leases of workers that are declared dead, or that no longer exist, are touched; who is dead
is decided by witnessed time in :mod:`pgqueue.maintenance`.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    DateTime,
    Executable,
    Integer,
    Select,
    Text,
    Uuid,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.statements.settling import write_verdicts
from pgqueue.statements.tables import (
    clock,
    crash_words,
    leases,
    stands_at_place_of,
    workers,
)

LIMIT = bindparam("limit", type_=Integer)


@cache
def declare_dead() -> Executable:
    """Declare a worker dead, if it has not beaten since it was last seen.

    Waits for a beat in flight and then looks again, so a worker that revives is spared.
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


@cache
def has_died_lately() -> Executable:
    """Whether any worker was declared dead in the last ten seconds, by whomever."""
    lately = clock() - literal_column("interval '10 seconds'")
    return select(exists().where(workers.c.dead_at > lately))


@cache
def rescue_leases() -> Executable:
    """Record the attempts of dead workers as crashed; returns their jobs and how they stand.

    A lease that another rescuer works on is passed by.  Held leases are left alone: their
    messages come back by themselves when the server ends the transaction.
    """
    return _rescue(~leases.c.held)


@cache
def rescue_lost_messages() -> Executable:
    """Repair a held lease whose message is gone and whose owner is dead: damage, not a crash.

    The lease is locked first and its message looked for again, so a transaction that ended
    meanwhile is not taken for damage.
    """
    return _rescue(and_(leases.c.held, ~exists().where(stands_at_place_of(leases.c.target_id))))


def _rescue(condition: ColumnElement[bool]) -> Executable:
    orphan = _orphans(condition).limit(LIMIT).cte("orphan")
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
    return write_verdicts(lease)


@cache
def forget_workers() -> Executable:
    """Delete workers that have been dead for a day and hold nothing."""
    day_ago = clock() - literal_column("interval '1 day'")
    holds = exists().where(leases.c.worker_id == workers.c.id)
    return delete(workers).where(workers.c.dead_at < day_ago, ~holds)


def _orphans(condition: Any) -> Select[Any]:
    return (
        select(leases.c.target_id)
        .select_from(leases.outerjoin(workers, workers.c.id == leases.c.worker_id))
        .where(or_(workers.c.id.is_(None), workers.c.dead_at.is_not(None)), condition)
        .order_by(leases.c.target_id)
        .with_for_update(of=leases, skip_locked=True)
    )


def _crashed() -> list[Any]:
    """The verdict on every rescued attempt, in the columns that :func:`settling.settle` uses."""
    return [
        cast(null(), Text).label("ending"),
        cast(null(), Integer).label("delay"),
        literal_column("1").label("burned"),
        literal_column("0").label("snoozed"),
        cast(null(), JSONB).label("result"),
        *crash_words(),
        cast(null(), Text).label("traceback"),
    ]
