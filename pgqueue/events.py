"""Events: the values that callbacks of ``queue.on_attempt_end`` receive."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

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


class AttemptOutcome(StrEnum):
    """The outcome of an attempt, as recorded in the tables."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    """The attempt failed, and the job is retried."""
    FAILED = "failed"
    """The job has failed for good."""
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    RELEASED = "released"
    """The attempt was released before it started; it does not count."""
    INTERRUPTED = "interrupted"
    """The worker was stopped while the handler ran; the attempt does not count."""
    UNREADABLE = "unreadable"
    """The arguments belong to another version of the task; the job waits for a worker that can read
    them."""


_RECORDED_AS: dict[type[Outcome], AttemptOutcome] = {
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


def attempt_outcome(outcome: Outcome, ended: str | None = None) -> AttemptOutcome:
    """The outcome as the tables record it; ``ended``: how the job has ended, if it has."""
    return AttemptOutcome(ended or _RECORDED_AS[type(outcome)])


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt whose outcome is committed."""

    job_id: int
    task: str
    queue: str
    attempt: int
    max_attempts: int
    outcome: AttemptOutcome
    is_final: bool
    """Whether the job has ended: succeeded, failed or cancelled."""
    end: AttemptEnd | None = None
    """How an unsuccessful attempt ended, for example by its timeout."""
    error: ErrorReport | None = None
    """Type, message and traceback; secrets are masked, as in ``job_attempts``."""
    waited: timedelta | None = None
    """From the time the job was due to the start of the handler, by PostgreSQL's clock.  None if
    the handler has not started, or if another worker started it."""
    ran: timedelta | None = None
    """How long the handler ran.  None if it has not started, or if another worker started it."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The ``meta`` of the job, as ``ctx.meta``."""
    moved_to: str | None = None
    """The queue to which the retry moves the job; None if it stays in its queue."""


AttemptCallback = Callable[[AttemptEnded], object]
