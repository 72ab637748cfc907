"""The supervisor: one run of a worker, from the first heartbeat to the last settle."""

import concurrent.futures.thread  # noqa: F401  # before _register_atexit below
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from uuid import UUID

from sqlalchemy import Connection, QueuePool, create_engine

from pgqueue import redaction, schema
from pgqueue.database.handlers import check_binds
from pgqueue.database.opening import isolation_of, warn_of_unheard_listeners, worker_engine
from pgqueue.database.settings import OWN
from pgqueue.errors import TooManyStuck, WorkerBroken
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import log_fields
from pgqueue.job_queue import PgQueue
from pgqueue.options import OptionsOfWorker
from pgqueue.outcomes import Interrupted, Outcome, Released
from pgqueue.repository.rescue import Rescued
from pgqueue.tasks.pauses import under_all_names
from pgqueue.worker import timeouts
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.duties.admission_rounds import AdmissionRounds
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.duties.batches import BatchEnder
from pgqueue.worker.duties.coordinator import CoordinatorListener
from pgqueue.worker.duties.depths import DepthCounter
from pgqueue.worker.duties.minutes import MinuteWriter
from pgqueue.worker.duties.prune import Pruner
from pgqueue.worker.duties.rescue import Rescuer
from pgqueue.worker.duties.ticks import Scheduler
from pgqueue.worker.health import WorkerHealth
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.ledger import STALE
from pgqueue.worker.loop import Loop
from pgqueue.worker.processes.pool import ProcessPool
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.settler import Settler
from pgqueue.worker.slot import Slot
from pgqueue.worker.threads import WorkerThread, wait_until
from pgqueue.worker.until_empty import HandlerErrors

logger = redaction.logger(__name__)

