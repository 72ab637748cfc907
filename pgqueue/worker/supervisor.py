"""The supervisor: one run of a worker, from the first heartbeat to the last settle."""

import concurrent.futures.thread  # noqa: F401  # before _register_atexit below
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Event, Lock, Thread
from uuid import UUID

from sqlalchemy import URL, Connection, QueuePool, create_engine

from pgqueue import redaction, schema
from pgqueue.database.handlers import check_binds
from pgqueue.database.opening import isolation_of, warn_of_unheard_listeners, worker_engine
from pgqueue.database.settings import OWN
from pgqueue.errors import WorkerBroken
from pgqueue.handler.attempt import CANCEL_WITHIN
from pgqueue.handler.error_reports import log_fields
from pgqueue.job_queue import PgQueue
from pgqueue.options import OptionsOfWorker
from pgqueue.outcomes import Released, Stopped
from pgqueue.worker import timeouts
from pgqueue.worker.activity import activity
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.duties.coordinator import CoordinatorListener
from pgqueue.worker.event_loop import HostLoop
from pgqueue.worker.health import WorkerHealth
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.ledger import STALE
from pgqueue.worker.looks import Looks
from pgqueue.worker.loop import Loop
from pgqueue.worker.processes.pool import ProcessPool
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.settler import Settler
from pgqueue.worker.slot import steps_in_child
from pgqueue.worker.slots import Slots
from pgqueue.worker.threads import WorkerThread, wait_until
from pgqueue.worker.timers import Timers
from pgqueue.worker.until_empty import HandlerErrors
from pgqueue.worker.upkeep import Upkeep

logger = redaction.logger(__name__)

WATCH_EVERY = 0.1
WATCH_AT_REST_EVERY = 0.25
"""Seconds between two checks of handlers, threads and signals; the second while no handler runs."""
LAST_CLAIM = 4.5
"""Seconds to wait for the end of the last claim, which may have to be cancelled."""
LAST_SETTLE = 4.0
"""Seconds after the grace period for the last settles and the end of all threads, if tables are
locked or the database does not answer.  Cancelling the running statements may take longer."""
FOR_KILLED = 2.5
"""Seconds to wait for slots whose child processes were killed."""


