"""The commands that change jobs, schedules and workers, named by id or name, or jobs by a filter.

Each command is an action of an :class:`~pgqueue.operations.Operator`, which writes the log.
Results are printed after the commit.  Whatever ends a command between two portions, it says how
many jobs it has changed.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.app_options import Decorator
from pgqueue.cli.lists import SCHEDULES, print_list
from pgqueue.cli.operators import operator_of, reason_option
from pgqueue.cli.options import (
    FILTERS,
    Seconds,
    as_action_id,
    as_arguments,
    as_fingerprint,
    as_job_id,
    as_json_value,
    as_span,
    as_tags,
    as_time,
    as_worker_id,
    chosen_jobs,
    complete_queue,
    hint_at_names,
    on_database_with_json,
    together,
    which_jobs,
)
from pgqueue.errors import OptionError, ScheduleNotFound
from pgqueue.filter_line import LONGEST_MUTE, in_hex
from pgqueue.job_queue import PgQueue
from pgqueue.operations import ActionRun, Selection
from pgqueue.operations.actions import ACTIONS, ON_JOBS, Action, JobAction, Target
from pgqueue.operations.results import Effect
from pgqueue.options import MOST_ATTEMPTS
from pgqueue.tasks.editing import Changes
from pgqueue.terminal import harmless, print_json

SHOWN = 20
"""How many of the jobs of a filter are named that were not changed."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A command on jobs: an action, and what only the command line has of it."""

    action: JobAction
    examples: tuple[str, ...] = ("4711 4712", "--status failed --task mail.send")
    more: str = "Jobs in other states stay as they are."
    """What the help says besides."""
    options: tuple[Decorator, ...] = ()

    @property
    def name(self) -> str:
        return self.action.command

    def changes_of(self, options: Mapping[str, Any]) -> Changes | None:
        """What the options that are named as fields of Changes give the jobs."""
        given = {name: value for name, value in options.items() if value is not None}
        if "new_queue" in given:
            given["queue"] = given.pop("new_queue")
        return Changes(**given, are_args_stored=True) if given else None


_args = click.option(
    "--args",
    metavar="JSON",
    callback=as_arguments,
    help="New values of some arguments by name, as JSON; others stay.",
)

_spread = click.option(
    "--spread",
    type=as_span,
    metavar="SPAN",
    help="Make the jobs due one after the other over this time, as 20m, and not now.",
)

WITH_OPTIONS = (
    Verb(
        ON_JOBS["requeue"],
        ("4711 4712", "--status failed --task mail.welcome"),
        "--args replaces some arguments before; it needs the app, which checks them."
        "  Jobs that are not, or no longer, failed or cancelled stay as they are.",
        (
            _args,
            _spread,
        ),
    ),
    Verb(
        ON_JOBS["run_again"],
        ("4711 4712", "--status succeeded --task mail.welcome"),
        "The copies belong to no batch and no workflow.  Jobs that have not ended stay as they "
        "are.",
        (_spread,),
    ),
    Verb(
        ON_JOBS["delete"],
        ("4711 4712", "--status cancelled --task mail.welcome"),
        "A job that runs, for which an open batch, a workflow or another job waits, or to which a "
        "row of the application refers, is refused.",
    ),
    Verb(
        ON_JOBS["cancel"],
        ("4711 4712", "--batch 12"),
        "Jobs that have ended stay as they are.",
        (
            click.option(
                "--kill",
                is_flag=True,
                help="Kill the child processes of running jobs; needs the app.",
            ),
        ),
    ),
    Verb(
        ON_JOBS["run_now"],
        ("4711", "--task mail.send"),
        "Uses up no attempt.  Jobs that are due, running or ended stay as they are.",
    ),
    Verb(
        ON_JOBS["change"],
        ("4711 --priority 0", "--task mail.send --priority 9"),
        "The arguments that --args does not name stay; all are checked by the app, and a job "
        "whose arguments would be wrong is refused.  Jobs that are running or ended stay as they "
        "are.",
        (
            click.option(
                "--priority", type=click.IntRange(0, 9), help="The new one: 0 runs first, 9 last."
            ),
            click.option("--delay", type=Seconds(), help="Not before, from now."),
            click.option(
                "--run-at", type=as_time, metavar="TIME", help="Not before, as 2030-01-31T08:00Z."
            ),
            click.option(
                "--to-queue",
                "new_queue",
                metavar="NAME",
                shell_complete=complete_queue,
                help="Move to this queue; needs the app, which knows the limits of queues.",
            ),
            click.option(
                "--max-attempts",
                type=click.IntRange(1, MOST_ATTEMPTS),
                metavar="N",
                help="How often a job may start before it fails.",
            ),
            click.option("--timeout", type=Seconds(), help="How long the handler may run."),
            click.option(
                "--tags",
                type=as_tags,
                metavar="TAG,TAG",
                help="All tags of the jobs, separated by commas; '' for none.",
            ),
            click.option(
                "--meta",
                metavar="JSON",
                callback=as_arguments,
                help="Keys of meta that change, as JSON; others stay.",
            ),
            _args,
        ),
    ),
)
"""The commands that have options of their own, or more to say in their help."""

