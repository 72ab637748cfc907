"""Why a job does not run, or how it has ended: one sentence, and the command that changes it."""

import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from shlex import quote
from typing import Any

from pgqueue.checks import ALL_QUEUES
from pgqueue.models import JobStatus
from pgqueue.outcomes import AttemptEnd
from pgqueue.redaction import MASK
from pgqueue.repository.blocked import NOTHING, SKIPPED, named
from pgqueue.repository.listing import Holder, JobDetails, LimitUse, PastAttempt
from pgqueue.repository.signals import BATCH_HAS_ENDED
from pgqueue.repository.waits import MOST_AHEAD, Wait
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

SILENT_AFTER = timedelta(seconds=5)
"""A worker sends two heartbeats a second.  A worker without one for longer than this is silent."""


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
            if awaited.node_id == NOTHING:  # requeued, or of a workflow that was started again
                words = "waits until a worker has looked at the jobs before it, up to two seconds"
                return [Reason((words,))]
            of = f", one of {awaited.number} predecessors" if awaited.number > 1 else ""
            return [Reason((f"waits for the end of {named(awaited.node_id)}{of}",))]
    return list(_hindrances(job, known_tasks)) or [_next(job)]


def _ended(job: JobDetails) -> Reason:
    row, last = job.columns, job.past_attempts[-1] if job.past_attempts else None
    at, requested_at = row["finished_at"], row["cancel_requested_at"]
    requeue = f"pgqueue requeue {row['id']}"
    if job.status is JobStatus.SUCCEEDED:
        return Reason(("succeeded at ", at, f" in {_attempt(row)}"))
    if job.status is JobStatus.FAILED and last is None:
        return Reason(("failed at ", at, *quoted(row["last_error"])), requeue)
    if job.status is JobStatus.FAILED and last is not None:
        return Reason(("failed at ", at, ": ", *_end_of(row, last)), requeue)
    if requested_at is not None:
        ran = " while it ran, as requested at "
        return Reason(("was cancelled at ", at, ran, requested_at), requeue)
    if last is not None and last.outcome == AttemptEnd.CANCELLED:
        by = f" by its handler, in {_attempt(row, last.attempt)}"
        return Reason(("was cancelled at ", at, by, *quoted(last.error)), requeue)
    waited, error = " while it waited", str(row["last_error"] or "")
    is_skipped = row["started_at"] is None and error.startswith(SKIPPED)
    remedy = _requeue_of_cause(error) if is_skipped else requeue
    return Reason(("was cancelled at ", at, waited, *quoted(row["last_error"])), remedy)


def _requeue_of_cause(reason: str) -> str | None:
    """The command for what a job was skipped after; None for a job that was not needed."""
    found = re.match(rf"{SKIPPED}(job|batch) (\d+)", reason)
    if found is None:
        return None
    of_batch = f"--status failed --batch {found[2]}"
    return f"pgqueue requeue {found[2] if found[1] == 'job' else of_batch}"


def _running(job: JobDetails, holder: Holder) -> Iterator[Reason]:
    row, worker, silence = job.columns, _worker(holder), holder.heartbeat_age
    if holder.hostname is None or holder.is_dead:
        dead = " is dead: any other worker gives the job back within seconds"
        yield Reason(("its worker ", worker, dead), "pgqueue worker")
    elif silence is not None and silence > SILENT_AFTER:
        silent, back = " has sent no heartbeat for ", "any other worker gives the job back"
        words = ("its worker ", worker, silent, silence, f": if it stays silent, {back}")
        yield Reason(words, "pgqueue worker")
    if (at := row["kill_requested_at"]) is not None:
        yield Reason(("the kill of its handler was requested at ", at))
    elif (at := row["cancel_requested_at"]) is not None:
        until = ": it ends as cancelled when its handler ends"
        kill = f"pgqueue cancel --kill {row['id']}"
        yield Reason(("its cancellation was requested at ", at, until), kill)
    if holder.slots is not None and holder.earlier_jobs >= holder.slots and not row["progress"]:
        busy = f": the {holder.slots} slots of the worker have jobs that it claimed earlier"
        yield Reason(("was claimed ahead by ", worker, " at ", holder.started_at, busy))
    else:
        attempt = _attempt(row, holder.attempt)
        yield Reason(("runs on ", worker, f", {attempt} since ", holder.started_at))


def _hindrances(job: JobDetails, known_tasks: Collection[str]) -> Iterator[Reason]:
    row, wait = job.columns, job.wait
    queue = Name(Kind.QUEUE, row["queue"], row["queue"])
    task = Name(Kind.TASK, row["task"], row["task"])
    if not job.is_due:
        yield _not_due(job)
    yield from _pauses(wait, queue, task)
    if not wait.workers:
        quiet = f"; live workers that are quiet: {wait.quiet_workers}" if wait.quiet_workers else ""
        yield nobody_serves(row["queue"]).more(quiet)
    if known_tasks and row["task"] not in known_tasks:
        yield unknown_task(row["task"]).more(": only workers whose code has it run the job")
    if (at := wait.unreadable_since) is not None:
        words = ("since ", at, " ", *unreadable(wait.unreadable_reason).words)
        yield Reason(words, f"pgqueue change {row['id']} --args JSON")
    if job.is_due and job.status is JobStatus.BLOCKED:
        for limit in job.limits:
            yield from _of_limit(limit, row["id"], wait.first_admitted)
    if job.is_due and job.status is JobStatus.PENDING and wait.workers and not wait.free_workers:
        workers = "all live workers" if wait.workers > 1 else "the only live worker"
        busy = f" are busy, {_ahead(wait.ahead)}"
        yield Reason((f"the slots of {workers} of queue ", queue, busy))


