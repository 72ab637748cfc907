"""Rescue: give back the leases of dead workers, and delete rows that are no longer needed.

Attempts end here only for workers that are declared dead or no longer exist.
:mod:`pgqueue.worker.duties.rescue` decides which workers are dead, by the time it has observed
them.
"""

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.repository.settle import free_among, write_outcomes
from pgqueue.repository.tables import CRASH, Executor, clock, jobs, leases, sees_all, workers

LIMIT = sa.bindparam("limit", type_=sa.Integer)


@cache
def declare_dead() -> sa.Executable:
    """Declare a worker dead, if it has sent no heartbeat since it was last seen.

    Waits for a concurrent heartbeat and then checks again, so a worker that revives is spared.
    """
    return (
        sa.update(workers)
        .where(
            workers.c.id == sa.bindparam("dead_id", type_=sa.Uuid),
            workers.c.heartbeat_at == sa.bindparam("seen_at", type_=sa.DateTime(timezone=True)),
            workers.c.dead_at.is_(None),
        )
        .values(dead_at=clock())
        .returning(workers.c.id)
    )


def died_lately() -> sa.ColumnElement[bool]:
    """Whether any worker has declared this worker dead in the last ten seconds."""
    return workers.c.dead_at > clock() - sa.literal_column("interval '10 seconds'")


def orphaned_leases() -> sa.Select[Any]:
    """The leases of workers that are dead or no longer exist.

    None while row security hides workers, who would look as if they did not exist, or jobs.
    """
    return (
        sa.select(leases.c.target_id)
        .select_from(leases.outerjoin(workers, workers.c.id == leases.c.worker_id))
        .where(
            sa.or_(workers.c.id.is_(None), workers.c.dead_at.is_not(None)),
            sees_all(workers, jobs),
        )
    )


@cache
def rescue_leases() -> sa.Executable:
    """Record the attempts of dead workers as crashed; returns the jobs and their outcomes.

    Skips leases that another rescuer works on.
    """
    # A transaction that has locked one job's row must not keep all others from being rescued.
    orphans = orphaned_leases().order_by(leases.c.target_id)
    unlocked = orphans.with_for_update(of=leases, skip_locked=True).cte("any_orphan")
    orphan = free_among(unlocked).limit(LIMIT).cte("orphan")
    settled = (
        sa.delete(leases)
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
        .cte("settled")
    )
    return write_outcomes(settled, "task", "queue", "settled_attempt", "max_attempts", "meta")


def catalog(name: str, *columns: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns), schema="pg_catalog")


@cache
def forget_workers() -> sa.Executable:
    """Delete workers that have been dead for a day and have no leases."""
    day_ago = clock() - sa.literal_column("interval '1 day'")
    holds = sa.exists().where(leases.c.worker_id == workers.c.id)
    return sa.delete(workers).where(workers.c.dead_at < day_ago, ~holds, sees_all(leases))


def _crashed() -> list[Any]:
    """The outcome of every rescued attempt, in the columns that :func:`settle.settle` uses."""
    return [
        sa.false().label("waits"),
        sa.cast(sa.null(), sa.Text).label("job_outcome"),
        sa.cast(sa.null(), sa.Float).label("delay"),
        sa.literal_column("1").label("used_up"),
        sa.literal_column("0").label("snoozed"),
        sa.cast(sa.null(), sa.SmallInteger).label("max_interruptions"),
        sa.cast(sa.null(), JSONB).label("result"),
        sa.literal_column("'crashed'").label("attempt_end"),
        sa.literal_column(f"'{CRASH.type}'").label("error_type"),
        sa.literal(CRASH.message, sa.Text).label("error"),
        sa.literal_column(f"'{CRASH.fingerprint}'::bigint", sa.BigInteger).label("fingerprint"),
        sa.cast(sa.null(), sa.Text).label("traceback"),
        sa.cast(sa.null(), sa.Text).label("to_queue"),
        sa.cast(sa.null(), sa.SmallInteger).label("to_priority"),
    ]


class Rescued(NamedTuple):
    """An attempt of a dead worker that was recorded as crashed."""

    job_id: int
    outcome: str | None
    """How the job has ended; None if it goes on."""
    task: str
    queue: str
    attempt: int
    max_attempts: int
    meta: str | None


RESCUE_BATCH = 500


class SeenWorker(NamedTuple):
    """A worker as other workers see it."""

    id: UUID
    heartbeat_at: datetime
    is_locked: bool


class Rescues:
    """The dead workers, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def declare_dead(self, member: SeenWorker) -> bool:
        """Declare a worker dead unless it has sent a heartbeat since it was seen."""
        parameters = {"dead_id": member.id, "seen_at": member.heartbeat_at}
        return self._executor.execute(declare_dead(), parameters).first() is not None

    def rescue(self) -> list[Rescued]:
        """Give back a batch of the leases of dead workers; empty if none is left."""
        limit = {"limit": RESCUE_BATCH}
        return [Rescued(*row) for row in self._executor.execute(rescue_leases(), limit)]

    def forget_dead(self) -> None:
        self._executor.execute(forget_workers())
