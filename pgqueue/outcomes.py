"""Outcomes of an attempt: requested by a handler, decided by a policy, written by a settle."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any, ClassVar

from pgqueue.checks import LONGEST_DELAY
from pgqueue.errors import ArgumentsError


class Cancel(Exception):
    """End the job as cancelled.

    If a handler returns it, its writes commit; if it raises it, they roll back.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Discard(Exception):
    """End the job as failed at once, even if it has attempts left.

    If a handler returns it, its writes commit; if it raises it, they roll back.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Suspended(BaseException):
    """Raised through a handler by ``ctx.sleep()``, and by ``ctx.each()`` at a stop: the job goes on
    later, from the beginning of its handler.

    No ``except Exception`` catches it, and ``finally`` runs.  A middleware that catches every
    ``BaseException`` raises it again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.delay = timedelta(seconds=seconds)


class Stopped(BaseException):
    """Why an async handler ends at the end of the grace period: the attempt is interrupted."""


class Snooze(Exception):
    """Run the job again after ``delay``.  A snooze uses up no attempt, and may be repeated.

    ``ctx.attempt`` does not change, so do not use it to decide: a handler that snoozes whenever
    ``ctx.attempt`` is 1 snoozes for ever.

    If a handler returns it, its writes commit; if it raises it, they roll back.
    """

    def __init__(self, delay: timedelta) -> None:
        if not isinstance(delay, timedelta):
            raise ArgumentsError(f"Snooze takes a timedelta, not {delay!r}; timedelta(minutes=5)?")
        if not timedelta(0) <= delay <= LONGEST_DELAY:
            raise ArgumentsError(
                f"Snooze takes a timedelta from zero to {LONGEST_DELAY.days} days, not {delay!r}: "
                "the job would run again at once and for ever, or never"
            )
        super().__init__(delay)
        self.delay = delay


class AttemptEnd(StrEnum):
    """How an unsuccessful attempt ended: the ``outcome`` of a ``job_attempts`` row."""

    FAILED = "failed"
    """The handler raised."""
    TIMEOUT = "timeout"
    """The handler ran past the task's timeout."""
    CRASHED = "crashed"
    """The handler's child process died, or the worker died, or the worker was cut off from the
    database until it was declared dead."""
    INTERRUPTED = "interrupted"
    """The worker was stopped and the handler did not end within the grace period.  Counts towards
    ``max_interruptions`` instead of ``max_attempts``."""
    CANCELLED = "cancelled"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as text to store: limited in size, and without the values of local variables."""

    type: str
    message: str
    traceback: str
    place: str = ""
    """The functions of the application through which the error was raised, the handler first; a
    function of a library is not among them, and one that calls itself is named once."""

    @property
    def fingerprint(self) -> int:
        """A number that is the same for errors of one type from one place in the code.

        Neither the message nor a line number counts.  64 bits, with a sign, as a ``bigint``.
        """
        digest = sha256(f"{self.type}\n{self.place}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned; ``result`` is its return value, as JSON."""

    result: Any = None
    keeps_writes: ClassVar[bool] = True
    """Whether what the handler wrote through its Session is committed with this outcome."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed; the job may start again after ``delay``.  None: at its old ``run_at``."""

    delay: timedelta | None
    error: ErrorReport
    end: AttemptEnd = AttemptEnd.FAILED
    give_up_after: timedelta | None = None
    """The job fails instead if the next attempt would start later than this after the start of the
    first one."""
    keeps_writes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed and the job is not retried."""

    error: ErrorReport
    end: AttemptEnd = AttemptEnd.FAILED
    keeps_writes: bool = False
    """Whether the handler returned this request: its writes are kept."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler asked to end the job as cancelled."""

    reason: str
    keeps_writes: bool = False
    """Whether the handler returned this request: its writes are kept."""


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to run again after ``delay``; the attempt does not count."""

    delay: timedelta
    keeps_writes: bool = False
    """Whether the handler returned this request: its writes are kept."""


@dataclass(frozen=True, slots=True)
class Released:
    """The attempt never started; its message is put back unchanged."""

    keeps_writes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The attempt never started: its arguments belong to another version of the task.

    The job waits for a worker that can read them.  It fails once it has waited for
    ``max_unreadable``.
    """

    error: ErrorReport
    max_unreadable: timedelta
    keeps_writes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A stop has interrupted the attempt; the job restarts, unless this was its last interruption.

    The attempt does not count towards ``max_attempts``.
    """

    max_interruptions: int
    keeps_writes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The attempt never started: crashes have used up all attempts of the job."""

    keeps_writes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Expired:
    """The attempt never started, because its job has expired.  The job is cancelled."""

    reason: str
    keeps_writes: ClassVar[bool] = False


Outcome = (
    Succeeded
    | Retried
    | Failed
    | Cancelled
    | Snoozed
    | Interrupted
    | Released
    | Unreadable
    | Exhausted
    | Expired
)


def is_plain_success(outcome: Outcome) -> bool:
    """Whether the attempt succeeded without a result to store: the common case."""
    return isinstance(outcome, Succeeded) and outcome.result is None
