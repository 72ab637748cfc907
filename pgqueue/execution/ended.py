"""What is told of an attempt that has ended: its word, its event, its line in the log."""

from datetime import datetime, timedelta

from pgqueue.events import AttemptEnded, AttemptOutcome
from pgqueue.execution.attempt import log_final_failure
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Exhausted,
    Expired,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.tables import CRASHED

CRASH = ErrorReport("WorkerCrashed", CRASHED, "")

WORDS: dict[type[Outcome], AttemptOutcome] = {
    Succeeded: AttemptOutcome.SUCCEEDED,
    Retried: AttemptOutcome.RETRIED,
    Failed: AttemptOutcome.FAILED,
    Exhausted: AttemptOutcome.FAILED,
    Expired: AttemptOutcome.CANCELLED,
    Cancelled: AttemptOutcome.CANCELLED,
    Snoozed: AttemptOutcome.SNOOZED,
    Released: AttemptOutcome.RELEASED,
    Unreadable: AttemptOutcome.UNREADABLE,
    Interrupted: AttemptOutcome.INTERRUPTED,
}


def word_of(outcome: Outcome, job_outcome: str | None) -> AttemptOutcome:
    """The outcome of an attempt in one word; ``job_outcome``: how its job has ended, if it has."""
    return AttemptOutcome(job_outcome or WORDS[type(outcome)])


def event_of(
    claimed: Claimed,
    outcome: Outcome,
    job_outcome: str | None,
    *,
    waited: timedelta | None,
    ran: timedelta | None,
) -> AttemptEnded:
    """The event of an attempt that has ended."""
    return AttemptEnded(
        job_id=claimed.job_id,
        task=claimed.task,
        queue=claimed.queue,
        attempt=min(claimed.attempt, claimed.max_attempts),
        max_attempts=claimed.max_attempts,
        outcome=word_of(outcome, job_outcome),
        is_final=job_outcome is not None,
        end=_end_of(outcome),
        error=_error_of(outcome),
        waited=waited,
        ran=ran,
    )


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
    log_final_failure(claimed.job_id, claimed.task, reason)


def _end_of(outcome: Outcome) -> AttemptEnd | None:
    match outcome:
        case Exhausted():
            return AttemptEnd.CRASHED
        case Interrupted():
            return AttemptEnd.INTERRUPTED
        case Retried(_, _, end) | Failed(_, end):
            return end
    return None


def _error_of(outcome: Outcome) -> ErrorReport | None:
    match outcome:
        case Exhausted():
            return CRASH
        case Retried() | Failed() | Unreadable():
            return outcome.error
    return None
