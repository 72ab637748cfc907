"""``pgqueue requeue``, ``cancel`` and ``run-now``: some jobs by id, or many by a filter.

Each batch is one transaction, and so is each job named by id.  Results are printed after the
commit.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import opened
from pgqueue.errors import DuplicateJob, JobNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus
from pgqueue.repository import Change, Listing
from pgqueue.statements.listing import JobFilter

BATCH = 100

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"


@dataclass(frozen=True, slots=True)
class Verb:
    """An operation on jobs."""

    name: str
    act: Callable[[PgQueue, Session, int], Change]
    example: str
    are_waiting: bool = False
    """Only jobs that are not due yet; no status needs to be given."""


REQUEUE = Verb("requeue", PgQueue.requeue, "--status failed")
CANCEL = Verb("cancel", PgQueue.cancel, "--status pending")
RUN_NOW = Verb("run now", PgQueue.run_now, "--task mail.send", are_waiting=True)


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
        return self.change in (NOT_FOUND, KEY_TAKEN)


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
    is_narrowed = limit is not None or any(value is not None for value in words.values())
    if job_ids:
        if statuses or is_narrowed:
            raise click.UsageError("Give ids, or say which jobs by options, not both")
        _change_named(queue, verb, list(dict.fromkeys(job_ids)), as_json=as_json)
    elif statuses or (verb.are_waiting and is_narrowed):
        wanted = frozenset(map(JobStatus, statuses)) or {JobStatus.PENDING}
        which = JobFilter(statuses=frozenset(wanted), are_waiting=verb.are_waiting, **words)
        _change_many(queue, verb, which, limit=limit, yes=yes, as_json=as_json)
    else:
        raise click.UsageError(f"Which jobs? Give their ids, or say {verb.example}")


def _change_named(queue: PgQueue, verb: Verb, job_ids: list[int], *, as_json: bool) -> None:
    results = []
    for job_id in job_ids:
        [result] = _change_batch(queue, verb, [job_id])
        results.append(result)
        if not as_json:
            click.echo(str(result), err=result.is_missed)
    if as_json:
        found = [{"id": one.id, "change": one.change, "reason": one.reason} for one in results]
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
        counts.update(result.change for result in batch)
    if as_json:
        click.echo(json.dumps({"matched": len(job_ids), "counts": counts}, indent=2))
    else:
        words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(counts.items()))
        click.echo(", ".join(words) or "No job fits.")


def _ask(verb: Verb, which: JobFilter, number: int) -> None:
    words = "waiting" if verb.are_waiting else " or ".join(sorted(which.statuses))
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
    except JobNotFound:
        return Result(job_id, NOT_FOUND, "no job has this id: never committed, or deleted")
    except DuplicateJob as error:
        other = f"job {error.holder}" if error.holder else "another unfinished job"
        return Result(job_id, KEY_TAKEN, f"{other} of its queue has its unique key")
    reason = None
    if change is Change.UNCHANGED:
        status = Listing(session).status(job_id)
        is_due = verb.are_waiting and status is JobStatus.PENDING
        reason = "it is due already" if is_due else f"its status is {status}"
    return Result(job_id, change.name.lower(), reason)
