"""The heartbeat: reports that this worker lives, and detects dead workers.

It has a connection of its own, which also holds the advisory lock whose loss tells the others
that the process has ended.  Pool, handlers and event loop cannot stop it.  Nor can a lock on any
table but `workers`: it reads and writes no other.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from threading import Event

from sqlalchemy import Connection, Engine

from pgqueue import redaction
from pgqueue.database.settings import BEATING
from pgqueue.repository.rescue import SeenWorker
from pgqueue.repository.workers import NOTHING_PAUSED, Workers
from pgqueue.rules.served_queues import is_pattern
from pgqueue.worker import liveness
from pgqueue.worker.liveness import Witness
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import HEARTBEAT, Outage

logger = redaction.logger(__name__)

BEAT = 0.5


class WorkerIdentity:
    """The id of this worker, and whether others may have declared it dead."""

    def __init__(self, *, queues: Sequence[str], slots: int, version: str = "") -> None:
        self.worker_id = uuid.uuid4()
        self.queues = queues
        """Names and patterns, as the row of this worker says them."""
        self.queue_names = [queue for queue in queues if not is_pattern(queue)]
        """The names of the queues from which it claims."""
        self.slots = slots
        self.version = version
        """Of the application; empty if it has none."""
        self.paused = NOTHING_PAUSED
        self.is_quiet = False
        """Whether an operator has taken all queues from this worker."""
        self._fresh_until = float("-inf")
        self.acknowledged_at = time.monotonic()
        """When the last acknowledged heartbeat was sent, at first when the worker was made."""

    @property
    def is_fresh(self) -> bool:
        """Whether no rescuer can have declared this worker dead.

        The time is read before the heartbeat is sent, so it is never later than the database's.
        """
        return time.monotonic() < self._fresh_until

    @property
    def closed_queues(self) -> Collection[str]:
        """The queues from which this worker must not claim."""
        return self.queue_names if self.is_quiet else self.paused.queues

    @property
    def served(self) -> Sequence[str]:
        """The queues that this worker serves."""
        return () if self.is_quiet else self.queue_names

    def acknowledged(self, *, sent_at: float) -> None:
        self.acknowledged_at = sent_at
        self._fresh_until = sent_at + liveness.FAST_GRACE.total_seconds()

    def be_reborn(self) -> None:
        """Go on under a new id after this worker was declared dead."""
        self.worker_id = uuid.uuid4()
        self._fresh_until = float("-inf")


class Heartbeat(Loop):
    """The thread of the heartbeat.  A new connection starts with a new witness."""

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        outage: Outage,
        *,
        attempts_ended: Callable[[], int],
        on_others_dead: Callable[[Sequence[SeenWorker]], None],
        on_declared_dead: Callable[[], None],
    ) -> None:
        super().__init__(
            engine,
            BEATING,
            outage,
            name=HEARTBEAT,
            isolation_level="AUTOCOMMIT",
            # After an outage, the first worker back must not take slower ones for dead.
            longest_wait=BEAT,
            # Or others would declare it dead when the disk has been full for a second.
            is_kept=True,
            is_vital=True,
        )
        self.identity = identity
        self.registered = Event()
        self._attempts_ended = attempts_ended
        self._on_others_dead = on_others_dead
        self._on_declared_dead = on_declared_dead
        self._connection: Connection | None = None
        """The connection of the last heartbeat."""
        self._is_locked = False
        self._witness = Witness()

    def step(self, connection: Connection) -> float:
        """Beat; returns the seconds until the next beat, or until another worker may be dead."""
        workers, identity = Workers(connection), self.identity
        sent_at = time.monotonic()
        if not self.registered.is_set():
            workers.register(
                identity.worker_id,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                queues=identity.queues,
                slots=identity.slots,
                version=identity.version or None,
            )
            if identity.is_quiet:  # under the id with which it was declared dead
                workers.make_quiet(identity.worker_id)
        if connection is not self._connection:
            self._connection = connection
            self._is_locked = False
            self._witness = Witness()
        self._is_locked = self._is_locked or workers.lock_presence(identity.worker_id)
        asked_at = time.monotonic()
        beat = workers.beat(identity.worker_id, attempts_ended=self._attempts_ended())
        if beat is None:
            worker_id = identity.worker_id
            logger.error("worker %s was declared dead by another; its jobs are given up", worker_id)
            self.registered.clear()
            identity.be_reborn()
            self._on_declared_dead()
            # This connection holds the lock of the old id; a new connection starts without it.
            self.reconnecting.close()
        else:
            if beat.is_quiet is not identity.is_quiet:
                words = "is quiet: it claims no more jobs"
                words = words if beat.is_quiet else "is no longer quiet: it claims jobs again"
                logger.info("worker %s %s", identity.worker_id, words)
                identity.is_quiet = beat.is_quiet
            identity.acknowledged(sent_at=sent_at)
            self.registered.set()
            answered_at = time.monotonic()
            self._on_others_dead(
                self._witness.dead_among(beat.others, asked_at=asked_at, answered_at=answered_at)
            )
        return min(sent_at + BEAT, self._witness.next_death_at) - time.monotonic()

    def end(self) -> None:
        worker_id = self.identity.worker_id
        if self.registered.is_set():
            self.reconnecting.run(lambda line: Workers(line).deregister(worker_id))
