"""``pgqueue requeue``, ``cancel``, ``run-now`` and ``change``: jobs by id, or by a filter.

Each batch is one transaction, and so is each job named by id.  Results are printed after the
commit.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import opened
from pgqueue.cli.refusals import one_line
from pgqueue.errors import (
    ArgumentsError,
    DuplicateJob,
    JobNotFound,
    PayloadError,
    PgQueueError,
    UnknownTask,
)
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus
from pgqueue.repository import Change, Jobs, Listing
from pgqueue.statements.listing import JobFilter
from pgqueue.tasks import editing
from pgqueue.tasks.editing import Changes

BATCH = 100
SHOWN = 20
"""How many refused jobs of many are named."""

WAITING = frozenset({JobStatus.PENDING, JobStatus.BLOCKED})

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"
REFUSED = "refused"
"""The new arguments of the job are wrong."""


@dataclass(frozen=True, slots=True)
class Verb:
    """An operation on jobs."""

    name: str
    act: Callable[[PgQueue, Session, int], Change]
    example: str
    of: frozenset[JobStatus] = frozenset()
    """The jobs that it is for, if it takes no --status; they wait."""
    reason_unchanged: str = ""
    """Why a waiting job was left as it is."""


REQUEUE = Verb("requeue", PgQueue.requeue, "--status failed")
CANCEL = Verb("cancel", PgQueue.cancel, "--status pending")
RUN_NOW = Verb(
    "run now",
    PgQueue.run_now,
    "--task mail.send",
    of=frozenset({JobStatus.PENDING}),
    reason_unchanged="it is due already",
)


def changing(changes: Changes) -> Verb:
    def act(queue: PgQueue, session: Session, job_id: int) -> Change:
        jobs = Jobs(session)
        return editing.change(jobs, job_id, changes, queue.find, notify=queue.notify)

    reason = "it has these values already, or a worker is about to start it"
    return Verb("change", act, "--task mail.send", of=WAITING, reason_unchanged=reason)


def requeuing(changes: Changes) -> Verb:
    def act(queue: PgQueue, session: Session, job_id: int) -> Change:
        jobs = Jobs(session)
        return editing.requeue(jobs, job_id, changes, queue.find, notify=queue.notify)

    return replace(REQUEUE, act=act)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the operation on one job."""

    id: int
    change: str
    reason: str | None = None

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"

    @property
    def is_missed(self) -> bool:
        return self.change in (NOT_FOUND, KEY_TAKEN, REFUSED)

    def as_data(self) -> dict[str, Any]:
        return {"id": self.id, "change": self.change, "reason": self.reason}


def change(
    queue: PgQueue,
    verb: Verb,
    /,
    *,
    job_ids: tuple[int, ...],
    statuses: tuple[str, ...] = (),
    limit: int | None,
    yes: bool,
    as_json: bool,
    **words: Any,
) -> None:
    """Change the selected jobs; exit with 1 if a named job could not be changed."""
    if job_ids:
        _check_only_ids(statuses, limit, words)
        _change_named(queue, verb, list(dict.fromkeys(job_ids)), as_json=as_json)
    else:
        which = _filter(verb, statuses, limit, words)
        _change_many(queue, verb, which, limit=limit, yes=yes, as_json=as_json)


def selected(
    session: Session, verb: Verb, /, *, job_ids: tuple[int, ...], limit: int | None, **words: Any
) -> list[int]:
    """The ids of the jobs that :func:`change` would change."""
    if job_ids:
        _check_only_ids((), limit, words)
        return list(dict.fromkeys(job_ids))
    return Listing(session).ids(_filter(verb, (), limit, words), limit=limit)


def _check_only_ids(statuses: tuple[str, ...], limit: int | None, words: Mapping[str, Any]) -> None:
    if statuses or _is_narrowed(limit, words):
        raise click.UsageError("Give ids, or say which jobs by options, not both")


