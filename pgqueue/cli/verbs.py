"""The commands that change jobs, schedules and workers, named by id or name, or jobs by a filter.

Each job, schedule or worker that is named, and each portion of a filter, is one transaction, with
its row in the log of operators.  Results are printed after the commit.  Whatever ends a command
between two portions, it says how many jobs it has changed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import click
from sqlalchemy.orm import Session

from pgqueue import bulk
from pgqueue.bulk import MISSED, NOT_FOUND, Act, Result
from pgqueue.cli.app_loader import CliState, committed, opened
from pgqueue.cli.lists import SCHEDULES, print_list
from pgqueue.cli.operators import actor, log_done, logged, reason_option
from pgqueue.cli.options import (
    FILTERS,
    Decorator,
    Seconds,
    as_arguments,
    as_job_id,
    as_span,
    as_time,
    as_worker_id,
    chosen_jobs,
    hint_at_names,
    on_database_with_json,
    together,
    which_jobs,
)
from pgqueue.errors import ScheduleNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import Listing
from pgqueue.tasks import editing
from pgqueue.terminal import as_data, harmless, print_json

SHOWN = 20
"""How many of the jobs of a filter are named that were not changed."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A command on jobs."""

    name: str
    help: str
    examples: tuple[str, ...]
    act: Callable[..., Act]
    """Returns what to do with a job; takes the PgQueue and the values of ``options``."""
    called: str | None = None
    """What the jobs that it is for are called together; None if a filter needs --status."""
    options: tuple[Decorator, ...] = ()

    @property
    def action(self) -> str:
        """Its name in the log of operators."""
        return self.name.replace("-", "_")

    @property
    def kind(self) -> bulk.Kind:
        return bulk.KINDS[self.action]


def _requeue(queue: PgQueue, args: dict[str, Any] | None) -> Act:
    changes = None if args is None else editing.Changes(args=args, are_args_stored=True)
    return bulk.Requeue(queue, changes)


def _change(queue: PgQueue, **values: Any) -> Act:
    changes = editing.Changes(**values, are_args_stored=True)

    def act(session: Session, job_id: int, _at: datetime | None) -> Change:
        return editing.change(Jobs(session), job_id, changes, queue.find, notify=queue.notify)

    return act


def _cancel(queue: PgQueue, kill: bool) -> Act:
    return bulk.act_of(queue, "kill" if kill else "cancel")


def _run_now(queue: PgQueue) -> Act:
    return bulk.act_of(queue, "run_now")


_args = click.option(
    "--args",
    metavar="JSON",
    callback=as_arguments,
    help="New values of some arguments by name, as JSON; others stay.",
)

JOB_VERBS = (
    Verb(
        "requeue",
        "Put failed or cancelled jobs back, with all their attempts available again."
        "  --args replaces some arguments before; it needs the app, which checks them."
        "  Jobs that are not, or no longer, failed or cancelled stay as they are.",
        ("4711 4712", "--status failed --task mail.welcome"),
        act=_requeue,
        options=(
            _args,
            click.option(
                "--spread",
                type=as_span,
                metavar="SPAN",
                help="Make the jobs due one after the other over this time, as 20m, and not now.",
            ),
        ),
    ),
    Verb(
        "cancel",
        "Cancel jobs: a waiting job ends at once, a running job is asked to stop."
        "  Jobs that have ended stay as they are.  Of the jobs of a filter, those that wait end "
        "first, the newest before the others.",
        ("4711 4712", "--batch 12"),
        act=_cancel,
        options=(
            click.option(
                "--kill",
                is_flag=True,
                help="Kill the child processes of running jobs; needs the app.",
            ),
        ),
        called="unfinished",
    ),
    Verb(
        "run-now",
        "Make waiting jobs due now: those that were delayed, and those that wait for a retry, for "
        "example after an outage of a mail server."
        "  Uses up no attempt.  Jobs that are due, running or ended stay as they are.",
        ("4711", "--task mail.send"),
        act=_run_now,
        called="waiting",
    ),
    Verb(
        "change",
        "Change waiting jobs: their priority, their time, or some of their arguments."
        "  The arguments that --args does not name stay; all are checked by the app, and a job "
        "whose arguments would be wrong is refused.  Jobs that are running or ended stay as they "
        "are.",
        ("4711 --priority 0", "--task mail.send --priority 9"),
        act=_change,
        called="waiting",
        options=(
            click.option(
                "--priority", type=click.IntRange(0, 9), help="The new one: 0 runs first, 9 last."
            ),
            click.option("--delay", type=Seconds(), help="Not before, from now."),
            click.option(
                "--run-at", type=as_time, metavar="TIME", help="Not before, as 2030-01-31T08:00Z."
            ),
            _args,
        ),
    ),
)


