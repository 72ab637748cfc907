"""``pgqueue requeue`` and ``pgqueue cancel``: some jobs by their ids, or many by what they share.

What is said of a job is written by then: each batch is a transaction of its own, and so is each
job that is named by its id.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import click
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgqueue.cli.target import opened
from pgqueue.errors import DuplicateJob, JobNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus
from pgqueue.repository import Change, Listing
from pgqueue.statements.listing import JobFilter
from pgqueue.terminal import harmless

BATCH = 100

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"


@dataclass(frozen=True, slots=True)
class Verb:
    """What is done to jobs, and why it may not be done."""

    name: str
    act: Callable[[PgQueue, Session, int], Change]
    example: str
    unchanged: dict[JobStatus, str]


REQUEUE = Verb(
    "requeue",
    PgQueue.requeue,
    "--status failed",
    {
        JobStatus.PENDING: "it waits already",
        JobStatus.RUNNING: "it is running",
        JobStatus.BLOCKED: "it waits already",
        JobStatus.SUCCEEDED: "it has succeeded; to run it again, enqueue it anew",
        JobStatus.FAILED: "a worker holds its message; try again in a moment",
        JobStatus.CANCELLED: "a worker holds its message; try again in a moment",
    },
)
CANCEL = Verb(
    "cancel",
    PgQueue.cancel,
    "--status pending",
    {
        JobStatus.SUCCEEDED: "it has already succeeded",
        JobStatus.FAILED: "it has already failed",
        JobStatus.CANCELLED: "it is cancelled already",
    },
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one job."""

    id: int
    change: str
    reason: str | None = None

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"

    @property
    def is_missed(self) -> bool:
        return self.change in (NOT_FOUND, KEY_TAKEN)


@dataclass(slots=True)
class Tally:
    """What was done before an end that came too early."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, results: Sequence[Result]) -> None:
        self.counts.update(result.change for result in results)

    def __str__(self) -> str:
        words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(self.counts.items()))
        return ", ".join(words) or "nothing was changed"


def change(
    queue: PgQueue,
    verb: Verb,
    /,
    *,
    job_ids: tuple[int, ...],
    statuses: tuple[str, ...],
    limit: int | None,
    yes: bool,
    as_json: bool,
    **words: Any,
) -> None:
    """Change the jobs that are meant; exit with 1 when one of the named could not be."""
    is_narrowed = limit is not None or any(value is not None for value in words.values())
    if job_ids:
        if statuses or is_narrowed:
            raise click.UsageError("Give ids, or say which jobs by options, not both")
        _change_named(queue, verb, list(dict.fromkeys(job_ids)), as_json=as_json)
    elif statuses:
        which = JobFilter(statuses=frozenset(map(JobStatus, statuses)), **words)
        _change_many(queue, verb, which, limit=limit, yes=yes, as_json=as_json)
    else:
        raise click.UsageError(f"Which jobs? Give their ids, or say {verb.example}")


def _change_named(queue: PgQueue, verb: Verb, job_ids: list[int], *, as_json: bool) -> None:
    results = []
    with _telling_how_far(tally := Tally()):
        for job_id in job_ids:
            [result] = _change_batch(queue, verb, [job_id])
            tally.add([result])
            results.append(result)
            if not as_json:
                click.echo(str(result), err=result.is_missed)
    if as_json:
        found = [{"id": one.id, "change": one.change, "reason": one.reason} for one in results]
        click.echo(json.dumps({"jobs": found, "counts": tally.counts}, indent=2))
    if any(result.is_missed for result in results):
        click.get_current_context().exit(1)


def _change_many(
    queue: PgQueue, verb: Verb, which: JobFilter, *, limit: int | None, yes: bool, as_json: bool
) -> None:
    with opened(queue) as session:
        job_ids = Listing(session).ids(which, limit=limit)
    if job_ids and not yes:
        _ask(verb, which, len(job_ids))
    with _telling_how_far(tally := Tally()):
        for batch in _batches(job_ids):
            tally.add(_change_batch(queue, verb, batch))
            _show_progress(tally, len(job_ids))
    if as_json:
        click.echo(json.dumps({"matched": len(job_ids), "counts": tally.counts}, indent=2))
    else:
        click.echo(str(tally) if job_ids else "No job fits.")


def _ask(verb: Verb, which: JobFilter, number: int) -> None:
    statuses = " or ".join(sorted(which.statuses))
    task = f" of task {which.task}" if which.task else ""
    in_queue = f" in queue {which.queue}" if which.queue else ""
    many = f"{number:,} {statuses} {'job' if number == 1 else 'jobs'}{task}{in_queue}"
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"This would {verb.name} {many}, and nobody is here to be asked: add --yes"
        )
    click.confirm(harmless(f"{verb.name.capitalize()} {many}?"), abort=True, err=True)


def _change_batch(queue: PgQueue, verb: Verb, job_ids: Sequence[int]) -> list[Result]:
    """Change some jobs in one transaction; those that have moved on meanwhile stay."""
    with opened(queue) as session:
        results = [_change_one(queue, session, verb, job_id) for job_id in job_ids]
        session.commit()
    return results


def _change_one(queue: PgQueue, session: Session, verb: Verb, job_id: int) -> Result:
    try:
        change = verb.act(queue, session, job_id)
    except JobNotFound:
        return Result(job_id, NOT_FOUND, "no job has this id: never committed, or deleted")
    except DuplicateJob as error:
        other = f"job {error.holder}" if error.holder else "another unfinished job"
        return Result(job_id, KEY_TAKEN, f"{other} of its queue has its unique key")
    if change is not Change.UNCHANGED:
        return Result(job_id, change.name.lower())
    status = Listing(session).status(job_id)
    reason = None if status is None else verb.unchanged.get(status)
    return Result(job_id, change.name.lower(), reason)


def _batches(job_ids: Sequence[int]) -> Iterator[list[int]]:
    ids = iter(job_ids)
    while batch := list(islice(ids, BATCH)):
        yield batch


def _show_progress(tally: Tally, total: int) -> None:
    if total > BATCH and sys.stderr.isatty():
        done = tally.counts.total()
        click.echo(f"\r{done:,} of {total:,}", err=True, nl=done == total)


@contextmanager
def _telling_how_far(tally: Tally) -> Iterator[None]:
    """An end that comes too early leaves the reader with what has been committed before it."""
    try:
        yield
    except (DBAPIError, KeyboardInterrupt):
        click.echo(f"Before this ended: {tally}. The same command does the rest.", err=True)
        raise
