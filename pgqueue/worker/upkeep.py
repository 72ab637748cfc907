"""Upkeep: reads twice a second what operators want and which workers have died, and rescues jobs.

It has a connection of its own, because an application may lock the tables for a long time.  If a
table is locked, upkeep tries again later, and the worker uses what was read before; a locked table
of schedules, batches or workflows delays no pause, no cancel and no rescue.
"""

import time
from collections.abc import Sequence
from threading import Event

from sqlalchemy import Connection

from pgqueue.database.settings import UPKEEP
from pgqueue.repository.rescue import Rescued, SeenWorker
from pgqueue.repository.workers import Notices
from pgqueue.worker.claiming.sweeps import LATEST_SWEEP
from pgqueue.worker.duties import depths, minutes
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.duties.declared_tasks import DeclareTasks
from pgqueue.worker.duties.minutes import MinuteWriter
from pgqueue.worker.duties.rescue import Rescue, declare_dead, forget_dead
from pgqueue.worker.duty_list import Duty, DutyList, Every
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.looks import Looks
from pgqueue.worker.pace import Pace
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.slots import Slots
from pgqueue.worker.timers import Timers

READ_EVERY = 0.5
"""Seconds between two reads while handlers run: a cancel reaches a handler within a second."""
SLOWER_WHEN_IDLE = 3
"""While no handler runs, the interval is this many times as long: a pause must be seen within two
seconds."""
FORGET_EVERY = 3600.0
"""Seconds between two deletions of the rows of workers that died long ago."""


class ReadNotices(Duty):
    """Reads the notices of operators and of other workers, and does what they ask for.

    Declares workers dead that the heartbeat has found dead, stops handlers of cancelled jobs, tells
    the other threads what is due, and rescues the jobs of dead workers.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        slots: Slots,
        admitter: Admitter,
        timers: Timers | None,
        looks: Looks | None,
        janitor: Janitor,
    ) -> None:
        super().__init__(repeat_after=READ_EVERY)
        self.has_looked = Event()
        """Set when the paused queues and tasks are known: a worker must not claim their jobs."""
        self.dead: Sequence[SeenWorker] = ()
        """Workers that the heartbeat has found dead."""
        self._runtime = runtime
        self._slots = slots
        self._admitter = admitter
        self._timers = timers
        self._looks = looks
        self._janitor = janitor
        self._has_read_all = False
        """Whether the last read of everything has succeeded.  If not, the notices that stop jobs
        are read first, by themselves."""
        self._swept_to: int | None = None
        """Up to where the last sweep has read what waits for ended jobs."""
        self._sweep_at, self._pace = float("-inf"), Pace()
        self._rescue = Rescue(on_rescued=self._rescued)
        self._put_off = 0
        """How many times in a row the step was put off."""

    def puts_off(self) -> float:
        """While no handler runs, there is less to look for."""
        is_idle = self.has_looked.is_set() and not self.dead and not self._slots.job_ids()
        self._put_off = (self._put_off + 1) % SLOWER_WHEN_IDLE if is_idle else 0
        return READ_EVERY if self._put_off else 0.0

    def step(self, connection: Connection) -> float:
        began = time.monotonic()
        running = self._slots.job_ids()
        # The list is forgotten even if a table is locked: the heartbeat finds these workers again.
        dead, self.dead = self.dead, ()
        if dead:
            declare_dead(connection, dead)
        if not self._has_read_all:
            self._read(connection, running)
        self._has_read_all = False
        self._read_all(connection, running)
        self._has_read_all = True
        return began + READ_EVERY - time.monotonic()

    def _read(self, connection: Connection, running: Sequence[int]) -> None:
        """Read what operators want and which workers have died: no table of schedules, workflows or
        batches, which may be locked."""
        self._do(connection, self._rescue.read_notices(connection, running=running))

    def _read_all(self, connection: Connection, running: Sequence[int]) -> None:
        """Read in the same statement what is due, and what waits for ended jobs."""
        began = time.monotonic()
        sweeps = self._looks is not None and began >= self._sweep_at
        notices = self._rescue.read_notices(
            connection,
            running=running,
            scheduled=None if self._timers is None else self._timers.task_names,
            sweeps=sweeps,
            swept_to=self._swept_to,
        )
        if sweeps:
            self._swept_to = notices.swept_to
            self._pace.took(time.monotonic() - began)
            self._sweep_at = began + min(self._pace.rest, LATEST_SWEEP)
        self._do(connection, notices)

    def _do(self, connection: Connection, notices: Notices) -> None:
        if self._looks is not None and notices.over:
            self._looks.ended(notices.over)
        self._runtime.identity.paused = notices.paused
        self.has_looked.set()
        if self._timers is not None:
            self._timers.noticed(notices)
        if notices.has_signals:
            self._runtime.signalled()
        if notices.has_due_count:
            self._janitor.count_batches()
        if notices.has_past_deadline:
            self._janitor.keep_deadlines()
        self._slots.cancel(notices.cancelled, notices.killed)
        self._rescue.rescue(connection, notices)

    def _rescued(self, attempts: Sequence[Rescued]) -> None:
        self._admitter.look()
        self._runtime.ledger.rescued(attempts)


class Upkeep(DutyList):
    """Declares tasks; reads notices and rescues jobs; forgets workers that died long ago; writes
    the statistics; starts a count of the queues if this worker is the one that counts."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        slots: Slots,
        admitter: Admitter,
        *,
        timers: Timers | None,
        looks: Looks | None,
        janitor: Janitor,
        notify: bool,
    ) -> None:
        # Before the first claim, which waits until the notices were read.
        declare = DeclareTasks(runtime.tasks, notify=notify)
        self._notices = ReadNotices(runtime, slots, admitter, timers, looks, janitor)
        self.has_looked = self._notices.has_looked
        duties: list[Duty] = [declare, self._notices, Every(FORGET_EVERY, forget_dead)]
        self._minutes: MinuteWriter | None = None
        if runtime.statistics is not None:
            self._minutes = MinuteWriter(
                runtime.statistics,
                application=runtime.application,
                version=runtime.identity.version,
            )
            duties.append(Every(minutes.EVERY, self._minutes.write))
            duties.append(Every(depths.EVERY, janitor.count_if_elected))
        super().__init__(runtime.engine, UPKEEP, runtime.outage, duties, name="upkeep")

    def reap(self, dead: Sequence[SeenWorker]) -> None:
        """Take the list of workers that the heartbeat has found dead; it replaces the last list."""
        self._notices.dead = dead
        if dead:
            self.wake_for(self._notices)

    def end(self) -> None:
        """Write the last statistics: all attempts are settled.  In an outage, do without."""
        if self._minutes is not None and self.reconnecting.is_open:
            self.reconnecting.run(self._minutes.write)
