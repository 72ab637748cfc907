"""``pgqueue requeue``, ``cancel``, ``run-now`` and ``change``: jobs by id, or by a filter.

Each batch is one transaction, and so is each job named by id.  Results are printed after the
commit.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import (
    Decorator,
    as_job_id,
    as_seconds,
    as_time,
    on_database_with_json,
    together,
    which_jobs,
)
from pgqueue.cli.jobs import json_object
from pgqueue.cli.names import print_no_job
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
from pgqueue.redaction import redacted_data, secrets_among
from pgqueue.repository import Change, Jobs, Listing
from pgqueue.statements.listing import JobFilter
from pgqueue.tasks import editing
from pgqueue.tasks.editing import Changes
from pgqueue.terminal import as_data, harmless, print_json

BATCH = 100
SHOWN = 20
"""How many of many jobs are named that were refused, or whose key is taken."""

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"
REFUSED = "refused"
"""The new arguments of the job are wrong."""

Act = Callable[[PgQueue, Session, int], Change]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verb:
    """An operation on jobs."""

    name: str
    act: Act
    example: str
    of: frozenset[JobStatus] = frozenset()
    """The jobs that it is for, if it takes no --status; they wait."""
    reason_unchanged: str = ""
    """Why a waiting job was left as it is."""


def _editing(edit: Callable[..., Change], changes: Changes) -> Act:
    def act(queue: PgQueue, session: Session, job_id: int) -> Change:
        return edit(Jobs(session), job_id, changes, queue.find, notify=queue.notify)

    return act


REQUEUE = Verb("requeue", PgQueue.requeue, "--status failed")
CANCEL = Verb("cancel", PgQueue.cancel, "--status pending")
RUN_NOW = Verb(
    "run now",
    PgQueue.run_now,
    "--task mail.send",
    of=frozenset({JobStatus.PENDING}),
    reason_unchanged="it is due already",
)
CHANGE = Verb(
    "change",
    PgQueue.change,
    "--task mail.send",
    of=frozenset({JobStatus.PENDING, JobStatus.BLOCKED}),
    reason_unchanged="it has these values already, or a worker is about to start it",
)


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


@dataclass(frozen=True, slots=True)
class Plan(Result):
    """The result to expect for one job, and its values that would change."""

    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.after:
            return Result.__str__(self)
        old, new = _flat(self.before), _flat(self.after)
        changes = (f"{name} {_json(old, name)} -> {_json(new, name)}" for name in {**old, **new})
        return f"{self.id}: {', '.join(changes)}"


_args = click.option(
    "--args", metavar="JSON", help="New values of some arguments by name, as JSON; others stay."
)


def _on_jobs(*statuses: str) -> Decorator:
    """Add the ids, and the options that select jobs."""
    ids = click.argument("job_ids", metavar="[ID]...", nargs=-1, type=as_job_id)
    return together(ids, which_jobs(*statuses))


_in_batches = together(
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help="At most so many, the oldest first.",
    ),
    click.option("--yes", is_flag=True, help="Do not ask before many jobs are changed."),
    on_database_with_json,
)


@click.command()
@_on_jobs("failed", "cancelled")
@_args
@_in_batches
def requeue(given: CliState, /, args: str | None, **options: Any) -> None:
    """Put failed or cancelled jobs back, with all their attempts available again.

    Name the jobs by id, or select them by --status and other options: then the command counts
    them, asks you, and requeues them in batches, each in its own commit.  Jobs that are not, or
    no longer, failed or cancelled stay as they are.  --args replaces some arguments before; it
    needs the app, which checks them.

    \b
    Example:  pgqueue --app shop.jobs:queue requeue 4711 4712
              pgqueue --app shop.jobs:queue requeue --status failed --task mail.welcome
    """
    verb = REQUEUE
    if args is not None:
        verb = replace(REQUEUE, act=_editing(editing.requeue, _changes(args=args)))
    _change(given.database(), verb, **options)


@click.command("change")
@_on_jobs()
@click.option("--priority", type=click.IntRange(0, 9), help="The new one: 0 runs first, 9 last.")
@click.option(
    "--delay", type=float, metavar="SECONDS", callback=as_seconds, help="Not before, from now."
)
@click.option("--run-at", type=as_time, metavar="TIME", help="Not before, as 2030-01-31T08:00Z.")
@_args
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_in_batches
def change_jobs(
    given: CliState,
    /,
    priority: int | None,
    delay: timedelta | None,
    run_at: datetime | None,
    args: str | None,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Change waiting jobs: their priority, their time, or some of their arguments.

    Name the jobs by id, or select them by --task and other options: then the command counts them,
    asks you, and changes them in batches, each in its own commit.  The arguments that --args does
    not name stay; all are checked by the app, and a job whose arguments would be wrong is refused.
    Jobs that are running or ended stay as they are.

    \b
    Example:  pgqueue --app shop.jobs:queue change 4711 --priority 0
              pgqueue --app shop.jobs:queue change --task mail.send --priority 9 --dry-run
    """
    changes = _changes(priority=priority, delay=delay, run_at=run_at, args=args)
    if dry_run:
        _show_plan(given.database(), changes, **options)
    else:
        verb = replace(CHANGE, act=_editing(editing.change, changes))
        _change(given.database(), verb, yes=yes, **options)


