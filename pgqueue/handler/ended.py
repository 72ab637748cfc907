"""What is told of an attempt that is settled: its event, and the line of a job that has failed."""

from datetime import datetime, timedelta

from pgqueue.events import AttemptEnded, attempt_outcome
from pgqueue.handler.outcome import log_final_failure
from pgqueue.meta import read_meta
from pgqueue.outcomes import (
    AttemptEnd,
    ErrorReport,
    Exhausted,
    Failed,
    Interrupted,
    Outcome,
    Retried,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.tables import CRASH, CRASHED


def event_of(
    claimed: Claimed,
    outcome: Outcome,
    ended: str | None,
    *,
    waited: timedelta | None,
    ran: timedelta | None,
) -> AttemptEnded:
    """The event of an attempt that is settled; ``ended``: how its job has ended, if it has."""
    end: AttemptEnd | None = None
    match outcome:
        case Exhausted():
            end = AttemptEnd.CRASHED
        case Interrupted():
            end = AttemptEnd.INTERRUPTED
        case Retried() | Failed():
            end = outcome.end
    return AttemptEnded(
        job_id=claimed.job_id,
        task=claimed.task,
        queue=claimed.queue,
        attempt=min(claimed.attempt, claimed.max_attempts),
        max_attempts=claimed.max_attempts,
        outcome=attempt_outcome(outcome, ended),
        is_final=ended is not None,
        end=end,
        error=error_of(outcome),
        waited=waited,
        ran=ran,
        meta=read_meta(claimed.meta),
        moved_to=outcome.queue if isinstance(outcome, Retried) and ended is None else None,
    )


def error_of(outcome: Outcome) -> ErrorReport | None:
    """The error of an attempt, if its outcome has one."""
    match outcome:
        case Exhausted():
            return CRASH
        case Retried() | Failed() | Unreadable():
            return outcome.error
    return None


def since_due(claimed: Claimed, read_at: str) -> timedelta | None:
    """How long a job had been due at a time that the database has written."""
    try:
        return datetime.fromisoformat(read_at) - datetime.fromisoformat(claimed.run_at)
    except (TypeError, ValueError):  # an application's own datestyle, or a time before the year 1
        return None


def log_job_failure(claimed: Claimed, outcome: Outcome) -> None:
    """Log why a job has failed, unless the error of its handler was logged when it happened."""
    match outcome:
        case Failed(error, AttemptEnd.DISCARDED):
            reason = f"discarded: {error.message}"
        case Failed():
            return
        case Retried(_, error) | Unreadable(error):
            reason = error.message
        case Interrupted(limit):
            reason = f"interrupted {limit} times, which is max_interruptions"
        case _:
            reason = CRASHED
    log_final_failure(claimed, reason)
