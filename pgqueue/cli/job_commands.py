"""The commands for single jobs and for many: show, enqueue, requeue, run now, change, cancel."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.completion import complete_queue, complete_task
from pgqueue.cli.group import (
    CliState,
    app_option,
    as_seconds,
    json_option,
    on_database,
    verbose_option,
)

if TYPE_CHECKING:
    from pgqueue.tasks.editing import Changes

F = TypeVar("F", bound=Callable[..., Any])


def as_job_id(value: str) -> int:
    """Parameter type: the id of a job that may or may not exist."""
    if not value.isdecimal() or not 0 < int(value) < 2**63:
        raise click.BadParameter(f"{value!r} is not the id of a job")
    return int(value)


def as_time(value: str) -> datetime:
    """Parameter type: a time with a time zone."""
    try:
        time = datetime.fromisoformat(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a time, as 2030-01-31T08:00Z") from error
    if time.utcoffset() is None:
        raise click.BadParameter(
            f"{value!r} has no time zone; give it, as {value}Z or {value}+01:00"
        )
    return time


class ListFirst(click.Group):
    """``pgqueue jobs`` is ``pgqueue jobs list``, and ``pgqueue jobs 4711`` shows that job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        wants_help = bool(args) and args[0] in ctx.help_option_names
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # the shell completes the command names
        if not args or (args[0].startswith("-") and not wants_help):
            args = ["list", *args]
        elif args[0].isdecimal():
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListFirst)
def jobs() -> None:
    """List jobs, or show one with its errors.

    Without a command, lists jobs; with an id, shows that job.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs --status failed --task mail.welcome
              pgqueue --app shop.jobs:queue jobs 4711
    """


_FILTERS = (
    click.option(
        "--task", metavar="NAME", shell_complete=complete_task, help="Only jobs of this task."
    ),
    click.option(
        "--queue", metavar="NAME", shell_complete=complete_queue, help="Only jobs of this queue."
    ),
    click.option("--tag", metavar="TAG", help="Only jobs with this tag."),
    click.option("--before", type=as_job_id, metavar="ID", help="Only jobs older than this one."),
    click.option("--after", type=as_job_id, metavar="ID", help="Only jobs newer than this one."),
)


def _which(*statuses: str) -> Callable[[F], F]:
    """Add the options that select jobs; no statuses if the command means only one."""
    status = click.option(
        "--status",
        "statuses",
        type=click.Choice(statuses),
        multiple=True,
        help="Only jobs that stand there; may be repeated.",
    )

    def with_options(command: F) -> F:
        for option in reversed((status, *_FILTERS) if statuses else _FILTERS):
            command = option(command)
        return command

    return with_options


@jobs.command("list")
@_which("pending", "running", "blocked", "succeeded", "failed", "cancelled")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many."
)
@on_database
def list_(given: CliState, as_json: bool, limit: int, **which: Any) -> None:
    """List jobs, newest first.

    For a page of older jobs, give the last id as --before.  Reads no arguments, and is fast
    beside millions of ended jobs; only --task or --queue without --status may read far back
    for a rare name.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs list --status pending --status running
    """
    from pgqueue.cli.jobs import show_jobs

    show_jobs(given.database(), limit=limit, as_json=as_json, **which)


@jobs.command()
@click.argument("job_id", metavar="ID", type=as_job_id)
@click.option(
    "--show-arguments", is_flag=True, help="Also where nobody says which of them are secret."
)
@on_database
def show(given: CliState, as_json: bool, job_id: int, show_arguments: bool) -> None:
    """Show everything about one job.

    Its arguments, options and times, the worker that runs it, and every unsuccessful attempt
    with its error.  Arguments that its task declares secret are shown as ***.  If the app does not
    have the task, arguments and result are hidden.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs show 4711
    """
    from pgqueue.cli.jobs import show_job

    show_job(given.database(), job_id, as_json=as_json, show_arguments=show_arguments)