JOB_VERBS = {
    action.name: Verb(action) for action in ON_JOBS.values() if "--" not in action.command
} | {verb.action.name: verb for verb in WITH_OPTIONS}
"""A command for each action on jobs."""


def _command(verb: Verb) -> click.Command:
    by = "--task" if verb.action.called else "--status"
    named = f"Name the jobs by id, or select them by {by} and other options: then the command "
    named += "counts them, asks you, and changes them in portions, each in its own commit."
    lines = (f"pgqueue --app shop.jobs:queue {verb.name} {words}" for words in verb.examples)
    examples = "\n          ".join(lines)
    text = f"{verb.action.help}\n\n{named}\n\n{verb.more}\n\n\b\nExample:  {examples}"

    @click.command(verb.name, help=text)
    @click.argument("job_ids", metavar="[ID]...", nargs=-1, type=as_job_id)
    @which_jobs(verb.action.statuses)
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
    kill: bool = False,
    **options: Any,
) -> None:
    """Change the jobs; exit with 1 if one was refused, its key taken or its id wrong."""
    action = ON_JOBS["kill"] if kill else verb.action
    conditions = {name: options.pop(name) for name in FILTERS}
    is_narrowed = limit is not None or any(value is not None for value in conditions.values())
    if job_ids and (statuses or is_narrowed):
        raise click.UsageError("Give ids, or say which jobs by options, not both")
    asked = chosen_jobs(statuses, **conditions)
    is_bound = limit is not None or not asked.is_everything  # --where "" has no condition
    if not job_ids and not asked.which.statuses and not (action.called and is_bound):
        example = " ".join(verb.examples[-1].split()[:2])
        raise click.UsageError(f"Which jobs? Give their ids, or say {example}")
    queue = given.database()
    operator = operator_of(queue, reason)
    start = partial(operator.start, action.name, changes=verb.changes_of(options), spread=spread)
    if job_ids:
        are_missed = _change_named(start(Selection(job_ids)), as_json=as_json)
    else:
        chosen = asked.narrowed(action)
        chosen.check_arguments(queue.tasks)
        with opened(queue) as session:
            matched = chosen.count(session, limit=limit)
        outcome = None
        if matched:
            called = " or ".join(sorted(chosen.which.statuses))
            called = called if asked.which.statuses else action.called
            if not yes:
                _ask(f"{verb.action.words} {matched:,} {called} jobs")
            outcome = start(asked, limit=limit)
        are_missed = _change_many(outcome, as_json=as_json, matched=matched)
        if not matched and not as_json:
            click.echo("No job fits.")
            hint_at_names(queue, task=chosen.which.task, queue_name=chosen.which.queue)
    if are_missed:
        click.get_current_context().exit(1)


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {what}; to confirm, add --yes")
    click.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


def _change_named(outcome: ActionRun, *, as_json: bool) -> bool:
    """Change jobs one by one, and print each; whether one was missed."""
    changed = []
    for result in chain.from_iterable(outcome):
        changed.append(result)
        if not as_json:
            click.echo(harmless(str(result)), err=result.is_missed)
    if as_json:
        print_json({"jobs": changed, "counts": outcome.counts})
    return any(result.is_missed for result in changed)


def _change_many(outcome: ActionRun | None, *, as_json: bool, **more: int) -> bool:
    """Change the jobs in portions; whether one of them was missed.  ``more``: JSON keys."""
    counts: Counter[str] = Counter() if outcome is None else outcome.counts
    missed = 0
    try:
        for portion in outcome or ():
            for result in portion:
                missed += result.is_missed
                if result.is_missed and missed <= SHOWN:
                    click.echo(harmless(str(result)), err=True)
    finally:  # also after Ctrl-C, or an error of the database
        if as_json:
            print_json({**more, "counts": counts})
        elif counts:
            words = (f"{n:,} {change.replace('_', ' ')}" for change, n in sorted(counts.items()))
            click.echo(", ".join(words))
        if outcome is not None and outcome.entry.id and outcome.entry.finished_at is None:
            click.echo(f"Go on by: pgqueue continue {outcome.entry.id}", err=True)
    return missed > 0


