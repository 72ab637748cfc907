"""Whether and when a failed job runs again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from .jobs import Job


class RetryDecision:
    """That a job runs again: when, in which queue, and with which priority."""

    def __init__(
        self,
        *,
        retry_at: datetime | None = None,
        retry_in: Mapping[str, int] | None = None,
        priority: int | None = None,
        queue: str | None = None,
    ) -> None:
        if retry_at is not None and retry_in is not None:
            raise ValueError("give retry_at or retry_in, not both")
        self.retry_at, self.priority, self.queue = retry_at, priority, queue
        self._retry_in = timedelta(**(retry_in or {}))

    @property
    def delay(self) -> timedelta:
        """How long from now the job waits."""
        if self.retry_at is None:
            return self._retry_in
        return max(self.retry_at - datetime.now(UTC), timedelta(0))


class BaseRetryStrategy:
    """The base of a strategy of your own."""

    max_attempts: int | None = None
    """How many retries; None: as many as pgqueue allows."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        """Return None if the job fails."""
        raise NotImplementedError


@dataclass(kw_only=True)
class RetryStrategy(BaseRetryStrategy):
    """Waits that are constant, linear and exponential, in seconds, which are added."""

    max_attempts: int | None = None
    wait: int = 0
    linear_wait: int = 0
    exponential_wait: int = 0
    retry_exceptions: Iterable[type[BaseException]] | None = None

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        if self.max_attempts is not None and job.attempts >= self.max_attempts:
            return None
        if self.retry_exceptions and not isinstance(exception, tuple(self.retry_exceptions)):
            return None
        growing = self.linear_wait * job.attempts + self.exponential_wait ** (job.attempts + 1)
        return RetryDecision(retry_in={"seconds": self.wait + growing})


def strategy_of(retry: bool | int | BaseRetryStrategy) -> BaseRetryStrategy | None:
    """Return the strategy that the option ``retry`` of a task means."""
    if isinstance(retry, BaseRetryStrategy):
        return retry
    if retry is True:
        return RetryStrategy()
    return RetryStrategy(max_attempts=retry) if retry else None
