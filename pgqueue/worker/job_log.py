"""Logs each attempt of a worker in one line, if the worker is asked to: ``log_jobs``."""

import logging
from datetime import timedelta
from enum import StrEnum

from pgqueue import redaction
from pgqueue.events import AttemptCallback, AttemptEnded, AttemptOutcome

logger = redaction.logger(__name__)


class LogJobs(StrEnum):
    """The level at which a worker logs the end of each attempt."""

    INFO = "info"
    DEBUG = "debug"


def job_log(level: LogJobs) -> AttemptCallback:
    """Return the callback that logs each attempt which has started."""
    number = logging.INFO if level is LogJobs.INFO else logging.DEBUG

    def log(event: AttemptEnded) -> None:
        if event.outcome is AttemptOutcome.RELEASED:
            return
        waited, ran = _seconds(event.waited), _seconds(event.ran)
        logger.log(
            number,
            "job %d %s %s: attempt %d of %d, waited %s s, ran %s s",
            event.job_id,
            event.task,
            event.outcome.value,
            event.attempt,
            event.max_attempts,
            _shown(waited),
            _shown(ran),
            extra={
                "job_id": event.job_id,
                "task": event.task,
                "queue": event.queue,
                "attempt": event.attempt,
                "outcome": event.outcome.value,
                "waited": waited,
                "ran": ran,
                "meta": event.meta,
            },
        )

    return log


def _seconds(time: timedelta | None) -> float | None:
    return None if time is None else round(time.total_seconds(), 6)


def _shown(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.3f}"