@click.command("continue")
@click.argument("action_id", metavar="ID", type=as_action_id)
@reason_option
@on_database_with_json
def go_on(given: CliState, action_id: int, reason: str, as_json: bool) -> None:
    """Go on with an interrupted action on many jobs, as `pgqueue log --unfinished` lists them.

    \b
    Example:  pgqueue --app shop.jobs:queue continue 12
    """
    outcome = operator_of(given.database(), reason).go_on(action_id)
    if _change_many(outcome, as_json=as_json):
        click.get_current_context().exit(1)


@click.command()
@click.argument("error", metavar="ERROR", type=as_fingerprint)
@click.option("--task", required=True, metavar="NAME", help="The task that fails with it.")
@click.option(
    "--hours",
    type=click.IntRange(0, LONGEST_MUTE),
    default=24,
    show_default=True,
    help="For how long; 0 ends it.",
)
@reason_option
@on_database_with_json
def mute(given: CliState, error: int, task: str, hours: int, reason: str, as_json: bool) -> None:
    """Leave an error out of the lists of problems; `pgqueue failures` names the errors.

    \b
    Example:  pgqueue --app shop.jobs:queue mute 8f14e45fceea167a --task mail.send --hours 24
    """
    is_known = operator_of(given.database(), reason).mute_error(error, task, hours=hours)
    if as_json:
        print_json({"error": in_hex(error), "task": task, "is_muted": is_known and hours > 0})
    elif is_known:
        click.echo(f"muted for {hours} hours" if hours else "not muted any more")
    else:
        click.echo(f"task {harmless(task)} has not failed with this error", err=True)
    if not is_known:
        click.get_current_context().exit(1)


@click.command()
@click.argument("job_id", metavar="JOB", type=as_job_id)
@reason_option
@on_database_with_json
def restart(given: CliState, job_id: int, reason: str, as_json: bool) -> None:
    """Start a workflow that has ended again from a job on.

    Makes a new workflow with copies of the job and of all jobs that follow it.  To let a failed
    job and what was skipped after it run again, use `requeue`.

    \b
    Example:  pgqueue --app shop.jobs:queue restart 4711
    """
    workflow_id = operator_of(given.database(), reason).restart_workflow(job_id)
    if as_json:
        print_json({"workflow": workflow_id, "from_job": job_id})
    else:
        click.echo(
            f"started as workflow {workflow_id}; pgqueue jobs --batch {workflow_id} lists its jobs"
        )


@click.command()
@click.argument("name")
@click.argument("key", default="")
@click.argument("payload", metavar="[JSON]", default="null", type=as_json_value)
@reason_option
@on_database_with_json
def signal(given: CliState, name: str, key: str, payload: Any, reason: str, as_json: bool) -> None:
    """Send a signal, for which jobs wait; `pgqueue jobs ID` says for which one a job waits.

    \b
    Example:  pgqueue --app shop.jobs:queue signal paid 4711 '{"by": "card"}'
    """
    signal_id = operator_of(given.database(), reason).signal(name, key, payload)
    if as_json:
        print_json({"signal": signal_id, "name": name, "key": key})
    else:
        click.echo(f"sent as signal {signal_id}")


@click.command("try")
@together(*FILTERS.values(), reason_option)
@on_database_with_json
def try_one(given: CliState, reason: str, as_json: bool, **conditions: Any) -> None:
    """Requeue the newest failed job of a filter, to see whether it succeeds now.

    \b
    Example:  pgqueue --app shop.jobs:queue try --error 8f14e45fceea167a
    """
    if all(value is None for value in conditions.values()):
        raise click.UsageError("Which jobs? Say --error ERROR or --task NAME")
    chosen = chosen_jobs((), **conditions)
    outcome = operator_of(given.database(), reason).try_one(chosen)
    result = None if outcome is None else outcome.last
    if as_json:
        print_json({"job": result})
    elif result is None:
        click.echo("No job fits.")
    else:
        click.echo(harmless(str(result)), err=result.is_missed)
    if result is not None and result.is_missed:
        click.get_current_context().exit(1)


SCHEDULE_VERBS = {
    action.name.removesuffix("_schedule"): action
    for action in ACTIONS.values()
    if action.target is Target.SCHEDULE and action.name != "backfill_schedule"
}
"""The methods of ``queue.schedules``, each with its action."""

MORE_HELP = {
    "trigger": "Needs the app, whose tasks encode the arguments.",
    "remove": "A schedule that the code declares is added again when the next worker starts.",
}


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
            found = queue.views.schedules(session, results=False)
        print_list(SCHEDULES, queue, found, as_json=as_json)