def _changes(*, args: str | None, **values: Any) -> Changes:
    given = None if args is None else json_object(args)
    return Changes(**values, args=given, are_args_stored=True)


@click.command("run-now")
@_on_jobs()
@_in_batches
def run_now(given: CliState, /, **options: Any) -> None:
    """Make waiting jobs due now: those that were delayed, and those that wait for a retry.

    Name the jobs by id, or select them by --task and other options, for example after an outage
    of a mail server: then the command counts them, asks you, and changes them in batches, each in
    its own commit.  Uses up no attempt.  Jobs that are due, running or ended stay as they are.

    \b
    Example:  pgqueue --app shop.jobs:queue run-now 4711
              pgqueue --app shop.jobs:queue run-now --task mail.send
    """
    _change(given.database(), RUN_NOW, **options)


@click.command()
@_on_jobs("pending", "running")
@_in_batches
def cancel(given: CliState, /, **options: Any) -> None:
    """Cancel jobs: a waiting job ends at once, a running job is asked to stop.

    Name the jobs by id, or select them by --status and other options: then the command counts
    them, asks you, and cancels them in batches, each in its own commit.  Jobs that have ended
    stay as they are.

    \b
    Example:  pgqueue --app shop.jobs:queue cancel 4711 4712
              pgqueue --app shop.jobs:queue cancel --status pending --queue mail
    """
    _change(given.database(), CANCEL, **options)


