"""What may become of an attempt: said by a handler, decided by a policy, written by a settle."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from pgqueue.errors import ArgumentsError


class Cancel(Exception):
    """End the job as cancelled.

    Returned by a handler, its writes commit; raised, they roll back.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Discard(Exception):
    """End the job as failed at once, whatever attempts it has left.

    Returned by a handler, its writes commit; raised, they roll back.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Exception):
    """Run the job again after ``delay``; no attempt is used up, and nothing limits how often.

    ``ctx.attempt`` stays what it was, so decide by something that changes: a handler that snoozes
    in its first attempt would do so for ever.

    Returned by a handler, its writes commit; raised, they roll back.
    """

    def __init__(self, delay: timedelta) -> None:
        if not isinstance(delay, timedelta):
            raise ArgumentsError(f"Snooze takes a timedelta, not {delay!r}; timedelta(minutes=5)?")
        super().__init__(delay)
        self.delay = delay


class AttemptEnd(StrEnum):
    """How an attempt ended that did not end well: the ``outcome`` of a ``job_attempts`` row."""

    FAILED = "failed"
    """The handler raised."""
    TIMEOUT = "timeout"
    """The handler ran past the task's timeout."""
    CRASHED = "crashed"
    """The worker died, or was cut off from the database for the whole grace; or the handler's own
    process died."""
    INTERRUPTED = "interrupted"
    """The worker was stopped and the handler did not end within the grace."""
    CANCELLED = "cancelled"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error in words that can be stored: bounded, and without the values of local variables."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned; ``result`` is what it returned, as JSON."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed and the job may start again after ``delay``; None keeps its place."""

    delay: timedelta | None
    error: ErrorReport
    end: AttemptEnd = AttemptEnd.FAILED


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed and there is no further one."""

    error: ErrorReport
    end: AttemptEnd = AttemptEnd.FAILED


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler asked for the job to end as cancelled."""

    reason: str


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to be run again after ``delay``; the attempt does not count."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Released:
    """The attempt never started: its message goes back as it was."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The attempt never started: crashes have used up all the attempts the job had."""


Outcome = Succeeded | Retried | Failed | Cancelled | Snoozed | Released | Exhausted


def is_plain_success(outcome: Outcome) -> bool:
    """Whether there is nothing more to write down: the common case."""
    return isinstance(outcome, Succeeded) and outcome.result is None
