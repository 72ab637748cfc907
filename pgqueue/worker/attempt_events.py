"""Calls the callbacks of ``queue.on_attempt_end``, on a thread of their own.

The threads that settle only put the events into a queue: a slow callback delays no job.
"""

from collections.abc import Iterable, Sequence
from contextvars import copy_context
from datetime import timedelta
from queue import SimpleQueue

from pgqueue import redaction
from pgqueue.events import AttemptCallback, AttemptEnded, AttemptOutcome
from pgqueue.handler.ended import event_of
from pgqueue.meta import read_meta
from pgqueue.outcomes import AttemptEnd, Outcome
from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued
from pgqueue.repository.tables import CRASH
from pgqueue.worker.server_clock import ServerClock
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

MOST = 100_000
"""Events that wait for slow callbacks; further events are dropped."""


class AttemptEvents(WorkerThread):
    """Calls each callback with each event, one at a time."""

    def __init__(self, callbacks: Sequence[AttemptCallback], clock: ServerClock) -> None:
        super().__init__(name="events")
        self._callbacks = callbacks
        self._clock = clock
        self._waiting: SimpleQueue[AttemptEnded | None] = SimpleQueue()
        self._dropped = 0

    def work(self) -> None:
        while (event := self._waiting.get()) is not None:
            for callback in self._callbacks:
                _call(callback, event)

    def finish(self, *, seconds: float) -> None:
        """End after the last event; after ``seconds``, discard the rest."""
        self._waiting.put(None)
        if self.is_alive():
            self.join(seconds)
        if self._dropped or self.is_alive():
            left = self._dropped + self._waiting.qsize()
            logger.warning("%d events were not passed on: the callbacks are too slow", left)

    def ended(
        self,
        claimed: Claimed,
        outcome: Outcome,
        job_outcome: str | None,
        times: tuple[float, float] | None,
    ) -> None:
        """Tell the end of an attempt of this worker.

        ``job_outcome``: how the job has ended; None if it goes on.  ``times``: when the handler
        started and ended; None if it has not run.
        """
        waited = ran = None
        if times is not None:
            started_at, ended_at = times
            ran = timedelta(seconds=ended_at - started_at)
            seconds = self._clock.waited(claimed, started_at)
            waited = None if seconds is None else timedelta(seconds=seconds)
        self._put(event_of(claimed, outcome, job_outcome, waited=waited, ran=ran))

    def rescued(self, attempts: Iterable[Rescued]) -> None:
        """Tell the crashes of other workers that this worker has recorded."""
        for job_id, outcome, task, queue, attempt, max_attempts, meta in attempts:
            self._put(
                AttemptEnded(
                    job_id=job_id,
                    task=task,
                    queue=queue,
                    attempt=min(attempt, max_attempts),
                    max_attempts=max_attempts,
                    outcome=AttemptOutcome(outcome or AttemptOutcome.RETRIED),
                    is_final=outcome is not None,
                    end=AttemptEnd.CRASHED,
                    error=CRASH,
                    meta=read_meta(meta),
                )
            )

    def _put(self, event: AttemptEnded) -> None:
        if self._waiting.qsize() < MOST:
            self._waiting.put(event)
        else:
            self._dropped += 1


def _call(callback: AttemptCallback, event: AttemptEnded) -> None:
    try:
        copy_context().run(callback, event)
    except BaseException:  # the application's code; its error must not end the events
        name = getattr(callback, "__qualname__", repr(callback))
        logger.exception("job %d: the on_attempt_end callback %s has failed", event.job_id, name)
