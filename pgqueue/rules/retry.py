"""Retry policies: decide whether and when a failed job is retried."""

import inspect
import math
import random as randomness
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from datetime import timedelta
from typing import Any

from pgqueue import redaction
from pgqueue.checks import check_queue_name, check_whole, quoted
from pgqueue.errors import OptionError
from pgqueue.outcomes import AttemptEnd, ErrorReport, Failed, Retried, RetryLater, cause_of

logger = redaction.logger(__name__)

MAX_DELAY = timedelta(days=3650)
"""The longest wait before the next attempt."""


@dataclass(frozen=True, slots=True)
class Never:
    """No next attempt."""

    def __str__(self) -> str:
        return "Retry.never()"


@dataclass(frozen=True, slots=True)
class Constant:
    """The same wait after every failure."""

    interval: timedelta

    def delay_after(self, attempt: int, random: Callable[[], float]) -> timedelta:
        return self.interval

    def __str__(self) -> str:
        return f"Retry.constant({self.interval})"


@dataclass(frozen=True, slots=True)
class Linear:
    """A wait that grows by one step after every failure."""

    step: timedelta
    cap: timedelta

    def delay_after(self, attempt: int, random: Callable[[], float]) -> timedelta:
        return _at_most(self.cap, seconds=self.step.total_seconds() * attempt)

    def __str__(self) -> str:
        return f"Retry.linear({self.step}, cap={self.cap})"


@dataclass(frozen=True, slots=True)
class Exponential:
    """A wait that is multiplied by a factor after every failure."""

    base: timedelta
    factor: float
    cap: timedelta
    jitter: bool

    def delay_after(self, attempt: int, random: Callable[[], float]) -> timedelta:
        seconds = self.base.total_seconds()
        if seconds:  # 0 * inf would be NaN
            try:
                seconds *= float(self.factor) ** (attempt - 1)
            except OverflowError:
                seconds = math.inf
        delay = _at_most(self.cap, seconds=seconds)
        # Full jitter, so that jobs that failed at the same time are not retried at the same time.
        return delay * random() if self.jitter else delay

    def __str__(self) -> str:
        return (
            f"Retry.exponential(base={self.base}, factor={self.factor}, "
            f"cap={self.cap}, jitter={self.jitter})"
        )


Schedule = Never | Constant | Linear | Exponential

_SPANS = ("interval", "step", "base", "cap")

AS_THE_POLICY_SAYS = RetryLater()

_DEFAULT = Exponential(timedelta(seconds=1), factor=2, cap=timedelta(hours=1), jitter=True)