def _command(verb: Verb) -> click.Command:
    """The command of a row of JOB_VERBS."""
    first, _, more = verb.help.partition("  ")
    by = "--status" if verb.called is None else "--task"
    named = f"Name the jobs by id, or select them by {by} and other options: then the command "
    named += "counts them, asks you, and changes them in batches, each in its own commit."
    lines = (f"pgqueue --app shop.jobs:queue {verb.name} {words}" for words in verb.examples)
    examples = "\n          ".join(lines)

    @click.command(verb.name, help=f"{first}\n\n{named}\n\n{more}\n\n\b\nExample:  {examples}")
    @click.argument("job_ids", metavar="[ID]...", nargs=-1, type=as_job_id)
    @which_jobs(verb.kind.statuses)
    @together(*verb.options, reason_option)
    @click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help="At most so many, the oldest first.",
    )
    @click.option("--yes", is_flag=True, help="Do not ask before many jobs are changed.")
    @on_database_with_json
    def command(given: CliState, /, **options: Any) -> None:
        _run(given, verb, **options)

    return command


def _run(
    given: CliState,
    verb: Verb,
    /,
    *,
    job_ids: Sequence[int],
    statuses: Sequence[str],
    limit: int | None,
    yes: bool,
    as_json: bool,
    reason: str,
    spread: timedelta | None = None,
    **options: Any,
) -> None:
    """Change the jobs; exit with 1 if one was refused, its key taken or its id wrong."""
    which = {name: options.pop(name) for name in FILTERS}
    is_narrowed = limit is not None or any(value is not None for value in which.values())
    if job_ids and (statuses or is_narrowed):
        raise click.UsageError("Give ids, or say which jobs by options, not both")
    in_line = which["where"] is not None and which["where"].statuses
    if not job_ids and not statuses and not in_line and not (verb.called and is_narrowed):
        example = " ".join(verb.examples[-1].split()[:2])
        raise click.UsageError(f"Which jobs? Give their ids, or say {example}")
    queue = given.database()
    act = verb.act(queue, **options)
    begin = partial(committed, queue)
    words: dict[str, Any] = {"actor": actor(), "reason": reason, "spread": spread}
    words["options"] = _for_log(options)
    action = "kill" if options.get("kill") else verb.action
    if job_ids:
        ids = sorted(set(job_ids))
        with begin() as session:
            begun = logged(session, bulk.action_on_ids(session, action, ids, **words))
        portions = bulk.run(begin, begun, act, ids=ids, size=1)
        are_missed = _change_named((results for _, results in portions), as_json=as_json)
    else:
        asked = chosen_jobs(statuses, **which)
        chosen = bulk.narrowed(asked, verb.action)
        with opened(queue) as session:
            ids = Listing(session).ids(chosen, limit=limit)
        portions = iter(())
        bulk.check_arguments(queue, chosen)
        if ids:
            called = " or ".join(sorted(chosen.statuses)) if asked.statuses else verb.called
            if not yes:
                _ask(f"{verb.name.replace('-', ' ')} {len(ids):,} {called} jobs")
            with begin() as session:
                begun = logged(
                    session, bulk.action_on_filter(session, action, chosen, ids=ids, **words)
                )
            portions = bulk.run(begin, begun, act, ids=ids)
        are_missed = _change_many(
            (results for _, results in portions), matched=len(ids), as_json=as_json
        )
        if not ids and not as_json:
            click.echo("No job fits.")
            hint_at_names(queue, task=chosen.task, queue_name=chosen.queue)
    if are_missed:
        click.get_current_context().exit(1)