def _not_due(job: JobDetails) -> Reason:
    row, last = job.columns, job.past_attempts[-1] if job.past_attempts else None
    if (step := job.open_step) is not None:
        until = () if step.finished_at is None else (" until ", step.finished_at)
        if step.signal is None:
            return Reason((f"sleeps in its step {step.name!r}", *until))
        if step.signal == BATCH_HAS_ENDED:
            return Reason((f"waits for the end of batch {step.key}",))
        signal = (step.signal, step.key) if step.key else (step.signal,)
        words = (f"waits for the signal {' '.join(signal)}", *until)
        return Reason(words, f"pgqueue signal {' '.join(map(quote, signal))}")
    at = (row["run_at"], ", in ", row["run_at"] - job.read_at)
    run_now = f"pgqueue run-now {row['id']}"
    if last is not None and row["attempts"]:
        moved: tuple[Part, ...] = ()
        if last.moved_to is not None:
            moved = (" in queue ", Name(Kind.QUEUE, last.moved_to, last.moved_to))
        return Reason(("is retried at ", *at, *moved, ": ", *_end_of(row, last)), run_now)
    snoozed = f": it was snoozed {row['snoozes']} times" if row["snoozes"] else ""
    return Reason(("is due at ", *at, snoozed), run_now)


def _of_limit(limit: LimitUse, job_id: int, first: int | None) -> Iterator[Reason]:
    """Say why a limit does not admit a job; ``first``: the job that is admitted before it."""
    name = Name(Kind.LIMIT, limit.key, limit.key)
    is_first = first in (None, job_id)
    if limit.capacity is None:
        yield undeclared(limit.key)
    elif limit.capacity == 0:
        yield Reason(("its limit ", name, " is paused"), _resume(limit))
    elif not has_own_capacity(limit.capacity, is_fair=limit.is_fair):
        before: list[Part] = [] if is_first else [", and before it comes ", *_jobs([first])]
        yield Reason(("waits for its turn among the keys of its limit ", name, *before))
    elif limit.period is not None:
        if limit.seconds_to_token is not None:
            rate = f" permits {rate_in_words(limit.capacity, limit.period)}, the next in "
            yield Reason(("its limit ", name, rate, timedelta(seconds=limit.seconds_to_token)))
    elif limit.held >= limit.capacity:
        held = f" is full: {limit.held} of {limit.capacity} places are held by "
        more = ", ..." if limit.held > len(limit.holders) else ""
        raised = f"pgqueue set-limit {quote(name_of(limit.key))} CAPACITY"
        yield Reason(("its limit ", name, held, *_jobs(limit.holders), more), raised)
    elif limit.is_strict and not is_first:
        yield Reason(("its limit ", name, " runs its jobs in order, first ", *_jobs([first])))


def _next(job: JobDetails) -> Reason:
    """A job that nothing hinders."""
    row, first = job.columns, job.wait.first_admitted
    if job.status is JobStatus.PENDING:
        return Reason((f"a free worker claims it within moments, {_ahead(job.wait.ahead)}",))
    if first is None:
        mend = f"pgqueue cancel {row['id']}; pgqueue requeue {row['id']}"
        return Reason(("has no message, so no worker finds it",), mend)
    if first == row["id"]:
        return Reason(("a worker admits it to its limits within moments",))
    return Reason(("its limits have room, and before it they admit ", *_jobs([first])))


def _resume(limit: LimitUse) -> str | None:
    name, _, values = limit.key.partition(" ")
    if not limit.is_set_for_key:
        return f"pgqueue set-limit {quote(name)} --reset"
    if values.startswith("sha256:") or MASK in values:
        return None  # of a secret or a long value, or for a reader who may not see it
    return f"pgqueue resume --limit {quote(name)} --key {quote(values)}"


def _pauses(wait: Wait, queue: Name, task: Name) -> Iterator[Reason]:
    if (at := wait.all_paused_at) is not None:
        yield Reason(("all queues are paused since ", at), f"pgqueue resume {quote(ALL_QUEUES)}")
    if (at := wait.queue_paused_at) is not None:
        resume = f"pgqueue resume {quote(queue.name)}"
        yield Reason(("its queue ", queue, " is paused since ", at), resume)
    if (at := wait.task_paused_at) is not None:
        resume = f"pgqueue resume --task {quote(task.name)}"
        yield Reason(("its task ", task, " is paused since ", at), resume)


def _ahead(count: int) -> str:
    if not count:
        return "and no due job is before it"
    return f"and {count:,}{' or more' if count == MOST_AHEAD else ''} due jobs are before it"


def _attempt(row: Any, number: int | None = None) -> str:
    return f"attempt {row['attempts'] if number is None else number} of {row['max_attempts']}"


def _end_of(row: Any, attempt: PastAttempt) -> tuple[Part, ...]:
    """How an attempt has ended, with its error."""
    end = f"{_attempt(row, attempt.attempt)} ended as {attempt.outcome}"
    return (end, *quoted(_error(attempt)))


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
