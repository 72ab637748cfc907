"""Workers: their heartbeats, what they read about each other, and what an operator reads."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.batches import has_due_count, has_past_deadline
from pgqueue.repository.blocked import sweep
from pgqueue.repository.health import LONGEST_SILENCE
from pgqueue.repository.reading import moment, span
from pgqueue.repository.rescue import (
    Rescues,
    SeenWorker,
    catalog,
    died_lately,
    orphaned_leases,
)
from pgqueue.repository.schedules import seconds_to_next_tick
from pgqueue.repository.signals import has_signals
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    clock,
    jobs,
    json_parameter,
    leases,
    paused_tasks,
    pg,
    queues,
    sees_all,
    workers,
)
from pgqueue.rules.served_queues import paused_among

WORKER = sa.bindparam("worker_id", type_=sa.Uuid)
NO_QUEUES = sa.cast(sa.literal_column("'[]'", sa.Text), JSONB)


@cache
def register_worker() -> sa.Executable:
    """Insert the row of a new worker process."""
    row = pg_insert(workers).values(
        id=WORKER,
        hostname=sa.bindparam("hostname", type_=sa.Text),
        pid=sa.bindparam("pid", type_=sa.Integer),
        backend_pid=pg.pg_backend_pid(),
        queues=json_parameter("queues"),
        slots=sa.bindparam("slots", type_=sa.SmallInteger),
        version=sa.bindparam("version", type_=sa.Text),
    )
    # The row exists if the answer to the first try was lost.
    return row.on_conflict_do_nothing()


@cache
def lock_presence() -> sa.Executable:
    """A session-level lock, held until the connection ends, however it ends.

    Does not wait: after a reconnect the old connection may still exist for a while.
    """
    return sa.select(pg.pg_try_advisory_lock(_lock_key(WORKER)))


@cache
def beat() -> sa.Executable:
    """Write a heartbeat and read the other workers.  No row: this worker was declared dead.

    Uses no table but `workers`: a worker that waits for a lock on another table must not seem
    dead.  A lock that delays the heartbeats on `workers` also delays the reads, so no worker is
    declared dead meanwhile.  One row with a NULL id: there are no other workers.

    Each row also says whether the row of this worker names no queues: an operator has made it
    quiet.
    """
    beaten = (
        sa.update(workers)
        .where(workers.c.id == WORKER, workers.c.dead_at.is_(None))
        .values(
            heartbeat_at=clock(),
            backend_pid=pg.pg_backend_pid(),
            attempts_ended=sa.bindparam("attempts_ended", type_=sa.BigInteger),
        )
        .returning((workers.c.queues == NO_QUEUES).label("is_quiet"))
        .cte("beaten")
    )
    others = _members().where(workers.c.id != WORKER).subquery("others")
    return sa.select(beaten.c.is_quiet, others).select_from(beaten.outerjoin(others, sa.true()))


@cache
def make_quiet() -> sa.Executable:
    """Take all queues from the row of a live worker; its next heartbeat reads this."""
    return (
        sa.update(workers)
        .where(workers.c.id == WORKER, workers.c.dead_at.is_(None))
        .values(
            queues=NO_QUEUES,
            withheld_queues=sa.func.coalesce(workers.c.withheld_queues, workers.c.queues),
        )
        .returning(workers.c.id)
    )


@cache
def end_quiet() -> sa.Executable:
    """Give a live worker its queues back; its next heartbeat reads this."""
    return (
        sa.update(workers)
        .where(workers.c.id == WORKER, workers.c.dead_at.is_(None))
        .values(
            queues=sa.func.coalesce(workers.c.withheld_queues, workers.c.queues),
            withheld_queues=sa.null(),
        )
        .returning(workers.c.id)
    )


@cache
def deregister_worker() -> sa.Executable:
    """Delete the row of a worker that has no leases left."""
    holds = sa.exists().where(leases.c.worker_id == WORKER)
    return sa.delete(workers).where(workers.c.id == WORKER, ~holds, sees_all(leases))


@cache
def all_workers() -> sa.Executable:
    """Every worker not declared dead, with its last heartbeat and whether it holds its lock."""
    return _members()


def _members() -> sa.Select[Any]:
    """Looks for the lock in the worker's backend: behind a pooler, another client may have
    inherited the lock of a dead one."""
    locks = catalog("pg_locks", "pid", "locktype", "classid", "objid", "granted")
    high_half = sa.cast(locks.c.classid, sa.BigInteger).op("<<")(sa.literal_column("32"))
    lock_held = high_half.op("|")(sa.cast(locks.c.objid, sa.BigInteger))
    is_locked = sa.exists().where(
        locks.c.pid == workers.c.backend_pid,
        locks.c.locktype == sa.literal_column("'advisory'"),
        locks.c.granted,
        lock_held == _lock_key(workers.c.id),
    )
    return sa.select(workers.c.id, workers.c.heartbeat_at, is_locked.label("is_locked")).where(
        workers.c.dead_at.is_(None)
    )


@cache
def live_workers() -> sa.Executable:
    """The workers not declared dead and the jobs that they hold, the oldest first."""
    job = (
        sa.select(jobs.c.task, jobs.c.queue)
        .where(jobs.c.id == leases.c.target_id)
        .offset(AS_IT_STANDS)  # by key: all of `jobs` is not hashed for a few leases
        .lateral("job")
    )
    worker = (workers.c.id, workers.c.hostname, workers.c.pid, workers.c.queues, workers.c.slots)
    age = span(clock() - workers.c.heartbeat_at)
    held = (leases.c.target_id, job.c.task, job.c.queue, leases.c.attempt)
    lives = (moment(workers.c.started_at), age, workers.c.attempts_ended, workers.c.version)
    return (
        sa.select(*worker, *lives, *held, moment(leases.c.started_at))
        .select_from(
            workers.outerjoin(leases, leases.c.worker_id == workers.c.id).outerjoin(job, sa.true())
        )
        .where(workers.c.dead_at.is_(None))
        .order_by(workers.c.started_at, workers.c.id, leases.c.started_at, leases.c.target_id)
    )


@cache
def leases_of() -> sa.Executable:
    """The leases that this worker holds, according to the database."""
    return sa.select(leases.c.target_id, leases.c.message_id, leases.c.attempt).where(
        leases.c.worker_id == WORKER
    )


@cache
def terminate_backend() -> sa.Executable:
    """End a server process of our own role; its transaction rolls back."""
    return sa.select(pg.pg_terminate_backend(sa.bindparam("pid", type_=sa.Integer)))


@cache
def notices(
    *, running: bool, search: bool, ticks: bool = False, sweeps: bool = False
) -> sa.Executable:
    """What a worker must know: what is paused, and whether there is something to rescue.

    ``running``: also which of these running jobs were asked to cancel, or were already cancelled
    while they were being claimed, and which of them to kill.  ``search``: also whether dead workers
    have left a lease; this reads all leases.  ``ticks``: also how long the next tick of a schedule
    is away, whether a batch is to be counted, and whether signals are to be delivered.  ``sweeps``:
    also which watches of blocked nodes are over.
    """
    over, swept_to = sweep() if sweeps else (sa.null(), sa.null())
    ids = sa.cast(sa.bindparam("job_ids"), ARRAY(sa.BigInteger))
    is_asked = sa.or_(jobs.c.cancel_requested_at.is_not(None), jobs.c.outcome.is_not(None))
    asked = sa.select(jobs.c.id).where(jobs.c.id == sa.any_(ids), is_asked)
    killed = asked.where(jobs.c.kill_requested_at.is_not(None))
    orphans = orphaned_leases().exists()
    return sa.select(
        _names(queues.c.name, queues.c.paused_at.is_not(None)).label("paused_queues"),
        _names(paused_tasks.c.task).label("paused_tasks"),
        sa.func.array(asked.scalar_subquery()).label("cancelled") if running else sa.null(),
        sa.func.array(killed.scalar_subquery()).label("killed") if running else sa.null(),
        sa.exists().where(died_lately()).label("has_died_lately"),
        (orphans if search else sa.null()).label("has_orphans"),
        (seconds_to_next_tick() if ticks else sa.null()).label("seconds_to_tick"),
        over.label("over"),
        swept_to.label("swept_to"),
        (has_due_count() if ticks else sa.null()).label("has_due_count"),
        (has_past_deadline() if ticks else sa.null()).label("has_past_deadline"),
        (has_signals() if ticks else sa.null()).label("has_signals"),
    )


def _names(
    name: sa.ColumnElement[str], *conditions: sa.ColumnElement[bool]
) -> sa.ColumnElement[str]:
    """These names, as the text of a JSON array."""
    names = sa.func.coalesce(pg.jsonb_agg(name), sa.literal_column("'[]'"))
    return sa.cast(sa.select(names).where(*conditions).scalar_subquery(), sa.Text)


def _lock_key(worker_id: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return pg.hashtextextended(sa.cast(worker_id, sa.Text), sa.literal_column("0"))


class Beat(NamedTuple):
    """What a heartbeat has read."""

    others: list[SeenWorker]
    is_quiet: bool
    """Whether an operator wants this worker to claim nothing more."""


class Paused(NamedTuple):
    """The names of what operators have paused."""

    queues: Collection[str] = ()
    """Ask with ``in``: if all queues are paused, each is among them."""
    tasks: Collection[str] = ()


NOTHING_PAUSED = Paused()


class Notices(NamedTuple):
    """What a worker must know of operators' calls and of other workers."""

    paused: Paused
    cancelled: set[int]
    """Those of its running jobs that were asked to cancel."""
    killed: set[int]
    """Those of them whose handlers must be killed."""
    has_died_lately: bool
    """Whether workers declared dead just now may have leases to rescue."""
    has_orphans: bool | None
    """Whether dead workers have left leases; None if the search was not requested."""
    seconds_to_tick: float | None
    """How long the next tick of a schedule is away; None if there is none, or it was not asked."""
    over: Sequence[int] | None
    """The nodes that others watch, and that have ended; None if it was not asked."""
    swept_to: int | None
    """Up to where all that watch one were read; None at the end."""
    has_due_count: bool | None
    """Whether a batch is to be counted; None if it was not asked."""
    has_past_deadline: bool | None
    """Whether the deadline of an open batch is over; None if it was not asked."""
    has_signals: bool | None
    """Whether signals are to be delivered; None if it was not asked."""


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a worker has claimed."""

    job_id: int
    task: str | None
    queue: str | None
    attempt: int
    since: datetime
    """When the worker claimed it: a job claimed ahead of the slots has not started yet."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that was not declared dead, as read by :meth:`PgQueue.workers`.

    Only another worker declares a worker dead; :attr:`is_live` tells whether it sends heartbeats.
    """

    id: UUID
    hostname: str
    pid: int
    queues: tuple[str, ...]
    """Empty for a quiet worker, which claims no more jobs."""
    slots: int
    started_at: datetime
    heartbeat_age: timedelta
    attempts_ended: int
    """How many attempts the process had ended at its last heartbeat."""
    version: str | None
    """Of the application, as ``PgQueue(version=...)`` names it; None if the worker has none."""
    jobs: tuple[HeldJob, ...]
    """Those that it runs or has claimed ahead, in the order of their claims."""

    @property
    def is_live(self) -> bool:
        """Whether its last heartbeat is younger than a minute."""
        return self.heartbeat_age.total_seconds() < LONGEST_SILENCE

    @property
    def is_quiet(self) -> bool:
        return not self.queues

    @property
    def claimed_ahead(self) -> int:
        """How many of its jobs at least wait for a slot: no lease says whether its job has
        started."""
        return max(0, len(self.jobs) - self.slots)


class Workers(Rescues):
    """All workers, behind one Session or Connection; the dead ones are rescued below."""

    def register(
        self,
        worker_id: UUID,
        *,
        hostname: str,
        pid: int,
        queues: Sequence[str],
        slots: int,
        version: str | None = None,
    ) -> None:
        """Insert a new worker's row."""
        row = {
            "worker_id": worker_id,
            "hostname": hostname,
            "pid": pid,
            "queues": json.dumps(list(queues)),
            "slots": slots,
            "version": version,
        }
        self._executor.execute(register_worker(), row)

    def lock_presence(self, worker_id: UUID) -> bool:
        """Take the lock that ends with this connection; False if another connection has it."""
        return bool(self._executor.execute(lock_presence(), {"worker_id": worker_id}).scalar())

    def beat(self, worker_id: UUID, *, attempts_ended: int = 0) -> Beat | None:
        """Write a heartbeat; returns what it has read, or None for a worker declared dead."""
        parameters = {"worker_id": worker_id, "attempts_ended": attempts_ended}
        rows = list(self._executor.execute(beat(), parameters))
        if not rows:
            return None
        others = [SeenWorker(*other) for _, *other in rows if other[0] is not None]
        return Beat(others, is_quiet=rows[0][0])

    def make_quiet(self, worker_id: UUID) -> bool:
        """Take all queues from a worker; False if there is no such worker."""
        found = self._executor.execute(make_quiet(), {"worker_id": worker_id})
        return found.first() is not None

    def end_quiet(self, worker_id: UUID) -> bool:
        """Give a worker its queues back; False if there is no such worker."""
        return self._executor.execute(end_quiet(), {"worker_id": worker_id}).first() is not None

    def notices(
        self,
        *,
        running: Sequence[int],
        search: bool,
        scheduled: str | None = None,
        sweeps: bool = False,
        swept_to: int | None = None,
    ) -> Notices:
        """Read pauses, cancels and deaths; with ``search``, also orphaned leases.

        ``scheduled``: tasks whose next tick to look up, as ``array_of`` names them; then batches
        and signals are looked up too.  ``sweeps``: blocked nodes are too, from where the last sweep
        has ended.
        """
        has_ticks = scheduled is not None
        statement = notices(running=bool(running), search=search, ticks=has_ticks, sweeps=sweeps)
        parameters: dict[str, Any] = {"job_ids": list(running)} if running else {}
        if has_ticks:
            parameters["tasks"] = scheduled
        if sweeps:
            parameters["swept_to"] = swept_to
        queues, tasks, cancelled, killed, *found = self._executor.execute(
            statement, parameters
        ).one()
        paused = Paused(paused_among(json.loads(queues)), json.loads(tasks))
        return Notices(paused, set(cancelled or ()), set(killed or ()), *found)

    def paused(self) -> Paused:
        """The queues and tasks that are paused."""
        return self.notices(running=[], search=False).paused

    def deregister(self, worker_id: UUID) -> None:
        self._executor.execute(deregister_worker(), {"worker_id": worker_id})

    def members(self) -> list[SeenWorker]:
        return [SeenWorker(*row) for row in self._executor.execute(all_workers())]

    def live(self) -> list[WorkerState]:
        """The workers not declared dead, in the order of their starts."""
        found = []
        rows = self._executor.execute(live_workers())
        for _, of_worker in groupby(rows, key=lambda row: row[0]):
            held = list(of_worker)
            id, hostname, pid, queues, *known = held[0][:9]
            known.append(tuple(HeldJob(*row[9:]) for row in held if row[9] is not None))
            found.append(WorkerState(id, hostname, pid, tuple(queues), *known))
        return found

    def leases_of(self, worker_id: UUID) -> list[tuple[int, int, int]]:
        """(job, message, attempt) of every lease that this worker holds in the database."""
        rows = self._executor.execute(leases_of(), {"worker_id": worker_id})
        return [(row[0], row[1], row[2]) for row in rows]

    def terminate_backend(self, pid: int) -> None:
        self._executor.execute(terminate_backend(), {"pid": pid})