@dataclass(frozen=True, slots=True, repr=False)
class Retry:
    """Whether and when a failed job is retried.

    The constructors below are the usual policies.  ``Retry(function)`` is one of your own.

    Args:
        schedule: A function that is called with the number of the failed attempt, from 1, and its
            exception.  It returns the wait before the next attempt: a timedelta, or a number of
            seconds.
        retried: If not empty, only these errors are retried; :meth:`only` adds to it.
        given_up: These errors are never retried; :meth:`never_on` adds to it.
        longest: No retry starts later than this after the start of the first attempt;
            :meth:`for_at_most` sets it.  None: no limit.
        queue: The queue in which a job is retried; :meth:`in_queue` sets it.  None: its own.
        priority: The priority with which a job is retried; :meth:`with_priority` sets it.  None:
            its own.

    Raises:
        OptionError: A value is wrong.

    Example:
        >>> patient = Retry.exponential(cap=timedelta(minutes=10)).never_on(ValueError)
        >>> @queue.task(retry=patient.for_at_most(timedelta(hours=6)), max_attempts=20)
        ... def fetch(url: str) -> None: ...
    """

    schedule: Schedule | Callable[[int, Any], timedelta | float]
    _: KW_ONLY
    retried: tuple[type[BaseException], ...] = ()
    """If not empty, only these errors are retried."""

    given_up: tuple[type[BaseException], ...] = ()
    """These errors are never retried."""

    longest: timedelta | None = None
    """No retry starts later than this after the start of the first attempt.  None: no limit."""

    queue: str | None = None
    """The queue in which a job is retried.  None: its own."""

    priority: int | None = None
    """The priority with which a job is retried.  None: its own."""

    def __post_init__(self) -> None:
        function: Any = self.schedule
        if isinstance(function, Schedule):
            return
        # Refuse a function with a wrong signature here, not at the first failure of a job.
        if not callable(function):
            raise OptionError(
                f"Retry({quoted(function)}): give a function(attempt, error) that returns the "
                "pause, or write Retry.constant(...) or Retry.exponential(...); the number of "
                "attempts is max_attempts of the task"
            )
        try:
            inspect.signature(function).bind(1, Exception())
        except (TypeError, ValueError) as error:  # ValueError: some builtins have no signature
            raise OptionError(
                f"the retry function {_name_of(function)} cannot be called as function(attempt, "
                f"error): {error}"
            ) from None

    @classmethod
    def constant(cls, interval: timedelta) -> "Retry":
        """Wait the same time after every failure.

        Args:
            interval: How long.

        Returns:
            The policy.

        Raises:
            OptionError: It is no timedelta from 0 on.
        """
        return cls(Constant(_duration("interval", interval)))

    @classmethod
    def linear(cls, step: timedelta, cap: timedelta | None = None) -> "Retry":
        """Wait one step after the first failure, two after the second, and so on.

        Args:
            step: The first wait, and by how much each is longer than the one before.
            cap: The longest wait.  None: no limit.

        Returns:
            The policy.

        Raises:
            OptionError: A value is wrong.
        """
        longest = MAX_DELAY if cap is None else _duration("cap", cap)
        return cls(Linear(_duration("step", step), longest))

    @classmethod
    def exponential(
        cls,
        base: timedelta = _DEFAULT.base,
        factor: float = _DEFAULT.factor,
        cap: timedelta = _DEFAULT.cap,
        jitter: bool = _DEFAULT.jitter,
    ) -> "Retry":
        """Wait ``base``, then ``factor`` times as long after each failure, up to ``cap``.

        Args:
            base: The first wait, a second by default.
            factor: How many times as long each wait is as the one before, 2 by default.
            cap: The longest wait, an hour by default.
            jitter: Whether the wait is random, evenly distributed from zero to this value, so that
                jobs that failed together do not start together again.

        Returns:
            The policy.

        Raises:
            OptionError: A value is wrong.
        """
        if not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise OptionError("factor must be a finite number, 1 or more")
        schedule = Exponential(_duration("base", base), factor, _duration("cap", cap), bool(jitter))
        return cls(schedule)

    @classmethod
    def never(cls) -> "Retry":
        """Fail the job at its first failure.

        A crash of the worker is no failure of the handler: the job starts again while it has
        attempts left.

        Returns:
            The policy.
        """
        return cls(Never())

    def only(self, *exceptions: type[BaseException]) -> "Retry":
        """Retry only these errors; each call adds to the list.

        Args:
            *exceptions: Their classes; an error of a subclass counts too.

        Returns:
            The changed policy.

        Raises:
            OptionError: Something else than a class of exceptions is given.

        Example:
            >>> retry = Retry.exponential().only(ConnectionError, DBAPIError)
        """
        return replace(self, retried=self.retried + _exceptions("only", exceptions))

    def never_on(self, *exceptions: type[BaseException]) -> "Retry":
        """Do not retry these errors; each call adds to the list.

        Args:
            *exceptions: Their classes; an error of a subclass counts too.

        Returns:
            The changed policy.

        Raises:
            OptionError: Something else than a class of exceptions is given.
        """
        return replace(self, given_up=self.given_up + _exceptions("never_on", exceptions))

    def for_at_most(self, duration: timedelta) -> "Retry":
        """Do not start a retry later than ``duration`` after the start of the first attempt.

        If the wait would end later, the job fails at once.  The database's clock decides, when the
        failed attempt is recorded.  The limit does not end a running attempt, and does not apply to
        an attempt that follows a crash of the worker, a snooze or an interruption.

        Args:
            duration: How long after the start of the first attempt.

        Returns:
            The changed policy.

        Raises:
            OptionError: It is no timedelta above 0.
        """
        if not isinstance(duration, timedelta) or not timedelta(0) < duration <= MAX_DELAY:
            raise OptionError(
                f"Retry.for_at_most(): duration is {duration!r}; give a timedelta above zero, "
                f"of at most {MAX_DELAY.days} days"
            )
        return replace(self, longest=duration)

    def in_queue(self, queue: str) -> "Retry":
        """Retry jobs in another queue, so that they do not delay first attempts.

        A failed attempt moves its job to this queue, where it stays, also if it is requeued.  After
        a crash of a worker a job stays where it is.

        Args:
            queue: The name of the queue.  ``Worker(queue)`` without names of queues serves it too.

        Returns:
            A new policy.

        Raises:
            OptionError: No queue can have this name.

        Example:
            >>> @queue.task(queue="mail", retry=Retry.exponential().in_queue("mail-retries"))
            ... def send(address: str) -> None: ...
        """
        check_queue_name(queue, "Retry.in_queue(): ")
        return replace(self, queue=queue)

    def with_priority(self, priority: int) -> "Retry":
        """Retry jobs with another priority, which they keep.

        Args:
            priority: From 0, which starts first, to 9.

        Returns:
            A new policy.

        Raises:
            OptionError: The priority is none of these.

        Example:
            >>> Retry.exponential().with_priority(9)
        """
        check_whole("Retry.with_priority(): ", "priority", priority, 0, 9)
        return replace(self, priority=priority)

    def after_failure(
        self,
        *,
        attempt: int,
        max_attempts: int,
        error: BaseException,
        report: ErrorReport,
        end: AttemptEnd = AttemptEnd.FAILED,
        random: Callable[[], float] = randomness.random,
        task_name: str = "",
    ) -> Retried | Failed:
        """Return the outcome of a failed attempt.  The first attempt has the number 1.

        ``error``: a RetryLater says itself when and where the job is retried.
        """
        request = error if isinstance(error, RetryLater) else AS_THE_POLICY_SAYS
        if attempt >= max_attempts or not (request is error or self._retries(error)):
            return Failed(report, end)
        delay = request.delay
        if delay is None:
            delay = self._delay_after(attempt, cause_of(error), random, task_name)
        return Retried(
            delay,
            report,
            end,
            give_up_after=self.longest,
            queue=request.queue or self.queue,
            priority=self.priority if request.priority is None else request.priority,
        )

    def _retries(self, error: BaseException) -> bool:
        is_retried = not self.retried or isinstance(error, self.retried)
        is_never = isinstance(self.schedule, Never) or isinstance(error, self.given_up)
        return is_retried and not is_never

    def _delay_after(
        self, attempt: int, error: BaseException, random: Callable[[], float], task_name: str
    ) -> timedelta:
        match self.schedule:
            case Never():  # the handler has asked for another attempt
                return _DEFAULT.delay_after(attempt, random)
            case Constant() | Linear() | Exponential() as schedule:
                return schedule.delay_after(attempt, random)
            case function:
                answer = _answer(function, attempt, error, task_name)
                return _DEFAULT.delay_after(attempt, random) if answer is None else answer

    def stored(self) -> dict[str, Any]:
        """The policy as JSON data, without its exceptions; raises OptionError for a function."""
        if not isinstance(self.schedule, Schedule):
            raise OptionError(
                f"a policy with a function, as {self!r}, cannot be stored with a job; give it to "
                "the task, or one of Retry.constant(), linear(), exponential() and never()"
            )
        waits = {each.name: getattr(self.schedule, each.name) for each in fields(self.schedule)}
        policy = {
            type(self.schedule).__name__.lower(): {
                name: value.total_seconds() if isinstance(value, timedelta) else value
                for name, value in waits.items()
            },
            "for_at_most": None if self.longest is None else self.longest.total_seconds(),
            "in_queue": self.queue,
            "with_priority": self.priority,
        }
        return {name: value for name, value in policy.items() if value is not None}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any], task: "Retry") -> "Retry":
        """Return a stored policy, with the exceptions of that of the task.  Raises ValueError or
        TypeError for what :meth:`stored` does not write."""
        more = dict(stored)
        [schedule] = more.keys() & {"never", "constant", "linear", "exponential"}
        waits = {
            name: timedelta(seconds=value) if name in _SPANS else value
            for name, value in dict(more.pop(schedule)).items()
        }
        policy: Retry = getattr(cls, schedule)(**waits)
        for name in more.keys() & {"for_at_most", "in_queue", "with_priority"}:
            value = timedelta(seconds=more[name]) if name == "for_at_most" else more[name]
            policy = getattr(policy, name)(value)
        return policy.with_exceptions_of(task)

    def with_exceptions_of(self, task: "Retry") -> "Retry":
        return replace(self, retried=task.retried, given_up=task.given_up)

    def __repr__(self) -> str:
        text = f"Retry({_name_of(self.schedule)})"
        if isinstance(self.schedule, Schedule):
            text = str(self.schedule)
        for method, exceptions in (("only", self.retried), ("never_on", self.given_up)):
            if exceptions:
                text += f".{method}({', '.join(each.__name__ for each in exceptions)})"
        if self.longest is not None:
            text += f".for_at_most({self.longest})"
        if self.queue is not None:
            text += f".in_queue({self.queue!r})"
        if self.priority is not None:
            text += f".with_priority({self.priority})"
        return text


