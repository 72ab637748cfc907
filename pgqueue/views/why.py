"""Why a job does not run, or how it has ended: one sentence, and the command that changes it."""

from collections.abc import Collection, Iterator
from datetime import timedelta
from shlex import quote
from typing import Any

from pgqueue.models import JobStatus
from pgqueue.outcomes import AttemptEnd
from pgqueue.redaction import MASK
from pgqueue.repository.listing import Holder, JobDetails, LimitUse, PastAttempt
from pgqueue.repository.waits import MOST_AHEAD
from pgqueue.rules.limits import has_own_capacity, name_of, rate_in_words
from pgqueue.views.words import (
    Kind,
    Name,
    Part,
    Reason,
    nobody_serves,
    quoted,
    undeclared,
    unknown_task,
    unreadable,
)

LONGEST_PAUSE = timedelta(seconds=5)
"""A worker that has sent no heartbeat for so long is called silent; it sends two a second."""


def why(job: JobDetails, known_tasks: Collection[str] = ()) -> list[Reason]:
    """Say why a job does not run; at least one reason, the one to remove first at the beginning.

    ``known_tasks``: the tasks of the application; empty if they are not known.
    """
    match job.status:
        case JobStatus.SUCCEEDED | JobStatus.FAILED | JobStatus.CANCELLED:
            return [_ended(job)]
        case JobStatus.RUNNING if job.holder is not None:
            return list(_running(job, job.holder))
        case JobStatus.RUNNING:
            return [Reason(("its attempt has ended just now",))]
        case JobStatus.BLOCKED if (awaited := job.waits_for) is not None:
            outcomes = " or ".join(awaited.outcomes)
            return [_because(f"waits for batch {awaited.id} to end as {outcomes}")]
    return list(_hindrances(job, known_tasks)) or [_next(job)]


def _because(*words: Part, remedy: str | None = None) -> Reason:
    return Reason(words, remedy)


def _ended(job: JobDetails) -> Reason:
    row, last = job.columns, job.past_attempts[-1] if job.past_attempts else None
    at, again = row["finished_at"], f"pgqueue requeue {row['id']}"
    if job.status is JobStatus.SUCCEEDED:
        return _because("succeeded at ", at, f" in {_attempt(row)}")
    if job.status is JobStatus.FAILED:
        if last is None:
            return _because("failed at ", at, *quoted(row["last_error"]), remedy=again)
        end = f": {_attempt(row, last.attempt)} ended as {last.outcome}"
        return _because("failed at ", at, end, *quoted(_error(last)), remedy=again)
    by: tuple[Part, ...] = (" while it waited", *quoted(row["last_error"]))
    if row["cancel_requested_at"] is not None:
        by = (" while it ran, as requested at ", row["cancel_requested_at"])
    elif last is not None and last.outcome == AttemptEnd.CANCELLED:
        by = (f" by its handler, in {_attempt(row, last.attempt)}", *quoted(last.error))
    return _because("was cancelled at ", at, *by, remedy=again)


def _running(job: JobDetails, holder: Holder) -> Iterator[Reason]:
    row, worker, silence = job.columns, _worker(holder), holder.heartbeat_age
    if holder.hostname is None or holder.is_dead:
        back = " is dead: any other worker gives the job back within seconds"
        yield _because("its worker ", worker, back, remedy="pgqueue worker")
    elif silence is not None and silence > LONGEST_PAUSE:
        back = ": if it stays silent, any other worker gives the job back"
        words = ("its worker ", worker, " has sent no heartbeat for ", silence, back)
        yield _because(*words, remedy="pgqueue worker")
    if (at := row["kill_requested_at"]) is not None:
        yield _because("the kill of its handler was requested at ", at)
    elif (at := row["cancel_requested_at"]) is not None:
        until = ": it ends as cancelled when its handler ends"
        kill = f"pgqueue cancel --kill {row['id']}"
        yield _because("its cancellation was requested at ", at, until, remedy=kill)
    if holder.slots is not None and holder.earlier_jobs >= holder.slots and not row["progress"]:
        busy = f": the {holder.slots} slots of the worker have jobs that it claimed earlier"
        yield _because("was claimed ahead by ", worker, " at ", holder.started_at, busy)
    else:
        since = f", {_attempt(row, holder.attempt)} since "
        yield _because("runs on ", worker, since, holder.started_at)


