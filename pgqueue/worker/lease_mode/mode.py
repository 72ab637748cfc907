"""Lease mode: a claimer fills the job buffer, slots run its jobs, a settler writes outcomes."""

from collections.abc import Sequence
from threading import Event

from sqlalchemy import QueuePool
from sqlalchemy.engine.interfaces import IsolationLevel

from pgqueue import redaction
from pgqueue.worker.config import WorkerConfig
from pgqueue.worker.lease_mode.claimer import Claimer
from pgqueue.worker.lease_mode.settler import Settler
from pgqueue.worker.lease_mode.slot import LeaseSlot
from pgqueue.worker.mode import LAST_CLAIM, Ended
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread, wait_until
from pgqueue.worker.timeouts import end_transactions

logger = redaction.logger(__name__)

LAST_ANSWER = 4.0
"""Seconds for a cancelled claim to end."""


class LeaseMode:
    """Commits claims first, many at a time; handlers run outside the claim's transaction."""

    def __init__(self, runtime: WorkerRuntime, config: WorkerConfig, *, until_empty: bool) -> None:
        self._runtime = runtime
        self._settler = Settler(
            runtime.engine,
            runtime.buffer,
            runtime.identity,
            runtime.outage,
            goes_on=self._goes_on,
            is_kept=runtime.is_kept if runtime.deletes_at_once else None,
        )
        self._claimer = Claimer(
            runtime,
            poll_interval=config.poll_interval.total_seconds(),
            until_empty=until_empty,
            pace=self._pace,
        )
        self.slots = [LeaseSlot(runtime) for _ in range(config.slots)]
        _warn_of_small_pool(runtime)

    @property
    def threads(self) -> Sequence[WorkerThread]:
        return self._settler, self._claimer

    @property
    def finished(self) -> Event:
        return self._claimer.finished

    def use_isolation(self, level: IsolationLevel) -> None:
        self._runtime.isolation_level = level

    def start(self) -> None:
        for thread in (self._settler, *self.slots, self._claimer):
            thread.start()

    def replace_slot(self, place: int) -> LeaseSlot:
        old, self.slots[place] = self.slots[place], LeaseSlot(self._runtime)
        self.slots[place].start()
        return old

    def end_claims(self) -> None:
        wait_until(lambda: not self._claimer.is_alive(), lambda: LAST_CLAIM)
        if self._claimer.is_alive():
            self._claimer.cancel()
            self._claimer.join(LAST_ANSWER)

    def end_attempts(self, ended: Sequence[Ended], *, seconds: float) -> list[Ended]:
        left = end_transactions(self._runtime, [run for run, _ in ended])
        return [each for each in ended if each[0] in left]

    def settle(self, ended: Sequence[Ended]) -> None:
        for run, outcome in ended:
            self._runtime.note_times(run)
            self._runtime.buffer.done(run.claimed, outcome)

    def close(self, *, seconds: float) -> None:
        if self._settler.is_alive():
            self._settler.finish(seconds=seconds)

    def _pace(self) -> tuple[int, float]:
        """How many jobs have run, and for how many seconds they have kept the slots busy."""
        return sum(slot.ran for slot in self.slots), sum(slot.busy for slot in self.slots)

    def _goes_on(self, behind: bool) -> None:
        """Wake the claimer: settles have inserted messages that may be due before it wakes."""
        if behind:
            self._runtime.cursors.rewind()
        self._runtime.listener.poke()


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
