"""The admitter: moves jobs that wait for room in their limits to the message queue.

A worker runs this thread if its application has limits, or if limits were ever declared in its
database.  It admits in rounds, in short transactions:

- A round of all lanes reads each from its start.  It finds every job.
- A round of some lanes reads those that may have jobs to admit, because places under their keys
  were given up or because their time has come, each from where the last read began.  After a
  notification it reads those in which no job waits for a place, and looks for new ones.

Rounds of all lanes may take a twentieth of the time: there may be very many lanes, and these rounds
step over dead index entries while a transaction holds an old snapshot.  A hint begins a round
sooner; a lost hint does no harm, because a later round of all lanes finds every job.
"""

import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import Connection

from pgqueue.database.settings import ADMITTING
from pgqueue.job_queue import PgQueue
from pgqueue.repository.claim import Claimed
from pgqueue.repository.limits import Limits
from pgqueue.rules.limits import SEPARATOR
from pgqueue.tasks.pauses import under_all_names
from pgqueue.worker.duties.admission_rounds import AdmissionRounds
from pgqueue.worker.loop import WAKE_MARGIN, Loop
from pgqueue.worker.pace import Pace
from pgqueue.worker.runtime import WorkerRuntime

SWEEP_EVERY = 10.0
"""Seconds between two sweeps, which delete free places; more if sweeps take long."""
FULL_SHARE = 20
"""Rounds of all lanes may take a twentieth of the time, while there is something to do."""
LATEST_FULL = 5.0
"""Seconds after a round of all lanes when the next one is due, while there is something to do."""
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
        """The numbers of the rounds of all lanes that have begun and ended last, without an error.
        """
        self._full_at = float("-inf")
        """When the last round of all lanes has ended."""
        self._is_asked = True
        """Whether something has happened since that a round of all lanes may have to see."""
        self._is_awaited = False
        """Whether a round of all lanes is wanted at once."""
        self._freed: deque[str | None] = deque()
        """Under which keys places may have become free; None: there may be other jobs."""
        self._swept_at, self._pace = time.monotonic(), Pace()

    def look_for_limits(self, connection: Connection) -> None:
        """Find out whether limits are in use: jobs may wait for limits of earlier code."""
        self.is_in_use = self.is_in_use or Limits(connection).are_declared()

    def settled(self, jobs: Iterable[Claimed]) -> None:
        """Begin a round soon if one of these jobs has held a place."""
        if keys := [job.limit_keys for job in jobs if job.limit_keys is not None]:
            self._freed.extend(keys)
            self._wake_at_once()

    def look(self) -> None:
        """Begin a round of all lanes soon: any job may have room now."""
        self._is_awaited = True
        self.notified()

    def notified(self) -> None:
        """Begin a round soon: there may be other jobs."""
        self._freed.append(None)
        self._wake_at_once()

    def has_admitted_since(self, count: int) -> bool:
        """Run a round of all lanes; returns whether ``admitted`` differs from ``count`` after it.

        Returns sooner if another round admits a job.
        """
        if not self.is_in_use:
            return False
        wanted = self._begun + 1  # a round that runs now may have read too early
        self._is_awaited = True
        self._wake_at_once()
        with self._changed:
            self._changed.wait_for(
                lambda: self.admitted != count or self._ended >= wanted or self.stopping.is_set(),
                LAST_ROUND,
            )
        self._is_awaited = False
        return self.admitted != count

    def step(self, connection: Connection) -> float:
        """Run a round, and now and then a sweep; returns the seconds until the next round."""
        rounds, is_done = self._rounds, False
        try:
            if not self._are_declared:
                with connection.begin():
                    Limits(connection).declare(self._limited.limits.values())
                self._are_declared = True
            is_last = not self._begin_round()
            while not is_last and not self.stopping.is_set():
                admitted, is_last = rounds.guarded_step(connection)
                if admitted:
                    self.admitted += admitted
                    self._work_may_be_there()
            if rounds.is_full:
                self._full_at = time.monotonic()
            self._sweep_if_due(connection)
            is_done = True
            if rounds.is_full:
                self._ended = self._begun
        finally:
            if not is_done:  # it may have left what could be admitted
                self._full_at = float("-inf")
            with self._changed:
                self._changed.notify_all()
        now = time.monotonic()
        lane = rounds.known.seconds_left(now)
        until_full = max(self._next_full() - now, 0.0)
        return until_full if lane is None else min(until_full, lane)

    def _begin_round(self) -> bool:
        """Begin a round of all lanes, if it is due, or of those from which jobs may be admitted.

        Returns whether there are any.
        """
        rounds, now = self._rounds, time.monotonic()
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            self._is_asked = True
        has_lanes = True
        if now >= self._next_full():
            rounds.begin()
        else:
            keys = {key for keys in freed if keys for key in keys.split(SEPARATOR)}
            has_lanes = rounds.begin_some(keys, now, is_notified=None in freed)
        if rounds.is_full:
            self._begun += 1
            self._is_asked = self._is_awaited = False
        return has_lanes

    def _next_full(self) -> float:
        """When the next round of all lanes is due."""
        if not self._is_asked and not self._is_awaited:
            return self._full_at + self._poll_interval
        share = 1 if self._is_awaited else FULL_SHARE
        return self._full_at + min(share * self._rounds.full_took, LATEST_FULL)

    def _sweep_if_due(self, connection: Connection) -> None:
        began, is_left = time.monotonic(), True
        if began - self._swept_at < max(SWEEP_EVERY, self._pace.rest):
            return
        while is_left and not self.stopping.is_set():
            with connection.begin():
                is_left = self._rounds.sweep(connection)
        self._swept_at = time.monotonic()
        self._pace.took(self._swept_at - began)

    def _wake_at_once(self) -> None:
        """Wake the thread, also if it would wake in some milliseconds."""
        self.wake(-WAKE_MARGIN)