def _answer(
    function: Callable[..., Any], attempt: int, error: BaseException, task_name: str
) -> timedelta | None:
    """Call the application's retry function; None, and a warning, if its answer is unusable."""
    try:
        answer = function(attempt, error)
    except BaseException as raised:  # an application's error must not stop the worker
        what = f"raised {type(raised).__name__}"
    else:
        seconds = answer.total_seconds() if isinstance(answer, timedelta) else answer
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        # Written so that NaN is refused too: every comparison with NaN is false.
        if is_number and 0 <= seconds <= MAX_DELAY.total_seconds():
            return timedelta(seconds=seconds)
        what = f"returned a {type(answer).__name__} that is no delay"
    logger.warning(
        "Task %s: its retry function %s; the default delay is used. "
        "Let it return a timedelta or seconds, not negative and not endless.",
        task_name or "(unnamed)",
        f"{_name_of(function)} {what}",
    )
    return None


def _at_most(cap: timedelta, *, seconds: float) -> timedelta:
    return cap if seconds >= cap.total_seconds() else timedelta(seconds=seconds)


def _duration(name: str, value: Any) -> timedelta:
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= MAX_DELAY:
        raise OptionError(f"{name} must be a timedelta from 0 to {MAX_DELAY.days} days")
    return value


def _exceptions(method: str, values: tuple[Any, ...]) -> tuple[type[BaseException], ...]:
    if not values:
        raise OptionError(f"{method}() needs at least one exception class")
    for value in values:
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            raise OptionError(f"{method}() takes exception classes, not {value!r:.80}")
    return values


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


DEFAULT_RETRY = Retry.exponential()
