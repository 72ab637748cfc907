"""The trail of a job: what has happened to it, in the order of time, as far as the tables know.

An attempt that has not ended has no end here, and a snoozed attempt leaves no trace.  Of the times
at which a job was due, the tables have the last one only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from pgqueue.meta import RUNS_WHEN
from pgqueue.models import UNFINISHED, WAITING, JobStatus
from pgqueue.outcomes import AttemptEnd
from pgqueue.repository.follow_ups import ON_FAILED
from pgqueue.repository.listing import JobDetails
from pgqueue.views.words import when_in_words

SCHEDULE = "schedule"
"""The key of a job's meta with the name of its schedule and its tick."""


USED_UP = (AttemptEnd.FAILED, AttemptEnd.TIMEOUT, AttemptEnd.CRASHED)


class What(StrEnum):
    """What has happened to a job."""

    ENQUEUED = "enqueued"
    DUE = "due"
    ATTEMPT = "attempt"
    CANCEL_REQUESTED = "cancel requested"
    KILL_REQUESTED = "kill requested"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the trail."""

    at: datetime
    what: What
    attempt: int | None = None
    until: datetime | None = None
    """The end of an attempt; None while it runs."""
    outcome: str = ""
    """Of an attempt, how it has ended, or ``running``; of the end, the status of the job."""
    waited: timedelta | None = None
    """How long the job waited before an attempt, since its enqueue or the attempt before."""
    error: str | None = None
    moved_to: str | None = None
    """Of an attempt: the queue to which its retry has moved the job."""
    is_after_requeue: bool = False
    """Of an attempt: whether the job was requeued before it, with all its attempts again."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a job waited or ran."""

    is_run: bool
    took: timedelta
    outcome: str = ""
    attempt: int | None = None


def schedule_of(job: JobDetails) -> str | None:
    """The name of the schedule that has enqueued a job; None if there is none."""
    meta = job.columns["meta"]
    about = meta.get(SCHEDULE) if isinstance(meta, dict) else None
    name = about.get("name") if isinstance(about, dict) else None
    return name if isinstance(name, str) else None


def when_of(job: JobDetails) -> str:
    """The ``when=`` of a job that has waited for others; empty for success, the default."""
    meta = job.columns["meta"]
    outcomes = meta.get(RUNS_WHEN) if isinstance(meta, dict) else None
    return when_in_words(outcomes) if isinstance(outcomes, list) else ""


def follow_up_of(job: JobDetails) -> str | None:
    """The task that is enqueued if the job fails; None if there is none."""
    meta = job.columns["meta"]
    about = meta.get(ON_FAILED) if isinstance(meta, dict) else None
    task = about.get("task") if isinstance(about, dict) else None
    return task if isinstance(task, str) else None


def trail(job: JobDetails) -> list[Event]:
    """The events of a job in the order of their times; a time it is due at may be to come."""
    row = job.columns
    events = [Event(row["created_at"], What.ENQUEUED)]
    if row["run_at"] > row["created_at"]:
        events.append(Event(row["run_at"], What.DUE))
    free_since, last = row["created_at"], 0
    for attempt in sorted(_attempts(job), key=lambda one: one.at):
        waited, number = max(attempt.at - free_since, timedelta(0)), attempt.attempt or 0
        events.append(replace(attempt, waited=waited, is_after_requeue=number <= last))
        free_since = attempt.until or attempt.at
        last = 0 if attempt.outcome == AttemptEnd.INTERRUPTED else number  # has used up none
    for name, what in (
        ("cancel_requested_at", What.CANCEL_REQUESTED),
        ("kill_requested_at", What.KILL_REQUESTED),
    ):
        if row[name] is not None:
            events.append(Event(row[name], what))
    if row["finished_at"] is not None:
        events.append(Event(row["finished_at"], What.ENDED, outcome=job.status))
    return sorted(events, key=lambda event: event.at)


def was_requeued(job: JobDetails) -> bool:
    """Whether more attempts have ended than the job counts: a requeue counts from the beginning."""
    ended = sum(attempt.outcome in USED_UP for attempt in job.past_attempts)
    return bool(ended + (job.status is JobStatus.SUCCEEDED) > job.columns["attempts"])


def waits_after_requeue(job: JobDetails) -> bool:
    """Whether a job waits after a requeue, with all its attempts again."""
    attempts = [event for event in trail(job) if event.what is What.ATTEMPT]
    if job.status not in UNFINISHED or job.holder is not None or not attempts:
        return False
    last = attempts[-1]
    return last.outcome != AttemptEnd.INTERRUPTED and job.columns["attempts"] < (last.attempt or 0)


def stretches(job: JobDetails) -> list[Stretch]:
    """The times in which a job waited and ran, until it ended, or else until now.

    A job that is not due yet waits until it is.
    """
    found: list[Stretch] = []
    at = job.columns["created_at"]
    for event in trail(job):
        if event.what is What.ATTEMPT:
            found.append(Stretch(False, event.waited or timedelta(0)))
            at = event.until or job.read_at
            found.append(Stretch(True, at - event.at, event.outcome, event.attempt))
    if job.status in WAITING:
        until = max(job.columns["run_at"], job.read_at)
        found.append(Stretch(False, max(until - at, timedelta(0))))
    elif not found:  # cancelled while it waited
        found.append(Stretch(False, job.columns["finished_at"] - at))
    return found


def _attempts(job: JobDetails) -> Iterator[Event]:
    row = job.columns
    starts = set()
    for past in job.past_attempts:
        starts.add(past.started_at)
        yield Event(
            past.started_at or past.finished_at,
            What.ATTEMPT,
            past.attempt,
            past.finished_at,
            past.outcome,
            error=": ".join(filter(None, (past.error_type, past.error))) or None,
            moved_to=past.moved_to,
        )
    if job.holder is not None:
        yield Event(
            job.holder.started_at, What.ATTEMPT, job.holder.attempt, outcome=JobStatus.RUNNING
        )
    elif row["finished_at"] is not None and row["started_at"] not in {None, *starts}:
        # A success has no row of its own.
        number, end = row["attempts"], row["finished_at"]
        yield Event(row["started_at"], What.ATTEMPT, number, end, job.status)
