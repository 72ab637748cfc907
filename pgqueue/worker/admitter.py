"""The admitter: moves jobs that wait for room in their limits to the message queue.

A worker has one if its application has limits, or if limits were ever declared in its database.
Rounds find every job; the hints that begin one sooner may be lost.
"""

import time
from collections.abc import Callable, Iterable
from threading import Condition, Event
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.limits import Limited
from pgqueue.repository import Admissions, Claimed
from pgqueue.worker.admitting import AdmissionRounds, Step
from pgqueue.worker.reconnecting import ReconnectingConnection, is_lock_timeout
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

T = TypeVar("T")

SWEEP_EVERY = 10.0
"""Seconds between two looks for free places."""
MOMENT = 0.2
LAST_ROUND = 10.0
"""Seconds that a worker which is to end when no job is left waits for a round."""


class Admitter(WorkerThread):
    """The admitting thread.  Every worker may have one; a lock lets one admit at a time."""

    def __init__(
        self,
        connection: ReconnectingConnection,
        rounds: AdmissionRounds,
        *,
        limited: Limited,
        poll_interval: float,
        stopping: Event,
        on_admitted: Callable[[], object],
    ) -> None:
        super().__init__(name="admitter")
        self.is_in_use = bool(limited.limits)
        self.admitted = 0
        """How many jobs this worker has admitted."""
        self._limited = limited
        self._rounds = rounds
        self._poll_interval = poll_interval
        self._stopping = stopping
        self._on_admitted = on_admitted
        self._awake = Event()
        self._round_over = Condition()
        self._begun = self._ended = 0
        """The numbers of the rounds that have begun and ended last."""
        self._swept_at = time.monotonic()
        self._reconnecting = connection

    def look_for_limits(self, connection: Connection) -> None:
        """See whether limits are in use: old jobs may wait for limits that the code has no more."""
        self.is_in_use = self.is_in_use or Admissions(connection).are_declared()

    def hint(self) -> None:
        """Begin a round soon: a job may have come, or a place may be free."""
        self._awake.set()

    def settled(self, jobs: Iterable[Claimed]) -> None:
        """Begin a round if one of these jobs may have given its place back."""
        limited = self._limited
        if any(job.task in limited.tasks or job.queue in limited.queues for job in jobs):
            self.hint()

    def has_admitted_since(self, count: int) -> bool:
        """Run a round; returns whether ``admitted`` differs from ``count`` then."""
        if not self.is_in_use:
            return False
        wanted = self._begun + 1  # a round that runs now may have read too early
        self.hint()
        with self._round_over:
            self._round_over.wait_for(
                lambda: self._ended >= wanted or self._stopping.is_set(), LAST_ROUND
            )
        return self.admitted != count

    def work(self) -> None:
        while not self._stopping.is_set() and not self._reconnecting.attempt(self._declare):
            pass
        wait = 0.0
        while not self._stopping.is_set():
            self._awake.wait(wait)
            self._awake.clear()
            self._begun += 1
            wait = self._run_round()
            self._tell_end(self._begun)
        self._tell_end(self._begun)
        self._reconnecting.close()

    def stop(self, *, seconds: float) -> None:
        """End, and cancel a statement that takes longer than a moment: it can be repeated."""
        self.hint()
        if self.is_alive():
            self.join(min(seconds, MOMENT))
        if self.is_alive():
            self._reconnecting.cancel()
            self.join(seconds)

    def _tell_end(self, number: int) -> None:
        with self._round_over:
            self._ended = number
            self._round_over.notify_all()

    def _declare(self, connection: Connection) -> bool:
        if self._limited.limits:
            with connection.begin():
                Admissions(connection).declare(self._limited.limits.values())
        return True

    def _run_round(self) -> float:
        """Admit from all lanes; returns the seconds until the next round."""
        self._rounds.begin()
        wait = self._poll_interval
        step: Step | None = Step(0, is_last=False)
        while step is not None and not step.is_last and not self._stopping.is_set():
            step = self._unless_locked(self._rounds.step)
            if step is not None and step.seconds_to_next is not None:
                wait = min(wait, step.seconds_to_next)
            if step is not None and step.admitted:
                self.admitted += step.admitted
                self._on_admitted()
        self._sweep()
        return wait

    def _sweep(self) -> None:
        """Delete places that are free, now and then."""
        is_more = time.monotonic() - self._swept_at >= SWEEP_EVERY
        while is_more and not self._stopping.is_set():
            is_more = bool(self._unless_locked(self._rounds.sweep))
            self._swept_at = time.monotonic()

    def _unless_locked(self, step: Callable[[Connection], T]) -> T | None:
        """Run a step in a transaction of its own; None if the database fails it, or if a table is
        locked or another worker admits for long: the next round tries again."""

        def attempt(connection: Connection) -> T | None:
            try:
                with connection.begin():
                    return step(connection)
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
                logger.info("admitter: waiting for a lock; trying again")
                return None

        return self._reconnecting.attempt(attempt)
