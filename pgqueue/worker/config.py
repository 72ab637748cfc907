"""The options of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from pgqueue.errors import OptionError
from pgqueue.options import check_queue_name
from pgqueue.worker.job_log import LogJobs


class Mode(StrEnum):
    """How a worker holds the jobs it runs."""

    LEASE = "lease"
    """Claims in batches, commits the claim, settles in batches: fast."""
    TRANSACTION = "transaction"
    """Holds each job in an open transaction: a crash releases it at once."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The options of a worker, checked."""

    queues: Sequence[str]
    slots: int
    mode: Mode
    batch: int
    poll_interval: timedelta
    grace: timedelta
    log_jobs: LogJobs | None = None


def checked_config(
    queues: Sequence[str],
    concurrency: int,
    mode: str,
    batch: int,
    poll_interval: timedelta,
    grace: timedelta,
    log_jobs: str | None = None,
) -> WorkerConfig:
    if isinstance(queues, str) or not queues:
        raise OptionError(f"queues is {queues!r}; give a list of queue names, e.g. ['default']")
    for name in queues:
        check_queue_name(name)
    for option, value in (("concurrency", concurrency), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= 1000:
            raise OptionError(f"{option} is {value!r}; give a whole number from 1 to 1000")
    if mode not in list(Mode):
        raise OptionError(f"mode is {mode!r}; give one of {', '.join(Mode)}")
    for option, span, least in (("poll_interval", poll_interval, 0.01), ("grace", grace, 0)):
        if not isinstance(span, timedelta) or span.total_seconds() < least:
            raise OptionError(f"{option} is {span!r}; give a timedelta of {least} seconds or more")
    return WorkerConfig(
        queues=tuple(dict.fromkeys(queues)),
        slots=concurrency,
        mode=Mode(mode),
        batch=batch,
        poll_interval=poll_interval,
        grace=grace,
        log_jobs=_checked_level(log_jobs),
    )


def checked_ahead(ahead: timedelta) -> float:
    """Return the seconds of ``run_until_empty(ahead=...)``."""
    if not isinstance(ahead, timedelta) or ahead < timedelta(0):
        raise OptionError(f"ahead is {ahead!r}; give a timedelta of 0 seconds or more")
    return ahead.total_seconds()


def _checked_level(log_jobs: str | None) -> LogJobs | None:
    if log_jobs is None:
        return None
    if log_jobs not in list(LogJobs):
        raise OptionError(f"log_jobs is {log_jobs!r}; give {', '.join(LogJobs)} or None")
    return LogJobs(log_jobs)