def _schedule_command(verb: str) -> click.Command:
    """The command of a row of SCHEDULE_VERBS."""
    help = "\n\n".join(filter(None, (SCHEDULE_VERBS[verb].help, MORE_HELP.get(verb))))
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
                why = f"; {one['reason']}" if "reason" in one else ""
                is_missed = one["change"] == Effect.NOT_FOUND
                line = one["reason"] if is_missed else f"{one['name']}: {one['change']}{job}{why}"
                click.echo(harmless(line), err=is_missed)
        if any(one["change"] == Effect.NOT_FOUND for one in changed):
            click.get_current_context().exit(1)

    return command


@click.command("backfill")
@click.argument("name")
@click.option(
    "--since", type=as_time, required=True, metavar="TIME", help="The first tick, or later."
)
@click.option("--until", type=as_time, metavar="TIME", help="Before this time, by default now.")
@reason_option
@on_database_with_json
def backfill(
    given: CliState,
    name: str,
    since: datetime,
    until: datetime | None,
    reason: str,
    as_json: bool,
) -> None:
    """Enqueue a job for each tick of a schedule in a time that has passed.

    Needs the app, whose tasks encode the arguments.  Ticks that were fired get another job.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules backfill shop.jobs.nightly \\
                --since 2030-01-01T00:00Z --until 2030-02-01T00:00Z
    """
    operator = operator_of(given.application(), reason)
    try:
        ids = operator.backfill_schedule(name, since, until)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json({"schedule": name, "jobs": ids})
    else:
        click.echo(harmless(f"{name}: {len(ids):,} jobs enqueued"))


def _change_schedule(queue: PgQueue, verb: str, name: str, *, reason: str) -> dict[str, Any]:
    with opened(queue) as session:
        declared = {one.name: one.declared_in for one in queue.schedules.list(session)}
    action = SCHEDULE_VERBS[verb]
    try:
        job_id = getattr(operator_of(queue, reason), action.name)(name)
    except ScheduleNotFound as error:
        return {"name": name, "change": Effect.NOT_FOUND, "reason": str(error)}
    result = {"name": name, "change": action.done}
    if job_id is not None:
        result["job_id"] = job_id
    if verb == "remove" and declared.get(name) is not None:
        result["reason"] = (
            f"module {declared[name]} declares it, so the next worker that starts adds it again; "
            "pause it"
        )
    return result


_of_workers = together(
    click.argument("worker_ids", metavar="ID...", nargs=-1, required=True, type=as_worker_id),
    reason_option,
    on_database_with_json,
)


@click.command()
@_of_workers
def quiet(given: CliState, **what: Any) -> None:
    """Make workers claim no more jobs, within a second.

    A quiet worker ends the jobs that it has claimed and then idles; stop it with SIGTERM when
    `pgqueue workers` shows that it has no jobs.  `pgqueue unquiet` undoes this.

    \b
    Example:  pgqueue --app shop.jobs:queue quiet 6f9619ff-8b86-d011-b42d-00c04fc964ff
    """
    _set_quiet(given, ACTIONS["quiet"], **what)


@click.command()
@_of_workers
def unquiet(given: CliState, **what: Any) -> None:
    """Undo `pgqueue quiet`: the workers claim jobs again, within two seconds.

    \b
    Example:  pgqueue --app shop.jobs:queue unquiet 6f9619ff-8b86-d011-b42d-00c04fc964ff
    """
    _set_quiet(given, ACTIONS["unquiet"], **what)


def _set_quiet(
    given: CliState, action: Action, *, as_json: bool, reason: str, worker_ids: Sequence[UUID]
) -> None:
    """Do an action on workers, in the order of their ids on the command line."""
    operator = operator_of(given.database(), reason)
    live = {id: getattr(operator, action.name)(id) for id in worker_ids}
    if as_json:
        is_quiet = action.name == "quiet"
        found = [
            {"id": str(id), "is_live": is_live, "is_quiet": is_live and is_quiet}
            for id, is_live in live.items()
        ]
        print_json({"workers": found})
    else:
        for id, is_live in live.items():
            words = action.done if is_live else "no live worker has this id"
            click.echo(f"{id}: {words}", err=not is_live)
    if not all(live.values()):
        click.get_current_context().exit(1)


for verb in SCHEDULE_VERBS:
    schedules.add_command(_schedule_command(verb))
schedules.add_command(backfill)

COMMANDS = (
    *map(_command, JOB_VERBS.values()),
    *(quiet, unquiet, schedules, try_one, mute, restart, signal, go_on),
)
