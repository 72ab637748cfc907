"""The options of a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pgqueue.checks import check, check_queue_or_pattern, check_whole, instance
from pgqueue.errors import OptionError
from pgqueue.rules.served_queues import is_pattern
from pgqueue.worker.job_log import LogJobs

MOST_WEIGHT = 1000
MAX_JOBS_PER_CHILD = 10_000
MOST_JOBS_PER_CHILD = 1_000_000_000
AHEAD = MOST_AHEAD = 1000
AGE_AFTER = (timedelta(seconds=1), timedelta(days=365))


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The options of a worker, checked."""

    queues: Sequence[str]
    slots: int
    poll_interval: timedelta
    grace: timedelta
    log_jobs: LogJobs | None = None
    weights: Mapping[str, int] | None = None
    age_after: timedelta | None = None
    max_jobs_per_child: int = MAX_JOBS_PER_CHILD
    ahead: int = AHEAD
    statistics: bool = True


def checked_config(
    queues: Sequence[str] | Mapping[str, int],
    concurrency: int,
    poll_interval: timedelta,
    grace: timedelta,
    log_jobs: str | None = None,
    age_after: timedelta | None = None,
    max_jobs_per_child: int = MAX_JOBS_PER_CHILD,
    ahead: int = AHEAD,
    statistics: bool = True,
) -> WorkerConfig:
    if isinstance(queues, str) or not queues:
        raise OptionError(
            f"queues is {queues!r}; give a list of queue names, e.g. ['default'], or a weight for "
            "each queue, e.g. {'mail': 3, 'default': 1}"
        )
    weights = dict(queues) if isinstance(queues, Mapping) else None
    for name in queues:
        check_queue_or_pattern(name)
        if weights is not None:
            if is_pattern(name):
                raise OptionError(f"queue {name}: give a weight to a queue, not to a pattern")
            check_whole("", f"the weight of queue {name}", weights[name], 1, MOST_WEIGHT)
    if type(concurrency) is not int or not 1 <= concurrency <= 1000:
        raise OptionError(f"concurrency is {concurrency!r}; give a whole number from 1 to 1000")
    for option, span, at_least in (("poll_interval", poll_interval, 0.01), ("grace", grace, 0)):
        if not isinstance(span, timedelta) or span.total_seconds() < at_least:
            raise OptionError(
                f"{option} is {span!r}; give a timedelta of {at_least} seconds or more"
            )
    check_whole("", "max_jobs_per_child", max_jobs_per_child, 1, MOST_JOBS_PER_CHILD)
    check_whole("", "ahead", ahead, 0, MOST_AHEAD)
    check("", "statistics", statistics, instance(bool, "True or False"))
    if log_jobs is not None and log_jobs not in list(LogJobs):
        raise OptionError(f"log_jobs is {log_jobs!r}; give {', '.join(LogJobs)} or None")
    least, most = AGE_AFTER
    is_span = isinstance(age_after, timedelta) and least <= age_after <= most
    if age_after is not None and not is_span:
        raise OptionError(
            f"age_after is {age_after!r}; give a timedelta of 1 second to {most.days} days, or None"
        )
    return WorkerConfig(
        queues=tuple(dict.fromkeys(queues)),
        slots=concurrency,
        poll_interval=poll_interval,
        grace=grace,
        log_jobs=None if log_jobs is None else LogJobs(log_jobs),
        weights=weights,
        age_after=age_after,
        max_jobs_per_child=max_jobs_per_child,
        ahead=ahead,
        statistics=statistics,
    )


def checked_ahead(ahead: timedelta) -> float:
    """Return the seconds of ``run_until_empty(ahead=...)``."""
    if not isinstance(ahead, timedelta) or ahead < timedelta(0):
        raise OptionError(f"ahead is {ahead!r}; give a timedelta of 0 seconds or more")
    return ahead.total_seconds()