class Supervisor:
    """The threads of one run and their end.  :meth:`work` runs in the caller's thread."""

    def __init__(
        self,
        queue: PgQueue,
        config: OptionsOfWorker,
        *,
        stopping: Event,
        until_empty: bool,
        errors: HandlerErrors | None = None,
        loop: AbstractEventLoop | None = None,
        asked: Callable[[], object] = lambda: None,
    ) -> None:
        """``loop``: that of the application, for async handlers.  ``asked`` is called once the
        database was asked for its tables, or is away."""
        self._config = config
        self._asked = asked
        self._stopping = stopping
        self._closing = Lock()
        self._is_closed = False
        self._has_interrupted = False
        """Whether any attempt was interrupted."""
        self._ended, self._busy_at = 0, time.monotonic()
        """How many attempts had ended when the worker was last seen busy, and when that was."""
        if any(task.is_transactional for task in queue.tasks.values()):
            check_binds(queue.sessions, queue.engine)
        self._application_engine = queue.engine
        self._engine = worker_engine(queue.engine)
        self._runtime = runtime = WorkerRuntime(
            queue, config, self._engine, stopping=stopping, errors=errors, loop=loop
        )
        _warn_of_small_pool(runtime)
        warn_of_unheard_listeners(queue.engine, self._engine)
        self._coordinator = queue.coordinator if queue.notify and not until_empty else lambda: None

        self._slots = Slots(runtime, config.concurrency)
        self._settler = Settler(runtime)
        self._admitter = Admitter(
            runtime, queue, most_ready=config.concurrency, poll_interval=config.poll_interval
        )
        self._claimer = Claimer(
            runtime,
            config,
            self._slots,
            self._admitter,
            listens=queue.notify,
            until_empty=until_empty,
        )
        self._janitor = Janitor(runtime)
        # A run that ends when no job is left fires no schedule.
        self._timers = None if until_empty else Timers(runtime, queue)
        # Such a run looks itself before it ends: a look in another thread would delay its end.
        self._looks = None if until_empty else Looks(runtime, notify=queue.notify)
        if self._looks is not None:
            runtime.ledger.on_ended = self._looks.ended
            if queue.notify:
                runtime.ledger.on_watched_ended = self._looks.watched_ended
        self._upkeep = Upkeep(
            runtime,
            self._slots,
            self._admitter,
            timers=self._timers,
            looks=self._looks,
            janitor=self._janitor,
            notify=queue.notify,
        )
        self._heartbeat = Heartbeat(
            self._engine,
            runtime.identity,
            runtime.outage,
            attempts_ended=runtime.ledger.ended,
            on_others_dead=self._upkeep.reap,
            on_declared_dead=self._give_up_all,
        )
        self._duties: list[Loop] = [self._heartbeat, self._upkeep, self._janitor]
        """The loops that run before the first claim."""
        self._duties += [loop for loop in (self._timers, self._looks) if loop is not None]
        self._loops: list[Loop] = [
            *self._duties,
            runtime.progress,  # started by the first report
            self._settler,
            self._admitter,
            self._claimer,
        ]
        """They end in the opposite order: the heartbeat protects the leases until all outcomes are
        written."""

    @property
    def worker_id(self) -> UUID:
        return self._runtime.identity.worker_id

    def has_done_enough(self) -> bool:
        """Whether this run ends by itself: after ``max_jobs``, or ``max_idle`` without a job."""
        ledger, now = self._runtime.ledger, time.monotonic()
        ended, most, idle = ledger.ended(), self._config.max_jobs, self._config.max_idle
        if ledger.in_flight or ended != self._ended:
            self._ended, self._busy_at = ended, now
        is_idle = idle is not None and now - self._busy_at >= idle.total_seconds()
        return is_idle or (most is not None and ended >= most)

    def work(self, is_over: Callable[[], bool], grace: Callable[[], float]) -> Counter[str]:
        """Run until ``is_over()`` or, with ``until_empty``, until no job is left."""
        runtime = self._runtime
        try:
            runtime.children.start(partial(steps_in_child, runtime))
            self._prepare(is_over)
        except BaseException:
            self._close()  # no thread was started
            raise
        try:
            for duty in self._duties:
                duty.start()
            if runtime.events is not None:
                runtime.events.start()
            self._supervise(is_over)
        finally:
            self._end(grace)
        return runtime.ledger.counts

    def health(self) -> WorkerHealth:
        now, identity = time.monotonic(), self._runtime.identity
        return WorkerHealth(
            slots=identity.slots,
            busy=len(self._slots.attempts()),
            heartbeat_age=now - identity.acknowledged_at,
            claim_age=now - self._claimer.looked_at,
            stale=self._runtime.ledger.counts[STALE],
            hanging=() if self._timers is None else tuple(self._timers.hanging()),
        )

    def activity(self) -> str:
        """What each slot and each thread is doing, in lines of text."""
        health, identity = self.health(), self._runtime.identity
        words = [
            f"worker {os.getpid()} ({identity.worker_id})",
            f"{health.busy} of {health.slots} slots are busy",
            f"{len(self._runtime.ledger.in_flight)} jobs are claimed and not settled",
            f"last heartbeat {health.heartbeat_age:.1f} s ago",
            f"last claim {health.claim_age:.1f} s ago",
        ]
        words += ["quiet"] if identity.is_quiet else []
        words += ["stopping"] if self._stopping.is_set() else []
        return activity("; ".join(words), self._slots.threads, self._slots.abandoned)

    def log_activity(self) -> None:
        """Log what each slot and thread is doing; child processes write their stacks to stderr."""
        logger.warning("%s", self.activity())
        for run in self._slots.attempts():
            child = run.child  # its slot may take it away meanwhile
            if child is not None:
                child.show_stack()

    def interrupt(self) -> bool:
        """Settle running attempts as ``interrupted`` and close.

        Returns whether this run has interrupted any attempt.
        """
        began = time.monotonic()
        if self._slots.interrupt():
            self._has_interrupted = True
        self._close(LAST_SETTLE - (time.monotonic() - began))
        return self._has_interrupted

    def _prepare(self, is_over: Callable[[], bool]) -> None:
        """Wait for the database, refuse a schema version that this code does not support, and read
        what the run needs to know: limits in use, the isolation level of handlers, and where Citus
        has its coordinator.  Open the resources of handlers."""
        reconnecting = ReconnectingConnection(
            self._engine, OWN, self._runtime.outage, name="start", stopping=self._stopping
        )

        coordinator: URL | None = None

        def verify(connection: Connection) -> bool:
            nonlocal coordinator
            schema.verify(connection)
            self._admitter.look_for_limits(connection)
            if any(task.injection.parameters for task in self._runtime.tasks.values()):
                self._runtime.isolation_level = isolation_of(self._application_engine)
            coordinator = self._coordinator()
            return True

        try:
            while not is_over() and not reconnecting.run(verify):
                self._asked()
        finally:
            reconnecting.close()
        self._runtime.resources.open(is_over)
        self._asked()
        if coordinator is not None:
            engine = create_engine(coordinator)
            listener = CoordinatorListener(engine, self._runtime.work_may_be_there)
            self._duties.append(listener)
            self._loops.insert(0, listener)

    def _supervise(self, is_over: Callable[[], bool]) -> None:
        for ready in (self._heartbeat.registered, self._upkeep.has_looked):
            while not ready.wait(WATCH_EVERY):
                self._check_threads()
                if is_over():
                    return
        logger.info("serving %s", ", ".join(self._config.names))
        self._busy_at = time.monotonic()
        if self._admitter.is_in_use:  # after upkeep: it must not admit jobs of paused tasks
            self._runtime.ledger.on_settled = self._admitter.settled
            self._admitter.start()
        for thread in (self._settler, self._slots, self._claimer):
            thread.start()
        while not is_over() and not self._claimer.finished.wait(
            WATCH_EVERY if self._slots.attempts() else WATCH_AT_REST_EVERY
        ):
            self._slots.watch()
            self._check_threads()

    def _give_up_all(self) -> None:
        """Forget all jobs: this worker was declared dead, and others rescue its jobs."""
        self._runtime.buffer.drain()
        self._runtime.ledger.forget_all()
        self._slots.give_up()

    def _end(self, grace: Callable[[], float]) -> None:
        """Stop claiming, release jobs that have not started, let handlers finish, settle."""
        runtime = self._runtime

        def have_ended() -> bool:
            timeouts.stop_cut_off(self._slots.attempts())
            return not self._slots.are_alive()

        def close_after_last_handler() -> None:
            # Until then, the heartbeat must protect the leases of the handlers that run.
            self._slots.join()
            self._close()
            _outlived.discard(self)

        logger.info("stopping; number of running handlers: %d", len(self._slots.attempts()))
        self._stopping.set()
        for run in self._slots.attempts():
            run.notify_child()
        runtime.buffer.close()
        self._claimer.stop(seconds=LAST_CLAIM)
        for claimed in runtime.buffer.drain():
            runtime.ledger.done(claimed, Released())
        wait_until(have_ended, grace)
        left = self._slots.attempts()
        for run in left:
            logger.warning(
                "job %d %s: its handler still runs after the grace period; the attempt is "
                "interrupted if it does not end before the process",
                run.claimed.job_id,
                run.task.name,
                extra=log_fields(run.claimed),
            )
            run.ask_to_stop(Stopped())
        if runtime.children.interrupt():
            self._has_interrupted = True
            in_children = partial(self._slots.have_ended, lambda run: run.task.in_process)
            wait_until(in_children, lambda: FOR_KILLED)
        if any(run.task.is_async for run in left):
            self._has_interrupted = True
            on_the_loop = partial(self._slots.have_ended, lambda run: run.task.is_async)
            wait_until(on_the_loop, lambda: CANCEL_WITHIN)
        if self._slots.are_alive():
            # Their attempts are settled when their threads end, or when the process exits.
            _outlived.add(self)
            Thread(target=close_after_last_handler, name="pgqueue-last-out", daemon=True).start()
            return
        self.interrupt()  # also settles the attempts of threads that an error has ended

    def _check_threads(self) -> None:
        """Raise if a thread has failed: the worker would look healthy without it."""
        runtime = self._runtime
        # The event loop comes before the slots: its failure ends them, and is the error to show.
        threads: tuple[WorkerThread | ProcessPool | HostLoop, ...] = (
            *self._loops,
            runtime.children,
            runtime.loop,
            *self._slots.threads,
        )
        for thread in threads:
            if thread.failure is not None:
                self._stopping.set()
                raise WorkerBroken(
                    f"{thread.name} has failed: {thread.failure!r}"
                ) from thread.failure

    def _close(self, seconds: float = LAST_SETTLE) -> None:
        deadline = time.monotonic() + seconds

        def left() -> float:
            return max(deadline - time.monotonic(), 0.1)

        with self._closing:
            if self._is_closed:
                return
            for loop in reversed(self._loops):
                loop.stop(seconds=left())
            if self._runtime.events is not None:
                self._runtime.events.finish(seconds=left())
            self._runtime.resources.close(seconds=left())
            self._runtime.loop.stop()
            self._runtime.children.close()
            self._claimer.close()
            if self._engine is not self._application_engine:
                self._engine.dispose()
            self._is_closed = True


_outlived: set[Supervisor] = set()
"""Supervisors whose handlers still run after the grace period."""


def _interrupt_all() -> None:
    for supervisor in list(_outlived):
        supervisor.interrupt()


# Called when the process exits.  ``atexit`` functions run after Python has waited for the threads
# of executors, and a handler may wait for a future of one.  Executors register in the same way when
# they are imported, and who registers last is called first.
threading._register_atexit(_interrupt_all)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_outlived.clear)


def _warn_of_small_pool(runtime: WorkerRuntime) -> None:
    """Warn of fewer connections than slots: a handler that waits for one occupies its slot."""
    pool, slots = runtime.engine.pool, runtime.identity.slots
    if not isinstance(pool, QueuePool):
        return
    most = pool.size() + pool._max_overflow
    is_bounded = pool.size() > 0 and pool._max_overflow >= 0
    takers = [task.name for task in runtime.tasks.values() if task.is_transactional]
    if takers and is_bounded and most < slots:
        logger.warning(
            "the engine's pool opens %d connections at most, and %d handlers run at once: one "
            "of %s may wait for a connection; give create_engine(pool_size=%d), or the worker "
            "less concurrency",
            *(most, slots, takers[0], slots),
        )
