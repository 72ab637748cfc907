"""The objects that all threads of one worker share."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from threading import Event
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.context import Around
from pgqueue.database.opening import READ_COMMITTED
from pgqueue.database.settings import SCHEDULING
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.middleware import (
    AsyncAround,
    around_async_handlers,
    around_handlers,
    layers_of,
)
from pgqueue.outcomes import Released
from pgqueue.repository.claim import Claimed
from pgqueue.repository.tables import array_of
from pgqueue.rules.limits import Limited
from pgqueue.rules.retention import Retention
from pgqueue.tasks import Task
from pgqueue.worker.attempt_events import AttemptEvents
from pgqueue.worker.buffer import JobBuffer
from pgqueue.worker.claiming.crash_isolation import CrashIsolation
from pgqueue.worker.claiming.cursors import ClaimCursors, open_tasks, under_all_names
from pgqueue.worker.claiming.notifications import Listener
from pgqueue.worker.duties.admit import AdmissionRounds, Admitter
from pgqueue.worker.duties.batches import BatchEnds
from pgqueue.worker.event_loop import EventLoop
from pgqueue.worker.heartbeat import WorkerIdentity
from pgqueue.worker.outage import Outage
from pgqueue.worker.processes import ProcessPool
from pgqueue.worker.progress import ProgressWriter
from pgqueue.worker.reconnecting import ReconnectingConnection


@dataclass(slots=True)
class WorkerRuntime:
    """The shared objects, each made once when the worker starts."""

    engine: Engine
    sessions: sessionmaker[Session]
    around: Around
    """What a framework puts around handlers and ``after_commit`` listeners."""
    middlewares: InitVar[Sequence[Any]]
    tasks: Mapping[str, Task[..., Any]]
    retention: Retention
    identity: WorkerIdentity
    buffer: JobBuffer
    outage: Outage
    cursors: ClaimCursors
    listener: Listener
    loop: EventLoop
    children: ProcessPool
    stopping: Event
    limited: InitVar[Limited]
    poll_interval: InitVar[float]
    """Seconds between two looks for jobs that may be admitted, if nothing hints at them."""
    events: AttemptEvents | None
    """Tells the application how attempts end, if it asks for that."""
    around_handlers: Around = field(init=False)
    around_async_handlers: AsyncAround = field(init=False)
    reads_meta: bool = field(init=False)
    """Whether claims read the meta of jobs: a handler or something around it may ask for it."""
    task_names: str = field(init=False)
    """The names of all tasks, as the array parameter of a statement."""
    crash_isolation: CrashIsolation = field(init=False)
    progress: ProgressWriter = field(init=False)
    admitter: Admitter = field(init=False)
    batches: BatchEnds = field(init=False)
    deletes_at_once: bool = field(init=False)
    """Whether some jobs are deleted when they succeed; otherwise no settle asks which."""
    looked_at: float = field(default_factory=time.monotonic, init=False)
    """When this worker last looked for jobs."""
    isolation_level: IsolationLevel = field(default=READ_COMMITTED, init=False)
    """The level of handlers' transactions: that of the application's engine."""

    @property
    def open_tasks(self) -> str:
        """The names of the tasks that are not paused, as the array parameter of a claim."""
        paused = self.identity.paused
        return open_tasks(self.tasks, paused) if paused.tasks else self.task_names

    def run_of(self, claimed: Claimed) -> RunningAttempt:
        """An attempt of this worker that begins now."""
        return RunningAttempt(
            claimed,
            self.tasks[claimed.task],
            worker_id=self.identity.worker_id,
            stopping=self.stopping,
            report=self.progress.report,
        )

    def note_times(self, run: RunningAttempt) -> None:
        """Keep for its event when an attempt ran; call it before the attempt is settled."""
        if self.events is not None:
            self.buffer.times[run.claimed.message_id] = run.times

    def is_kept(self, claimed: Claimed) -> bool:
        """Whether a job stays in the tables if it succeeds."""
        if not self.deletes_at_once:
            return True
        return not self.retention.deletes_at_once(claimed.task, claimed.queue)

    def leaves_nothing(self, admitted: int) -> bool:
        """Whether no job comes any more, for a worker that ends when no job is left.

        Admits jobs that wait for room, if ``admitter.admitted`` was this number before the claim
        that found nothing, and ends batches, whose callbacks are jobs too.
        """
        if self.admitter.has_admitted_since(admitted):
            return False
        connection = ReconnectingConnection(
            self.engine,
            SCHEDULING,
            self.outage,
            name="batches",
            stopping=self.stopping,
            isolation_level=READ_COMMITTED,
        )
        try:
            ended = connection.attempt(partial(self.batches.end, is_over=self.stopping.is_set))
        finally:
            connection.close()
        return ended == 0  # None if the database is away

    def may_start(self, claimed: Claimed) -> bool:
        """Whether a claimed job may start: only while no other worker can have rescued it.

        Waits while the last heartbeat is too old.  Releases the job when the worker stops.
        """
        while not self.identity.is_fresh:
            if self.stopping.wait(0.05):
                self.buffer.done(claimed, Released())
                return False
        return self._knows(claimed)

    def may_start_now(self, claimed: Claimed) -> bool:
        """Like :meth:`may_start`, without waiting."""
        return self.identity.is_fresh and self._knows(claimed)

    def _knows(self, claimed: Claimed) -> bool:
        # A worker that was declared dead meanwhile has forgotten all its claimed jobs.
        return self.buffer.in_flight.get(claimed.message_id) is claimed

    def __post_init__(
        self, middlewares: Sequence[Any], limited: Limited, poll_interval: float
    ) -> None:
        layers = layers_of(self.around, middlewares)
        self.around_handlers = around_handlers(layers)
        self.around_async_handlers = around_async_handlers(layers)
        takers = [task for task in self.tasks.values() if task.injection.wants_context]
        self.reads_meta = bool(layers or takers)
        self.task_names = array_of(sorted(self.tasks))
        self.deletes_at_once = self.retention.ever_deletes_at_once
        self.crash_isolation = CrashIsolation(self.buffer.in_flight, self.cursors)
        self.progress = ProgressWriter(self.engine, self.outage, must_wait=self._reads_snapshot)
        self.buffer.wake = self.listener.poke
        self.batches = BatchEnds(notify=self.listener.enabled)
        self.admitter = self._new_admitter(limited, poll_interval)
        if self.admitter.is_in_use:
            self.buffer.on_settled = self.admitter.settled
        if self.events is not None:
            self.buffer.on_end = self.events.ended

    def _new_admitter(self, limited: Limited, poll_interval: float) -> Admitter:
        rounds = AdmissionRounds(
            lambda: self.identity.served,
            lambda: under_all_names(self.tasks, self.identity.paused),
            lambda: self.open_tasks,
            notify=self.listener.enabled,
            most_ready=self.identity.slots,
        )
        return Admitter(
            self.engine,
            rounds,
            self.outage,
            limited=limited,
            poll_interval=poll_interval,
            stopping=self.stopping,
            on_admitted=self._wake_claims,
        )

    def _wake_claims(self) -> None:
        self.listener.poke()
        self.buffer.room.set()  # for a worker that ends when no job is left, which does not listen

    def _reads_snapshot(self, run: RunningAttempt) -> bool:
        """Whether an attempt has a transaction that could not settle its job if another changed it.

        Such a transaction would fail with a serialization error at its end.
        """
        return self.isolation_level != READ_COMMITTED and run.backend_pid is not None
