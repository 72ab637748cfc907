"""What an operator reads: pages of jobs, and all rows about one job."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.admission import Buckets, Rules, next_token, rule_of
from pgqueue.errors import JobNotFound
from pgqueue.limits import SEPARATOR
from pgqueue.models import JobStatus
from pgqueue.repository.admissions import Admissions
from pgqueue.repository.workers import NOTHING_PAUSED
from pgqueue.statements import listing
from pgqueue.statements.listing import JobFilter


class JobLine(NamedTuple):
    """A job in a list."""

    id: int
    status: JobStatus
    task: str
    queue: str
    priority: int
    attempts: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, newest first."""

    jobs: Sequence[JobLine]
    next_before: int | None
    """The ``before`` of the next page's filter; None on the last page."""


class Holder(NamedTuple):
    """The worker that runs a job; hostname and pid are None if its row is deleted."""

    worker_id: UUID
    hostname: str | None
    pid: int | None
    attempt: int
    started_at: datetime
    heartbeat_age: timedelta | None


class PastAttempt(NamedTuple):
    """An unsuccessful attempt."""

    attempt: int
    outcome: str
    error_type: str | None
    error: str | None
    traceback: str | None
    worker_id: UUID | None
    hostname: str | None
    pid: int | None
    started_at: datetime | None
    finished_at: datetime


class LimitUse(NamedTuple):
    """One limit of a job."""

    key: str
    held: int
    """How many jobs hold a place under this key."""
    capacity: int | None
    """None if no worker has declared the limit."""
    period: timedelta | None = None
    """Of a rate: the time in which ``capacity`` jobs start."""
    seconds_to_token: float | None = None
    """Of a rate that is used up: how long until the next job may start."""
    is_fair: bool = False
    """Whether its keys take turns."""


@dataclass(frozen=True, slots=True)
class JobDetails:
    """Everything on record about one job."""

    status: JobStatus
    columns: dict[str, Any]
    """The row of ``jobs``."""
    holder: Holder | None
    past_attempts: Sequence[PastAttempt]
    limits: Sequence[LimitUse] = ()
    is_queue_paused: bool = False
    is_task_paused: bool = False


class Listing:
    """Reads the jobs behind one Session or Connection for an operator."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def page(self, which: JobFilter, *, limit: int) -> JobPage:
        """The newest matching jobs; reads one more, to know whether there is another page."""
        rows = self._executor.execute(listing.list_jobs(which, limit=limit + 1))
        found = [JobLine(*row) for row in rows]
        shown = found[:limit]
        return JobPage(shown, shown[-1].id if len(found) > limit else None)

    def ids(self, which: JobFilter, *, limit: int | None = None) -> list[int]:
        """The ids of all matching jobs, or of the oldest of them, in ascending order."""
        ids = listing.job_ids(which, limit=limit, newest_first=False)
        return [row[0] for row in self._executor.execute(ids)]

    def status(self, job_id: int) -> JobStatus | None:
        """The status of a job; None if there is no such job."""
        found = self._executor.execute(listing.status_of_job(), {"job_id": job_id}).scalar()
        return None if found is None else JobStatus(found)

    def first_failure(self, worker_id: UUID) -> str | None:
        """In words, the first attempt of a worker that has failed; None if there is none."""
        row = self._executor.execute(listing.first_failure(), {"worker_id": worker_id}).first()
        if row is None:
            return None
        return f"job {row[0]}: attempt {row[1]} ended as {row[2]}: {row[3]}: {row[4]}"

    def job(self, job_id: int) -> JobDetails:
        """Everything about one job that this role may read; raises JobNotFound."""
        one = {"job_id": job_id}
        hidden = frozenset(row[0] for row in self._executor.execute(listing.hidden_columns()))
        row = self._executor.execute(listing.job_details(hidden), one).mappings().one_or_none()
        if row is None:
            raise JobNotFound(f"job {job_id} does not exist: never committed, or deleted")
        columns = dict(row)
        status = JobStatus(columns.pop("status"))
        held = self._executor.execute(listing.holder_of_job(), one).one_or_none()
        past = self._executor.execute(listing.attempts_of_job(hidden), one)
        names = {"queue_name": columns["queue"], "task_name": columns["task"]}
        paused = self._executor.execute(listing.pauses_of_job(), names).one()
        return JobDetails(
            status=status,
            columns=columns,
            holder=Holder(*held) if held else None,
            past_attempts=[PastAttempt(*attempt) for attempt in past],
            limits=self._limits(columns["limit_keys"]),
            is_queue_paused=paused.is_queue_paused,
            is_task_paused=paused.is_task_paused,
        )

    def _limits(self, limit_keys: str | None) -> list[LimitUse]:
        if limit_keys is None or limit_keys == listing.NOT_YOURS:
            return []
        admissions, keys = Admissions(self._executor), limit_keys.split(SEPARATOR)
        rules = admissions.rules()
        places = admissions.places_under(keys, paused=NOTHING_PAUSED)
        held = Counter(place.key for place in places if place.is_held)
        buckets = admissions.buckets(keys)
        return [_use_of(key, held[key], buckets, rules) for key in keys]


def _use_of(key: str, held: int, buckets: Buckets, rules: Rules) -> LimitUse:
    rule = rule_of(key, rules)
    if rule is None:
        return LimitUse(key, held, None)
    if rule.period is None:
        return LimitUse(key, held, rule.capacity, is_fair=rule.is_fair)
    wait = next_token([key], buckets, rules)
    seconds = None if wait is None else wait.total_seconds()
    return LimitUse(key, held, rule.capacity, rule.period, seconds)