def _for_log(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command as JSON data; of arguments only their names, as values may be
    secret."""
    given = {name: value for name, value in options.items() if value not in (None, False)}
    given.pop("kill", None)
    if "args" in given:
        given["args"] = sorted(given["args"])
    return {name: as_data(value) for name, value in given.items()}


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {what}; to confirm, add --yes")
    click.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


def _change_named(portions: Iterable[Sequence[Result]], *, as_json: bool) -> bool:
    """Change jobs one by one, and print each; whether one was missed."""
    changed = []
    for result in chain.from_iterable(portions):
        changed.append(result)
        if not as_json:
            is_missed = result.change in (NOT_FOUND, *MISSED)
            click.echo(harmless(str(result)), err=is_missed)
    counts = Counter(result.change for result in changed)
    if as_json:
        print_json({"jobs": changed, "counts": counts})
    return any(counts[change] for change in (NOT_FOUND, *MISSED))


def _change_many(portions: Iterable[Sequence[Result]], *, matched: int, as_json: bool) -> bool:
    """Change the jobs in portions; whether one of them was missed."""
    counts: Counter[str] = Counter()
    try:
        for portion in portions:
            missed = [result for result in portion if result.change in MISSED]
            for result in missed[: max(0, SHOWN - sum(counts[change] for change in MISSED))]:
                click.echo(harmless(str(result)), err=True)
            counts.update(result.change for result in portion)
    finally:  # also after Ctrl-C, or an error of the database
        if as_json:
            print_json({"matched": matched, "counts": counts})
        elif counts:
            words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(counts.items()))
            click.echo(", ".join(words))
    return any(counts[change] for change in MISSED)


SCHEDULE_VERBS = {
    "pause": ("paused", "Fire no tick of these schedules until `resume`."),
    "resume": ("resumed", "Undo `pause`; the ticks of the pause are not made up."),
    "trigger": (
        "triggered",
        "Enqueue a job of each schedule now; their next ticks stay where they are.\n\n"
        "Needs the app, whose tasks encode the arguments.",
    ),
    "remove": (
        "removed",
        "Delete schedules; their jobs stay.\n\n"
        "A schedule that the code declares is added again when the next worker starts.",
    ),
}
"""The methods of ``queue.schedules``, the word for what they have done, and the help."""


@click.group(invoke_without_command=True)
@on_database_with_json
@click.pass_context
def schedules(ctx: click.Context, given: CliState, as_json: bool) -> None:
    """Show the schedules with their next three runs, in their zone and in UTC.

    Below the table are the schedules whose tick is overdue, and why.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules
              pgqueue --app shop.jobs:queue schedules trigger shop.jobs.nightly
    """
    if ctx.invoked_subcommand is None:
        queue = given.database()
        with opened(queue) as session:
            found = queue.schedules.list(session)
        print_list(SCHEDULES, queue, found, as_json=as_json)


def _schedule_command(verb: str) -> click.Command:
    """The command of a row of SCHEDULE_VERBS."""
    _, help = SCHEDULE_VERBS[verb]
    example = f"pgqueue --app shop.jobs:queue schedules {verb} shop.jobs.nightly"

    @click.command(verb, help=f"{help}\n\n\b\nExample:  {example}")
    @click.argument("names", metavar="NAME...", nargs=-1, required=True)
    @reason_option
    @on_database_with_json
    def command(given: CliState, names: Sequence[str], reason: str, as_json: bool) -> None:
        queue = given.application() if verb == "trigger" else given.database()
        changed = [
            _change_schedule(queue, verb, name, reason=reason) for name in dict.fromkeys(names)
        ]
        if as_json:
            print_json({"schedules": changed})
        else:
            for one in changed:
                job = f", job {one['job_id']}" if "job_id" in one else ""
                reason = f"; {one['reason']}" if "reason" in one else ""
                is_missed = one["change"] == NOT_FOUND
                line = (
                    one["reason"] if is_missed else f"{one['name']}: {one['change']}{job}{reason}"
                )
                click.echo(harmless(line), err=is_missed)
        if any(one["change"] == NOT_FOUND for one in changed):
            click.get_current_context().exit(1)

    return command


def _change_schedule(queue: PgQueue, verb: str, name: str, *, reason: str) -> dict[str, Any]:
    with opened(queue) as session:
        declared = {one.name: one.declared_in for one in queue.schedules.list(session)}
        try:
            job_id = getattr(queue.schedules, verb)(session, name)
        except ScheduleNotFound as error:
            return {"name": name, "change": NOT_FOUND, "reason": str(error)}
        enqueued = None if job_id is None else {"job": job_id}
        log_done(session, f"{verb}_schedule", {"schedule": name}, reason=reason, after=enqueued)
        session.commit()
    result = {"name": name, "change": SCHEDULE_VERBS[verb][0]}
    if job_id is not None:
        result["job_id"] = job_id
    if verb == "remove" and declared[name] is not None:
        result["reason"] = (
            f"module {declared[name]} declares it, so the next worker that starts adds it again; "
            "pause it"
        )
    return result


@click.command()
@click.argument("worker_ids", metavar="ID...", nargs=-1, required=True, type=as_worker_id)
@reason_option
@on_database_with_json
def quiet(given: CliState, as_json: bool, reason: str, worker_ids: Sequence[UUID]) -> None:
    """Make workers claim no more jobs, within a second.

    A quiet worker ends the jobs that it has claimed and then idles; stop it with SIGTERM when
    `pgqueue workers` shows that it has no jobs.  This cannot be undone: start another worker.

    \b
    Example:  pgqueue --app shop.jobs:queue quiet 6f9619ff-8b86-d011-b42d-00c04fc964ff
    """
    queue = given.database()
    with opened(queue) as session:
        are_quiet = {id: queue.quiet(session, id) for id in worker_ids}
        for id, is_quiet in are_quiet.items():
            if is_quiet:
                log_done(session, "quiet", {"worker": str(id)}, reason=reason)
        session.commit()
    if as_json:
        found = [{"id": str(id), "is_quiet": is_quiet} for id, is_quiet in are_quiet.items()]
        print_json({"workers": found})
    else:
        for id, is_quiet in are_quiet.items():
            words = "quiet" if is_quiet else "no live worker has this id"
            click.echo(f"{id}: {words}", err=not is_quiet)
    if not all(are_quiet.values()):
        click.get_current_context().exit(1)


requeue, cancel, run_now, change = map(_command, JOB_VERBS)
for verb in SCHEDULE_VERBS:
    schedules.add_command(_schedule_command(verb))