WATCH_EVERY = 0.1
WATCH_AT_REST_EVERY = 0.25
"""Seconds between two checks of handlers, threads and signals; the second while no handler runs."""
OBEY_WITHIN = 3.0
"""Seconds for which the worker waits, before it ends, for handlers past their timeout: those that
look at ``ctx.is_cancelled()`` may all have been overdue at the same moment."""
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
    ) -> None:
        self._config = config
        self._stopping = stopping
        self._stuck: list[Slot] = []
        """Slots that were replaced, whose handlers have not returned."""
        self._closing = Lock()
        self._is_closed = False
        self._has_interrupted = False
        """Whether any attempt was interrupted."""
        self._application_engine = queue.engine
        self._engine = worker_engine(queue.engine)
        if any(task.is_transactional for task in queue.tasks.values()):
            check_binds(queue.sessions, queue.engine)
        self._runtime = runtime = WorkerRuntime(
            queue, config, self._engine, stopping=stopping, errors=errors
        )
        identity, ledger, outage = runtime.identity, runtime.ledger, runtime.outage
        self._transactions = timeouts.Transactions(runtime)
        _warn_of_small_pool(runtime)
        warn_of_unheard_listeners(queue.engine, self._engine)

        self._slots = [Slot(runtime) for _ in range(config.concurrency)]
        self._admitter = Admitter(
            self._engine,
            AdmissionRounds(
                lambda: identity.served,
                lambda: under_all_names(runtime.tasks, identity.paused),
                lambda: runtime.open_tasks,
                notify=queue.notify,
                most_ready=config.concurrency,
            ),
            outage,
            limited=queue.limited,
            poll_interval=config.poll_interval.total_seconds(),
            stopping=stopping,
            on_admitted=lambda: self._claimer.notify(),
        )
        self._claimer = Claimer(
            runtime,
            config,
            self._slots,
            self._admitter,
            listens=queue.notify,
            until_empty=until_empty,
        )
        self._coordinator = queue.coordinator if queue.notify and not until_empty else lambda: None
        self._settler = Settler(
            self._engine,
            ledger,
            identity,
            outage,
            goes_on=self._claimer.notify,
            tasks=runtime.tasks,
            is_kept=runtime.is_kept if runtime.deletes_at_once else None,
        )
        ledger.on_suspect_settled = self._claimer.notify
        ledger.on_all_settled = runtime.buffer.room.set

        # A run that ends when no job is left fires no schedule.
        self._scheduler, batch_ender = None, None
        if not until_empty:
            tasks, names = runtime.tasks, runtime.task_names
            self._scheduler = Scheduler(self._engine, queue, tasks, names, outage)
            batch_ender = BatchEnder(self._engine, outage, notify=queue.notify)
        minutes, counter = None, None
        if runtime.statistics is not None:
            minutes = MinuteWriter(
                runtime.statistics, application=queue.application, version=queue.version
            )
            counter = DepthCounter(self._engine, outage)
        self._rescuer = Rescuer(
            self._engine,
            identity,
            outage,
            running=self._running_job_ids,
            on_cancel=self._cancel,
            on_rescued=self._handle_rescued,
            ticking=self._scheduler,
            ending=batch_ender,
            minutes=minutes,
            counting=counter,
        )
        self._heartbeat = Heartbeat(
            self._engine,
            identity,
            outage,
            attempts_ended=runtime.ledger.ended,
            on_dead=self._rescuer.reap,
            on_death=self._give_up_all,
        )
        pruner = Pruner(self._engine, runtime.retention, outage)
        duties = (self._heartbeat, self._rescuer, pruner, self._scheduler, batch_ender, counter)
        self._duties: list[Loop] = [loop for loop in duties if loop is not None]
        """The loops that run before the first claim."""
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

    def work(self, is_over: Callable[[], bool], grace: Callable[[], float]) -> Counter[str]:
        """Run until ``is_over()`` or, with ``until_empty``, until no job is left."""
        runtime = self._runtime
        try:
            runtime.children.start()
            self._verify(is_over)
        except BaseException:
            self._close()  # no thread was started
            raise
        for duty in self._duties:
            duty.start()
        if runtime.events is not None:
            runtime.events.start()
        try:
            self._supervise(is_over)
        finally:
            self._end(grace)
        return runtime.ledger.counts

    def health(self) -> WorkerHealth:
        now, identity = time.monotonic(), self._runtime.identity
        return WorkerHealth(
            slots=identity.slots,
            busy=len(self._running_job_ids()),
            heartbeat_age=now - identity.acknowledged_at,
            claim_age=now - self._claimer.looked_at,
            stale=self._runtime.ledger.counts[STALE],
            hanging=() if self._scheduler is None else tuple(self._scheduler.hanging()),
        )

    def interrupt(self) -> bool:
        """Settle running attempts as ``interrupted`` and close.

        Returns whether this run has interrupted any attempt.
        """
        began = time.monotonic()
        with timeouts.staying(runs := self._running_attempts()):
            lost = [run for run in runs if run.lose()]
            outcomes = [(run, Interrupted(run.task.settings.max_interruptions)) for run in lost]
            self._settle_for_threads(outcomes)
        self._has_interrupted = self._has_interrupted or bool(lost)
        self._close(LAST_SETTLE - (time.monotonic() - began))
        return self._has_interrupted

    def _verify(self, is_over: Callable[[], bool]) -> None:
        """Wait for the database, refuse a schema version that this code does not support, and read
        what the run needs to know: limits in use, the isolation level of handlers, and where Citus
        has its coordinator."""
        reconnecting = ReconnectingConnection(
            self._engine, OWN, self._runtime.outage, name="start", stopping=self._stopping
        )

        def verify(connection: Connection) -> bool:
            schema.verify(connection)
            self._admitter.look_for_limits(connection)
            if any(task.is_transactional for task in self._runtime.tasks.values()):
                self._runtime.isolation_level = isolation_of(self._application_engine)
            if (url := self._coordinator()) is not None:
                listener = CoordinatorListener(create_engine(url), self._claimer.notify)
                self._duties.append(listener)
                self._loops.insert(0, listener)
            return True

        try:
            while not is_over() and not reconnecting.run(verify):
                pass
        finally:
            reconnecting.close()

    def _supervise(self, is_over: Callable[[], bool]) -> None:
        for ready in (self._heartbeat.registered, self._rescuer.informed):
            while not ready.wait(WATCH_EVERY):
                self._check_threads()
                if is_over():
                    return
        logger.info("serving %s", ", ".join(self._config.names))
        if self._admitter.is_in_use:  # after the rescuer: it must not admit jobs of paused tasks
            self._runtime.ledger.on_settled = self._admitter.settled
            self._admitter.start()
        for thread in (self._settler, *self._slots, self._claimer):
            thread.start()
        while not is_over() and not self._claimer.finished.wait(
            WATCH_EVERY if self._running_attempts() else WATCH_AT_REST_EVERY
        ):
            timeouts.stop_cut_off(self._running_attempts())
            self._replace_overdue()
            self._transactions.end_again()
            self._check_threads()

    def _running_attempts(self) -> list[RunningAttempt]:
        return [run for slot in self._slots if (run := slot.current) is not None]

    def _running_job_ids(self) -> list[int]:
        return [run.claimed.job_id for run in self._running_attempts()]

    def _cancel(self, asked: set[int], killed: set[int]) -> None:
        for run in self._running_attempts():
            if run.claimed.job_id in asked:
                run.ask_to_stop()
            if run.claimed.job_id in killed:
                run.kill()

    def _handle_rescued(self, attempts: Sequence[Rescued]) -> None:
        self._admitter.wake()
        if self._runtime.events is not None:
            self._runtime.events.rescued(attempts)
        if self._runtime.statistics is not None:
            self._runtime.statistics.rescued(attempts)

    def _give_up_all(self) -> None:
        """Forget all jobs: this worker was declared dead, and others rescue its jobs."""
        self._runtime.buffer.drain()
        self._runtime.ledger.forget_all()
        for run in self._running_attempts():
            run.lose()

    def _replace_overdue(self) -> None:
        """Settle attempts that are past their timeout, and put new threads into their slots.

        A thread cannot be stopped from outside; its handler sees ``ctx.is_cancelled()``.
        """
        overdue = {
            index: run
            for index, slot in enumerate(self._slots)
            if (run := slot.current) is not None and run.is_overdue
        }
        for run in overdue.values():
            run.is_abandoned = True  # before its thread can see that the attempt is lost
        with timeouts.staying(overdue.values()):
            lost = {index: run for index, run in overdue.items() if run.lose()}
            self._settle_for_threads([(run, timeouts.late(run)) for run in lost.values()])
        for index in lost:
            self._stuck.append(self._slots[index])
            self._slots[index] = Slot(self._runtime)
            self._slots[index].start()
        if self._has_too_many_stuck():
            wait_until(lambda: not self._has_too_many_stuck(), lambda: OBEY_WITHIN)
        if self._has_too_many_stuck():
            raise TooManyStuck(
                f"{len(self._stuck)} handlers do not return although they are past their timeout; "
                "end this process: their threads cannot be stopped otherwise"
            )

    def _has_too_many_stuck(self) -> bool:
        self._stuck = [slot for slot in self._stuck if slot.is_alive()]
        return len(self._stuck) >= self._config.concurrency

    def _settle_for_threads(self, ended: Sequence[tuple[RunningAttempt, Outcome]]) -> None:
        """Settle attempts whose threads still run, and end their transactions from this thread."""
        self._transactions.end([run for run, _ in ended])
        for run, outcome in ended:
            if self._runtime.statistics is not None:
                self._runtime.statistics.ran(run, outcome)
            if not run.is_settled:
                self._runtime.note_times(run)
                self._runtime.ledger.done(run.claimed, outcome)

    def _end(self, grace: Callable[[], float]) -> None:
        """Stop claiming, release jobs that have not started, let handlers finish, settle."""
        runtime = self._runtime

        def have_ended() -> bool:
            timeouts.stop_cut_off(self._running_attempts())
            return not self._are_alive()

        def close_after_last_handler() -> None:
            # Until then, the heartbeat must protect its lease.
            for slot in self._slots:
                slot.join()
            self._close()
            _outlived.discard(self)

        logger.info("stopping; number of running handlers: %d", len(self._running_attempts()))
        self._stopping.set()
        for run in self._running_attempts():
            run.notify_child()
        self._claimer.stop(seconds=LAST_CLAIM)
        for claimed in runtime.buffer.drain():
            runtime.ledger.done(claimed, Released())
        runtime.buffer.close()
        wait_until(have_ended, grace)
        for run in self._running_attempts():
            logger.warning(
                "job %d %s: its handler still runs after the grace period; the attempt is "
                "interrupted if it does not end before the process",
                run.claimed.job_id,
                run.task.name,
                extra=log_fields(run.claimed),
            )
        if runtime.children.interrupt():
            self._has_interrupted = True
            wait_until(lambda: all(map(_has_ended_or_is_stuck, self._slots)), lambda: FOR_KILLED)
        if self._are_alive():
            # Their attempts are settled when their threads end, or when the process exits.
            for run in self._running_attempts():
                run.ask_to_stop()
            _outlived.add(self)
            Thread(target=close_after_last_handler, name="pgqueue-last-out", daemon=True).start()
            return
        self.interrupt()  # also settles the attempts of threads that an error has ended

    def _check_threads(self) -> None:
        """Raise if a thread has failed: the worker would look healthy without it."""
        runtime = self._runtime
        # The event loop comes before the slots: its failure ends them, and is the error to show.
        threads: tuple[WorkerThread | ProcessPool, ...] = (
            *self._loops,
            runtime.children,
            runtime.loop,
            *self._slots,
        )
        for thread in threads:
            if thread.failure is not None:
                self._stopping.set()
                raise WorkerBroken(
                    f"{thread.name} has failed: {thread.failure!r}"
                ) from thread.failure

    def _are_alive(self) -> bool:
        return any(slot.is_alive() for slot in self._slots)

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


def _has_ended_or_is_stuck(slot: Slot) -> bool:
    """Whether a slot has ended, or runs a handler in its own thread, which cannot be stopped."""
    run = slot.current
    return not slot.is_alive() or (run is not None and not run.task.in_process)