@click.command()
@click.argument("task", metavar="TASK", shell_complete=complete_task)
@click.option("--args", metavar="JSON", default="{}", help="The arguments by name, as JSON.")
@click.option(
    "--queue", metavar="NAME", shell_complete=complete_queue, help="Instead of the task's queue."
)
@click.option("--priority", type=click.IntRange(0, 9), help="0 runs first, 9 last.")
@click.option("--unique-key", metavar="KEY", help="Instead of the task's key.")
@click.option("--max-attempts", type=int, metavar="N", help="Instead of the task's number.")
@click.option(
    "--delay", type=float, metavar="SECONDS", callback=as_seconds, default=0, help="Not before."
)
@app_option
@verbose_option
@json_option
@click.pass_obj
def enqueue(given: CliState, /, task: str, **options: Any) -> None:
    """Enqueue a job of a task, in a transaction of its own.

    The arguments are checked as in the application.  If an unfinished job of the queue holds the
    unique key, prints that job.

    
    Example:  pgqueue --app shop.jobs:queue enqueue mail.welcome --args '{"user_id": 7}'
    """
    from pgqueue.cli import enqueuing

    enqueuing.enqueue(given.application(), task, **options)


_args = click.option(
    "--args", metavar="JSON", help="New values of some arguments by name, as JSON; others stay."
)
_limit = click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many, the oldest first."
)
_yes = click.option("--yes", is_flag=True, help="Do not ask before many jobs are changed.")
_ids = click.argument("job_ids", metavar="[ID]...", nargs=-1, type=as_job_id)


@click.command()
@_ids
@_which("failed", "cancelled")
@_args
@_limit
@_yes
@on_database
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
    from pgqueue.cli.changing import REQUEUE, change, requeuing

    verb = REQUEUE if args is None else requeuing(_changes(args=args))
    change(given.database(), verb, **options)


@click.command("change")
@_ids
@_which()
@click.option("--priority", type=click.IntRange(0, 9), help="The new one: 0 runs first, 9 last.")
@click.option(
    "--delay", type=float, metavar="SECONDS", callback=as_seconds, help="Not before, from now."
)
@click.option("--run-at", type=as_time, metavar="TIME", help="Not before, as 2030-01-31T08:00Z.")
@_args
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_limit
@_yes
@on_database
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
    from pgqueue.cli.changing import change, changing
    from pgqueue.cli.planning import show_plan

    changes = _changes(priority=priority, delay=delay, run_at=run_at, args=args)
    if dry_run:
        show_plan(given.database(), changes, **options)
    else:
        change(given.database(), changing(changes), yes=yes, **options)


def _changes(*, args: str | None, **values: Any) -> "Changes":
    from pgqueue.cli.enqueuing import json_object
    from pgqueue.tasks.editing import Changes

    given = None if args is None else json_object(args)
    return Changes(**values, args=given, are_args_stored=True)


@click.command("run-now")
@_ids
@_which()
@_limit
@_yes
@on_database
def run_now(given: CliState, /, **options: Any) -> None:
    """Make waiting jobs due now: those that were delayed, and those that wait for a retry.

    Name the jobs by id, or select them by --task and other options, for example after an outage
    of a mail server: then the command counts them, asks you, and changes them in batches, each in
    its own commit.  Uses up no attempt.  Jobs that are due, running or ended stay as they are.

    \b
    Example:  pgqueue --app shop.jobs:queue run-now 4711
              pgqueue --app shop.jobs:queue run-now --task mail.send
    """
    from pgqueue.cli.changing import RUN_NOW, change

    change(given.database(), RUN_NOW, **options)


@click.command()
@_ids
@_which("pending", "running")
@_limit
@_yes
@on_database
def cancel(given: CliState, /, **options: Any) -> None:
    """Cancel jobs: a waiting job ends at once, a running job is asked to stop.

    Name the jobs by id, or select them by --status and other options: then the command counts
    them, asks you, and cancels them in batches, each in its own commit.  Jobs that have ended
    stay as they are.

    \b
    Example:  pgqueue --app shop.jobs:queue cancel 4711 4712
              pgqueue --app shop.jobs:queue cancel --status pending --queue mail
    """
    from pgqueue.cli.changing import CANCEL, change

    change(given.database(), CANCEL, **options)