def _filter(
    verb: Verb, statuses: tuple[str, ...], limit: int | None, words: Mapping[str, Any]
) -> JobFilter:
    if not statuses and not (verb.of and _is_narrowed(limit, words)):
        raise click.UsageError(f"Which jobs? Give their ids, or say {verb.example}")
    wanted = frozenset(map(JobStatus, statuses)) or verb.of
    return JobFilter(statuses=wanted, are_waiting=verb is RUN_NOW, **words)


def _is_narrowed(limit: int | None, words: Mapping[str, Any]) -> bool:
    return limit is not None or any(value is not None for value in words.values())


def _change_named(queue: PgQueue, verb: Verb, job_ids: list[int], *, as_json: bool) -> None:
    results = []
    for job_id in job_ids:
        [result] = _change_batch(queue, verb, [job_id])
        results.append(result)
        if not as_json:
            click.echo(str(result), err=result.is_missed)
    if as_json:
        found = [one.as_data() for one in results]
        counts = Counter(result.change for result in results)
        click.echo(json.dumps({"jobs": found, "counts": counts}, indent=2))
    if any(result.is_missed for result in results):
        click.get_current_context().exit(1)


def _change_many(
    queue: PgQueue, verb: Verb, which: JobFilter, *, limit: int | None, yes: bool, as_json: bool
) -> None:
    with opened(queue) as session:
        job_ids = Listing(session).ids(which, limit=limit)
    if job_ids and not yes:
        _ask(verb, which, len(job_ids))
    counts: Counter[str] = Counter()
    for start in range(0, len(job_ids), BATCH):
        batch = _change_batch(queue, verb, job_ids[start : start + BATCH])
        refused = [result for result in batch if result.change == REFUSED]
        for result in refused[: max(0, SHOWN - counts[REFUSED])]:
            click.echo(str(result), err=True)
        counts.update(result.change for result in batch)
    if as_json:
        click.echo(json.dumps({"matched": len(job_ids), "counts": counts}, indent=2))
    else:
        words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(counts.items()))
        click.echo(", ".join(words) or "No job fits.")
    if counts[REFUSED]:
        click.get_current_context().exit(1)


def _ask(verb: Verb, which: JobFilter, number: int) -> None:
    words = "waiting" if verb.of else " or ".join(sorted(which.statuses))
    many = f"{number:,} {words} jobs"
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {verb.name} {many}; to confirm, add --yes")
    click.confirm(f"{verb.name.capitalize()} {many}?", abort=True, err=True)


def _change_batch(queue: PgQueue, verb: Verb, job_ids: Sequence[int]) -> list[Result]:
    """Change some jobs in one transaction; jobs that have changed meanwhile stay as they are."""
    with opened(queue) as session:
        results = [_change_one(queue, session, verb, job_id) for job_id in job_ids]
        session.commit()
    return results


def _change_one(queue: PgQueue, session: Session, verb: Verb, job_id: int) -> Result:
    try:
        change = verb.act(queue, session, job_id)
    except PgQueueError as error:
        return result_of_error(job_id, error)
    reason = None
    if change is Change.UNCHANGED:
        status = Listing(session).status(job_id)
        is_waiting = status in verb.of and verb.reason_unchanged
        reason = verb.reason_unchanged if is_waiting else f"its status is {status}"
    return Result(job_id, change.name.lower(), reason)


def result_of_error(job_id: int, error: PgQueueError) -> Result:
    """Say why a job was not changed; raises errors that are not about this job."""
    match error:
        case JobNotFound():
            return Result(job_id, NOT_FOUND, "no job has this id: never committed, or deleted")
        case DuplicateJob():
            other = f"job {error.holder}" if error.holder else "another unfinished job"
            return Result(job_id, KEY_TAKEN, f"{other} of its queue has its unique key")
        case ArgumentsError() | PayloadError() | UnknownTask():
            return Result(job_id, REFUSED, one_line(error))
    raise error