def _change(
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
    """Change the selected jobs; exit with 1 if a job was refused, its key taken or its id wrong."""
    which = _filter(verb, job_ids, statuses, limit, words)
    if which is None:
        _change_named(queue, verb, job_ids, as_json=as_json)
    else:
        _change_many(queue, verb, which, limit=limit, yes=yes, as_json=as_json)


def _show_plan(
    queue: PgQueue,
    changes: Changes,
    /,
    *,
    job_ids: tuple[int, ...],
    limit: int | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Decide as :func:`_change` does, with the same checks; locks and writes nothing."""
    which = _filter(CHANGE, job_ids, (), limit, words)
    with opened(queue) as session:
        ids = dict.fromkeys(job_ids) if which is None else Listing(session).ids(which, limit=limit)
        plans = [_planned(queue, session, changes, job_id) for job_id in ids]
    if not as_json:
        for plan in plans:
            click.echo(harmless(str(plan)), err=plan.is_missed)
        if which is not None and not plans:
            print_no_job(queue, which.task, which.queue)
    _report(plans, as_json=as_json)


def _filter(
    verb: Verb, job_ids: Sequence[int], statuses: Sequence[str], limit: int | None, words: Values
) -> JobFilter | None:
    """The jobs selected by options; None if they are named by ids."""
    is_narrowed = limit is not None or any(value is not None for value in words.values())
    if job_ids:
        if statuses or is_narrowed:
            raise click.UsageError("Give ids, or say which jobs by options, not both")
        return None
    if not statuses and not (verb.of and is_narrowed):
        raise click.UsageError(f"Which jobs? Give their ids, or say {verb.example}")
    wanted = frozenset(map(JobStatus, statuses)) or verb.of
    return JobFilter(statuses=wanted, are_waiting=verb is RUN_NOW, **words)


def _change_named(queue: PgQueue, verb: Verb, job_ids: Iterable[int], *, as_json: bool) -> None:
    results = []
    for job_id in dict.fromkeys(job_ids):
        [result] = _change_batch(queue, verb, [job_id])
        results.append(result)
        if not as_json:
            click.echo(str(result), err=result.is_missed)
    _report(results, as_json=as_json)


def _report(results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        counts = Counter(result.change for result in results)
        print_json({"jobs": results, "counts": counts})
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
        missed = [result for result in batch if result.change in (REFUSED, KEY_TAKEN)]
        for result in missed[: max(0, SHOWN - counts[REFUSED] - counts[KEY_TAKEN])]:
            click.echo(str(result), err=True)
        counts.update(result.change for result in batch)
    if as_json:
        print_json({"matched": len(job_ids), "counts": counts})
    else:
        words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(counts.items()))
        if counts:
            click.echo(", ".join(words))
        else:
            print_no_job(queue, which.task, which.queue)
    if counts[REFUSED] or counts[KEY_TAKEN]:
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
        return Result(job_id, *_why_missed(error))
    reason = None
    if change is Change.UNCHANGED:
        status = Listing(session).status(job_id)
        is_waiting = status in verb.of and verb.reason_unchanged
        reason = verb.reason_unchanged if is_waiting else f"its status is {status}"
    return Result(job_id, change.name.lower(), reason)


def _planned(queue: PgQueue, session: Session, changes: Changes, job_id: int) -> Plan:
    try:
        job = Jobs(session).values(job_id, with_args=changes.has_args)
        new = changes.of(job, queue.find) if job.is_waiting else {}
    except PgQueueError as error:
        return Plan(job_id, *_why_missed(error))
    if not new:
        status = Listing(session).status(job_id)
        reason = "it has these values already" if job.is_waiting else f"its status is {status}"
        return Plan(job_id, Change.UNCHANGED.name.lower(), reason)
    old = {name: getattr(job, name) for name in new}
    if "args" in new:
        before: Values = job.args if isinstance(job.args, dict) else {}
        old["args"], new["args"] = _other(before, new["args"]), _other(new["args"], before)
    task = queue.tasks.get(job.task)
    hidden = () if task is None else task.settings.secret_args
    changed = Change.CHANGED.name.lower()
    return Plan(job_id, changed, before=_shown(old, hidden), after=_shown(new, hidden))


def _why_missed(error: PgQueueError) -> tuple[str, str]:
    """Say why a job was not changed; raises errors that are not about this job."""
    match error:
        case JobNotFound():
            return NOT_FOUND, "no job has this id: never committed, or deleted"
        case DuplicateJob():
            other = f"job {error.holder}" if error.holder else "another unfinished job"
            return KEY_TAKEN, f"{other} of its queue has its unique key"
        case ArgumentsError() | PayloadError() | UnknownTask():
            return REFUSED, one_line(error)
    raise error


def _other(values: Values, than: Values) -> Values:
    return {name: value for name, value in values.items() if value != than.get(name)}


def _shown(values: Values, hidden: Sequence[str]) -> dict[str, Any]:
    """Values as JSON data, without secrets."""
    secrets = secrets_among(values.get("args", {}), hidden)
    return {
        name: as_data(redacted_data(value, names=hidden if name == "args" else (), secrets=secrets))
        for name, value in values.items()
    }


def _flat(values: Values) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            {f"args.{key}": item for key, item in value.items()}
            if name == "args"
            else {name: value}
        )
    return flat


def _json(values: Values, name: str) -> str:
    return json.dumps(values.get(name))
