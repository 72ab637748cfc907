"""Outcomes of an attempt: requested by a handler, decided by a policy, written by a settle."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any, ClassVar

from pgqueue.checks import LONGEST_DELAY, check_queue_name, check_whole
from pgqueue.errors import ArgumentsError


class Cancel(Exception):
    """End the job as cancelled.

    If a handler returns it, its writes commit; if it raises it, they roll back.

    Args:
        reason: Why, stored as ``Job.last_error``.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Discard(Exception):
    """End the job as failed at once, even if it has attempts left.

    If a handler returns it, its writes commit; if it raises it, they roll back.

    Args:
        reason: Why, stored as ``Job.last_error``.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class TimeIsUp(TimeoutError):
    """Raised by ``ctx.check()`` after the timeout of the attempt, which is recorded as timed
    out."""


class Suspended(BaseException):
    """Raised through a handler by ``ctx.sleep()``, and by ``ctx.each()`` and ``ctx.check()`` at a
    stop: the job goes on later, from the beginning of its handler.

    No ``except Exception`` catches it, and ``finally`` runs.  A middleware that catches every
    ``BaseException`` raises it again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.delay: timedelta = timedelta(seconds=seconds)


class Stopped(BaseException):
    """Why an async handler ends at the end of the grace period: the attempt is interrupted."""


class Snooze(Exception):
    """Run the job again after ``delay``.  A snooze uses up no attempt, and may be repeated.

    ``ctx.attempt`` does not change, so do not use it to decide: a handler that snoozes whenever
    ``ctx.attempt`` is 1 snoozes for ever.

    If a handler returns it, its writes commit; if it raises it, they roll back.

    Args:
        delay: How long, a timedelta.

    Raises:
        ArgumentsError: It is no timedelta from 0 on, or too long.
    """

    def __init__(self, delay: timedelta) -> None:
        _check_delay("Snooze", delay)
        super().__init__(delay)
        self.delay = delay


def _check_delay(what: str, delay: Any) -> None:
    if not isinstance(delay, timedelta):
        raise ArgumentsError(f"{what} takes a timedelta, not {delay!r}; timedelta(minutes=5)?")
    if not timedelta(0) <= delay <= LONGEST_DELAY:
        raise ArgumentsError(
            f"{what} takes a timedelta from zero to {LONGEST_DELAY.days} days, not {delay!r}: "
            "the job would run again at once and for ever, or never"
        )


class RetryLater(Exception):
    """Fail this attempt, and retry the job as is said here, while it has attempts left.

    Counts as a failed attempt, whose error is the exception that has led to it: ``raise
    RetryLater(...) from error``, or inside of an ``except`` block.  ``Retry.only()`` and
    ``never_on()`` do not apply, ``for_at_most()`` does.

    If a handler returns it, its writes commit; if it raises it, they roll back.

    Args:
        delay: How long to wait for the next attempt.  None: as the policy of the task says.
        queue: The queue to which the job moves.  None: as the policy says.  A job whose unique key
            holds in its queue only stays there, and so does one whose queue has limits.
        priority: The priority from 0 to 9 of the job from now on.  None: as the policy says.

    Raises:
        ArgumentsError: The delay is no timedelta from zero on.
        OptionError: No queue can have this name, or no job this priority.
    """

    def __init__(
        self,
        delay: timedelta | None = None,
        *,
        queue: str | None = None,
        priority: int | None = None,
    ) -> None:
        if delay is not None:
            _check_delay("RetryLater", delay)
        if queue is not None:
            check_queue_name(queue, "RetryLater: ")
        if priority is not None:
            check_whole("RetryLater: ", "priority", priority, 0, 9)
        super().__init__(delay, queue, priority)
        self.delay = delay
        self.queue = queue
        self.priority = priority

    def __str__(self) -> str:
        return "the handler asks for another attempt"


def cause_of(error: BaseException) -> BaseException:
    """The error of an attempt: what has led to a RetryLater; any timeout is a TimeoutError."""
    if isinstance(error, TimeIsUp):  # our word for it; operators know that of Python
        return TimeoutError(*error.args).with_traceback(error.__traceback__)
    if not isinstance(error, RetryLater):
        return error
    context = None if error.__suppress_context__ else error.__context__
    return error.__cause__ or context or error


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
    is_followed: bool = False
    """Whether the settle enqueues a follow-up."""
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
    queue: str | None = None
    """The queue to which the job moves; None: it stays."""
    priority: int | None = None
    """The priority of the job from now on; None: it stays."""
    keeps_writes: bool = False
    """Whether the handler returned this request: its writes are kept."""


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
    """Whether the attempt succeeded with no result to store and no follow-up: the common case."""
    return isinstance(outcome, Succeeded) and outcome.result is None and not outcome.is_followed


def may_be_deleted(outcome: Outcome) -> bool:
    """Whether a job that is not kept is deleted with this outcome, without a settle."""
    return isinstance(outcome, Succeeded) and not outcome.is_followed
