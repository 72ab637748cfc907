"""What the threads of one worker share."""

from asyncio import AbstractEventLoop
from threading import Event

from sqlalchemy import Engine
from sqlalchemy.engine.interfaces import IsolationLevel

from pgqueue.database.handlers import joining_sessions
from pgqueue.database.opening import READ_COMMITTED
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.job_queue import PgQueue
from pgqueue.middleware import around_async_handlers, around_handlers, layers_of
from pgqueue.options import OptionsOfWorker
from pgqueue.outcomes import Released
from pgqueue.repository.claim import Claimed
from pgqueue.repository.tables import array_of
from pgqueue.tasks.pauses import open_tasks
from pgqueue.worker.attempt_counts import AttemptCounts
from pgqueue.worker.attempt_events import AttemptEvents
from pgqueue.worker.buffer import JobBuffer
from pgqueue.worker.event_loop import EventLoop, HostLoop
from pgqueue.worker.heartbeat import WorkerIdentity
from pgqueue.worker.job_log import LogJobs, job_log
from pgqueue.worker.ledger import Ledger
from pgqueue.worker.outage import Outage
from pgqueue.worker.processes.pool import ProcessPool
from pgqueue.worker.progress import ProgressWriter
from pgqueue.worker.resources import OpenedOnDemand, Resources
from pgqueue.worker.server_clock import ServerClock
from pgqueue.worker.until_empty import HandlerErrors
from pgqueue.worker.wake_up import WakeUp
from pgqueue.worker.watched import WatchedJobs


class WorkerRuntime:
    """Made once when the worker starts.

    ``errors`` keeps what handlers raise, for a test; ``loop`` is that of the application.
    """

    def __init__(
        self,
        queue: PgQueue,
        config: OptionsOfWorker,
        engine: Engine,
        *,
        stopping: Event,
        errors: HandlerErrors | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self.engine = engine
        self.sessions = joining_sessions(queue.sessions, queue.engine)
        self.isolation_level: IsolationLevel = READ_COMMITTED
        """The level of handlers' transactions: that of the application's engine."""
        self.tasks = dict(queue.tasks)
        self.task_names = array_of(sorted(self.tasks))
        """The names of all tasks, as the array parameter of a statement."""
        self.application = queue.application
        self.identity = WorkerIdentity(
            queues=config.names, slots=config.concurrency, version=queue.version
        )
        self.stopping = stopping
        self.outage = Outage()
        self.buffer = JobBuffer()
        self.clock = ServerClock()
        self.work_may_be_there = WakeUp()
        """Wakes the claimer."""
        self.signalled = WakeUp()
        """Wakes the looks: signals are to be delivered."""
        callbacks = [*queue.attempt_callbacks]
        if config.log_jobs is not None:
            callbacks.append(job_log(LogJobs(config.log_jobs)))
        self.events = AttemptEvents(callbacks, self.clock) if callbacks else None
        """Tells the application how attempts end, if it asks for that."""
        self.statistics = AttemptCounts(self.clock) if config.statistics else None
        self.watched = WatchedJobs()
        self.ledger = Ledger(
            watched=self.watched,
            statistics=self.statistics,
            events=self.events,
            work_may_be_there=self.work_may_be_there,
            all_settled=self.buffer.look,
        )

        around = queue.around_jobs()
        self.around = around if errors is None else errors.around(around)
        """What a framework puts around handlers and ``after_commit`` listeners."""
        layers = layers_of(self.around, queue.middlewares)
        self.around_handlers = around_handlers(layers)
        self.around_async_handlers = around_async_handlers(layers)
        self.around_finish = queue.around_finish()
        self.loop = EventLoop(engine) if loop is None else HostLoop(engine, loop)
        self.resources = Resources(queue, self.loop)
        self.children = ProcessPool(
            queue.tasks,
            around_handlers(layers_of(around, queue.middlewares)),
            OpenedOnDemand(queue),
            max_jobs=config.max_jobs_per_child,
        )
        self.progress = ProgressWriter(engine, self.outage, must_wait=self._reads_snapshot)

        self.retention = queue.retention
        self.deletes_at_once = queue.retention.ever_deletes_at_once
        """Whether some jobs are deleted when they succeed; otherwise no settle asks which."""

    @property
    def open_tasks(self) -> str:
        """The names of the tasks that are not paused, as the array parameter of a claim."""
        paused = self.identity.paused
        return open_tasks(self.tasks, paused) if paused.tasks else self.task_names

    def attempt_of(self, claimed: Claimed) -> RunningAttempt:
        """An attempt of this worker that begins now."""
        return RunningAttempt(
            claimed,
            self.tasks[claimed.task],
            worker_id=self.identity.worker_id,
            stopping=self.stopping,
            resources=self.resources.values,
            report=self.progress.report,
        )

    def is_kept(self, claimed: Claimed) -> bool:
        """Whether a job stays in the tables if it succeeds."""
        if not self.deletes_at_once:
            return True
        return not self.retention.deletes_at_once(claimed.task, claimed.queue)

    def may_start(self, claimed: Claimed) -> bool:
        """Whether a claimed job may start: only while no other worker can have rescued it.

        Waits while the last heartbeat is too old.  Releases the job when the worker stops.
        """
        while not self.identity.is_fresh:
            if self.stopping.wait(0.05):
                self.ledger.done(claimed, Released())
                return False
        return True

    def _reads_snapshot(self, run: RunningAttempt) -> bool:
        """Whether an attempt has a transaction that could not settle its job if another changed it.

        Such a transaction would fail with a serialization error at its end.
        """
        return self.isolation_level != READ_COMMITTED and run.backend_pid is not None