def _hindrances(job: JobDetails, known_tasks: Collection[str]) -> Iterator[Reason]:
    row, wait = job.columns, job.wait
    queue = Name(Kind.QUEUE, row["queue"], row["queue"])
    task = Name(Kind.TASK, row["task"], row["task"])
    if not job.is_due:
        yield _not_due(job)
    if (at := wait.queue_paused_at) is not None:
        resume = f"pgqueue resume {quote(row['queue'])}"
        yield _because("its queue ", queue, " is paused since ", at, remedy=resume)
    if (at := wait.task_paused_at) is not None:
        resume = f"pgqueue resume --task {quote(row['task'])}"
        yield _because("its task ", task, " is paused since ", at, remedy=resume)
    if not wait.workers:
        quiet = f"; live workers that are quiet: {wait.quiet_workers}" if wait.quiet_workers else ""
        yield nobody_serves(row["queue"]).more(quiet)
    if known_tasks and row["task"] not in known_tasks:
        yield unknown_task(row["task"]).more(": only workers whose code has it run the job")
    if (at := wait.unreadable_since) is not None:
        words = unreadable(wait.unreadable_reason).words
        yield _because("since ", at, " ", *words, remedy=f"pgqueue change {row['id']} --args JSON")
    if job.is_due and job.status is JobStatus.BLOCKED:
        for limit in job.limits:
            yield from _of_limit(limit, row["id"], wait.first_admitted)
    if job.is_due and job.status is JobStatus.PENDING and wait.workers and not wait.free_workers:
        of = "all live workers" if wait.workers > 1 else "the only live worker"
        yield _because("the slots of ", of, " of queue ", queue, f" are busy, {_ahead(wait.ahead)}")


def _not_due(job: JobDetails) -> Reason:
    row, last = job.columns, job.past_attempts[-1] if job.past_attempts else None
    at = (row["run_at"], ", in ", row["run_at"] - job.read_at)
    now = f"pgqueue run-now {row['id']}"
    if last is not None and row["attempts"]:
        end = f": {_attempt(row, last.attempt)} ended as {last.outcome}"
        return _because("is retried at ", *at, end, *quoted(_error(last)), remedy=now)
    snoozed = f": it was snoozed {row['snoozes']} times" if row["snoozes"] else ""
    return _because("is due at ", *at, snoozed, remedy=now)


def _of_limit(limit: LimitUse, job_id: int, first: int | None) -> Iterator[Reason]:
    """Say why a limit does not admit a job; ``first``: the job that is admitted before it."""
    name = Name(Kind.LIMIT, limit.key, limit.key)
    is_first = first in (None, job_id)
    if limit.capacity is None:
        yield undeclared(limit.key)
    elif limit.capacity == 0:
        yield _because("its limit ", name, " is paused", remedy=_resume(limit))
    elif not has_own_capacity(limit.capacity, is_fair=limit.is_fair):
        before: list[Part] = [] if is_first else [", and before it comes ", *_jobs([first])]
        yield _because("waits for its turn among the keys of its limit ", name, *before)
    elif limit.period is not None:
        if limit.seconds_to_token is not None:
            rate = f" permits {rate_in_words(limit.capacity, limit.period)}, the next in "
            yield _because("its limit ", name, rate, timedelta(seconds=limit.seconds_to_token))
    elif limit.held >= limit.capacity:
        held = f" is full: {limit.held} of {limit.capacity} places are held by "
        more = ", ..." if limit.held > len(limit.holders) else ""
        raised = f"pgqueue set-limit {quote(name_of(limit.key))} CAPACITY"
        yield _because("its limit ", name, held, *_jobs(limit.holders), more, remedy=raised)
    elif limit.is_strict and not is_first:
        yield _because("its limit ", name, " runs its jobs in order, first ", *_jobs([first]))


def _next(job: JobDetails) -> Reason:
    """A job that nothing hinders."""
    row, first = job.columns, job.wait.first_admitted
    if job.status is JobStatus.PENDING:
        return _because(f"a free worker claims it within moments, {_ahead(job.wait.ahead)}")
    if first is None:
        mend = f"pgqueue cancel {row['id']}; pgqueue requeue {row['id']}"
        return _because("has no message, so no worker finds it", remedy=mend)
    if first == row["id"]:
        return _because("a worker admits it to its limits within moments")
    return _because("its limits have room, and before it they admit ", *_jobs([first]))


def _resume(limit: LimitUse) -> str | None:
    name, _, values = limit.key.partition(" ")
    if not limit.is_set_for_key:
        return f"pgqueue set-limit {quote(name)} --reset"
    if values.startswith("sha256:") or MASK in values:
        return None  # of a secret or a long value, or for a reader who may not see it
    return f"pgqueue resume --limit {quote(name)} --key {quote(values)}"


def _ahead(count: int) -> str:
    if not count:
        return "and no due job is before it"
    return f"and {count:,}{' or more' if count == MOST_AHEAD else ''} due jobs are before it"


def _attempt(row: Any, number: int | None = None) -> str:
    return f"attempt {row['attempts'] if number is None else number} of {row['max_attempts']}"


def _error(attempt: PastAttempt) -> str | None:
    if attempt.error_type is None:
        return attempt.error
    return f"{attempt.error_type}: {attempt.error}" if attempt.error else attempt.error_type


def _jobs(ids: Collection[int | None]) -> Iterator[Part]:
    for number, id in enumerate(ids):
        yield from [", "] if number else []
        yield Name(Kind.JOB, str(id), f"job {id}")


def _worker(holder: Holder) -> Name:
    id = str(holder.worker_id)
    text = id if holder.hostname is None else f"{holder.hostname}:{holder.pid} (worker {id})"
    return Name(Kind.WORKER, id, text)
