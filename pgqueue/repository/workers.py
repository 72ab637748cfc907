"""What workers write and read about each other: heartbeats, deaths, rescues."""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.repository.rows import Claimed, Rescued
from pgqueue.statements import rescuing, workers

RESCUE_BATCH = 500


class SeenWorker(NamedTuple):
    """A worker as other workers see it."""

    id: UUID
    heartbeat_at: datetime
    is_locked: bool


class Beat(NamedTuple):
    """What a heartbeat has read."""

    others: list[SeenWorker]
    is_quiet: bool
    """Whether an operator wants this worker to claim nothing more."""


class Paused(NamedTuple):
    """The names of what operators have paused."""

    queues: Collection[str] = ()
    tasks: Collection[str] = ()


NOTHING_PAUSED = Paused()


class Notices(NamedTuple):
    """What a worker must know of operators' calls and of other workers."""

    paused: Paused
    cancelled: set[int]
    """Those of its running jobs that were asked to cancel."""
    has_died_lately: bool
    """Whether workers declared dead just now may have leases to rescue."""
    has_orphans: bool | None
    """Whether dead workers have left leases; None if the search was not requested."""
    seconds_to_tick: float | None
    """How long the next tick of a schedule is away; None if there is none, or it was not asked."""
    has_batches: bool | None
    """Whether a batch may have ended; None if it was not asked."""


class Workers:
    """All workers, behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def register(
        self, worker_id: UUID, *, hostname: str, pid: int, queues: Sequence[str], slots: int
    ) -> None:
        """Insert a new worker's row."""
        row = {
            "worker_id": worker_id,
            "hostname": hostname,
            "pid": pid,
            "queues": json.dumps(list(queues)),
            "slots": slots,
        }
        self._executor.execute(workers.register_worker(), row)

    def lock_presence(self, worker_id: UUID) -> bool:
        """Take the lock that ends with this connection; False if another connection has it."""
        return bool(
            self._executor.execute(workers.lock_presence(), {"worker_id": worker_id}).scalar()
        )

    def beat(self, worker_id: UUID) -> Beat | None:
        """Write a heartbeat; returns what it has read, or None for a worker declared dead."""
        rows = list(self._executor.execute(workers.beat(), {"worker_id": worker_id}))
        if not rows:
            return None
        others = [SeenWorker(*other) for _, *other in rows if other[0] is not None]
        return Beat(others, is_quiet=rows[0][0])

    def make_quiet(self, worker_id: UUID) -> bool:
        """Take all queues from a worker; False if there is no such worker."""
        found = self._executor.execute(workers.make_quiet(), {"worker_id": worker_id})
        return found.first() is not None

    def notices(
        self, *, running: Sequence[int], search: bool, scheduled: str | None = None
    ) -> Notices:
        """Read pauses, cancels and deaths; with ``search``, also orphaned leases.

        ``scheduled``: tasks whose next tick to look up, as ``array_of`` names them; then batches
        are looked up too.
        """
        has_ticks = scheduled is not None
        statement = workers.notices(running=bool(running), search=search, ticks=has_ticks)
        parameters: dict[str, Any] = {"job_ids": list(running)} if running else {}
        if has_ticks:
            parameters["tasks"] = scheduled
        queues, tasks, cancelled, *found = self._executor.execute(statement, parameters).one()
        paused = Paused(json.loads(queues), json.loads(tasks))
        return Notices(paused, set(cancelled or ()), *found)

    def deregister(self, worker_id: UUID) -> None:
        self._executor.execute(workers.deregister_worker(), {"worker_id": worker_id})

    def members(self) -> list[SeenWorker]:
        return [SeenWorker(*row) for row in self._executor.execute(workers.all_workers())]

    def leases_of(self, worker_id: UUID) -> list[tuple[int, int, int]]:
        """(job, message, attempt) of every lease that this worker holds in the database."""
        rows = self._executor.execute(workers.leases_of(), {"worker_id": worker_id})
        return [(row[0], row[1], row[2]) for row in rows]

    def has_settled(self, worker_id: UUID, claimed: Claimed) -> bool | None:
        """Whether a worker's settle of an attempt was committed; None while this is undecided."""
        fence = {
            "job_id": claimed.job_id,
            "message_id": claimed.message_id,
            "attempt": claimed.attempt,
            "worker_id": worker_id,
        }
        settled: bool | None = self._executor.execute(workers.was_settled(), fence).scalar()
        return settled

    def terminate_backend(self, pid: int) -> None:
        self._executor.execute(workers.terminate_backend(), {"pid": pid})

    def declare_dead(self, member: SeenWorker) -> bool:
        """Declare a worker dead unless it has sent a heartbeat since it was seen."""
        parameters = {"dead_id": member.id, "seen_at": member.heartbeat_at}
        return self._executor.execute(rescuing.declare_dead(), parameters).first() is not None

    def rescue(self) -> list[Rescued]:
        """Give back a batch of the leases of dead workers; empty if none is left."""
        limit = {"limit": RESCUE_BATCH}
        return [Rescued(*row) for row in self._executor.execute(rescuing.rescue_leases(), limit)]

    def forget_dead(self) -> None:
        self._executor.execute(rescuing.forget_workers())
