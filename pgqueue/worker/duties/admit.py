"""The admitter: moves jobs that wait for room in their limits to the message queue.

A worker runs this thread if its application has limits, or if limits were ever declared in its
database.  It admits in rounds.  A round reads all lanes, one after the other, in short
transactions.  A hint begins a round sooner; a lost hint does no harm, because a later round finds
every job.
"""

import time
from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import Connection

from pgqueue.database.settings import ADMITTING
from pgqueue.job_queue import PgQueue
from pgqueue.repository.claim import Claimed
from pgqueue.repository.limits import Limits
from pgqueue.tasks.pauses import under_all_names
from pgqueue.worker.duties.admission_rounds import AdmissionRounds
from pgqueue.worker.loop import Loop
from pgqueue.worker.runtime import WorkerRuntime

SWEEP_EVERY = 10.0
"""Seconds between two sweeps, which delete free places."""
CANCEL_AFTER = 0.2
"""Seconds for which a stopping worker waits for a statement before it cancels the statement."""
LAST_ROUND = 10.0
"""Seconds for which a worker that ends when no job is left waits for a round."""


class Admitter(Loop):
    """The admitting thread.  Many workers may have one; a lock lets one of them admit at a time.

    A step of the loop is a round.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        queue: PgQueue,
        *,
        most_ready: int,
        poll_interval: timedelta,
    ) -> None:
        self._poll_interval = poll_interval.total_seconds()
        super().__init__(
            runtime.engine,
            ADMITTING,
            runtime.outage,
            name="admitter",
            stopping=runtime.stopping,
            repeat_after=self._poll_interval,
            patience=CANCEL_AFTER,
        )
        self._limited = limited = queue.limited
        self.is_in_use = bool(limited.limits)
        self.admitted = 0
        """How many jobs this worker has admitted."""
        identity = runtime.identity
        self._rounds = AdmissionRounds(
            lambda: identity.served,
            lambda: under_all_names(runtime.tasks, identity.paused),
            lambda: runtime.open_tasks,
            notify=queue.notify,
            most_ready=most_ready,
        )
        self._work_may_be_there = runtime.work_may_be_there
        self._are_declared = not limited.limits
        """Whether the limits of this application are in the database."""
        self._begun = self._ended = 0
        """The numbers of the rounds that have begun and ended last, without an error."""
        self._swept_at = time.monotonic()

    def look_for_limits(self, connection: Connection) -> None:
        """Find out whether limits are in use: jobs may wait for limits of earlier code."""
        self.is_in_use = self.is_in_use or Limits(connection).are_declared()

    def settled(self, jobs: Iterable[Claimed]) -> None:
        """Begin a round soon if one of these jobs may have held a place."""
        limited = self._limited
        if any(job.task in limited.tasks or job.queue in limited.queues for job in jobs):
            self.wake()

    def has_admitted_since(self, count: int) -> bool:
        """Run a round; returns whether ``admitted`` differs from ``count`` after it."""
        if not self.is_in_use:
            return False
        wanted = self._begun + 1  # a round that runs now may have read too early
        self.wake()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended >= wanted or self.stopping.is_set(), LAST_ROUND
            )
        return self.admitted != count

    def step(self, connection: Connection) -> float:
        """Run a round, and now and then a sweep; returns the seconds until the next round."""
        self._begun += 1
        try:
            if not self._are_declared:
                with connection.begin():
                    Limits(connection).declare(self._limited.limits.values())
                self._are_declared = True
            self._rounds.begin()
            wait, is_last = self._poll_interval, False
            while not is_last and not self.stopping.is_set():
                admitted, is_last, seconds_to_next = self._rounds.guarded_step(connection)
                if seconds_to_next is not None:
                    wait = min(wait, seconds_to_next)
                if admitted:
                    self.admitted += admitted
                    self._work_may_be_there()
            is_to_sweep = time.monotonic() - self._swept_at >= SWEEP_EVERY
            while is_to_sweep and not self.stopping.is_set():
                self._swept_at = time.monotonic()
                with connection.begin():
                    is_to_sweep = self._rounds.sweep(connection)
            self._ended = self._begun  # one that fails may leave what could be admitted
        finally:
            with self._changed:
                self._changed.notify_all()
        return wait
