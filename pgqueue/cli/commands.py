"""The group of all commands, which prints their errors."""

import io
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pgqueue.cli.app_options import APP, URL, verbose_option

if TYPE_CHECKING:
    from pgqueue.cli.app_loader import CliState

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

EXIT_CODES = """
\b
Exit codes:
  0    done; also when there was nothing to do
  1    something is wrong: the app, the database, a job that does not exist, a finding of doctor
  2    the command line is wrong
  3    a worker was stopped, and a handler had not ended after the grace period
  130  ended by Ctrl-C; a worker ends with 0 or 3
"""

COMMANDS = """\
batches lists List the newest batches with their progress.
cancel verbs Cancel jobs: a waiting job ends at once, a running job is asked to stop.
change verbs Change waiting jobs: their queue, priority, time, attempts, timeout, tags, meta,...
continue verbs Go on with an interrupted action on many jobs, as `pgqueue log --unfinished` lists...
dashboard dashboard Serve the dashboard, until Ctrl-C.
delete verbs Delete jobs that do not run, with all that is on record about them.
doctor doctor Look for problems: the tables' version, broken rows, settings that lose commits.
enqueue jobs Enqueue a job of a task, in a transaction of its own.
failures lists List the errors of jobs, those of one kind together, the newest first.
grant tables Grant roles exactly the rights on the tables that their work needs.
health lists Exit with 0 if a worker on this host lives, with 1 if none does.
jobs jobs List jobs, or show one with its errors.
limits lists List the limits: capacities, places held, and jobs that wait.
log lists List what operators have done by commands, in the dashboard and in Python, newest...
mute verbs Leave an error out of the lists of problems; `pgqueue failures` names the errors.
pause pauses Make all workers skip queues, tasks or a key, within two seconds.
prune tables Delete ended jobs whose time is over, as the workers do every few minutes.
quiet verbs Make workers claim no more jobs, within a second.
requeue verbs Put failed or cancelled jobs back, with all their attempts available again.
restart verbs Start a workflow that has ended again from a job on.
resume pauses Undo `pgqueue pause`.
revision tables Write a revision by which your own Alembic history upgrades pgqueue's tables.
revoke tables Revoke all rights of roles on the tables.
run-again verbs Enqueue copies of jobs that have ended; the old jobs and their attempts stay.
run-now verbs Make waiting jobs due now: those that were delayed, and those that wait for a retry.
schedules verbs Show the schedules with their next three runs, in their zone and in UTC.
set-limit pauses Set how many jobs of a limit run at once, or start in its period, for all workers.
signal verbs Send a signal, for which jobs wait; `pgqueue jobs ID` says for which one a job waits.
stats lists Show how attempts have ended, and how long they have waited and run, by task.
status lists Show the number of jobs by queue and status, and the live workers.
try verbs Requeue the newest failed job of a filter, to see whether it succeeds now.
unquiet verbs Undo `pgqueue quiet`: the workers claim jobs again, within two seconds.
upgrade tables Create or upgrade pgqueue's tables.
worker working Run jobs until SIGTERM or Ctrl-C; a second signal ends the grace period.
workers lists List the live workers with their ids, and the job that each has held longest.
"""
"""The name of each command, its module, and its line in the help.

The line begins the help of the command in its module.  A test compares the two, and prints this
table anew.
"""


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as in shells."""


class ErrorHandlingGroup(click.Group):
    """A group whose commands print an error that a user can fix in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A character that the output cannot encode must not end a command.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            from pgqueue.cli.app_loader import CliState
            from pgqueue.cli.error_words import in_words

            with in_words(ctx.ensure_object(CliState)):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


class LazyCommand(click.Command):
    """A command whose module is imported when the command is used, not when it is listed."""

    def __init__(self, name: str, module: str, line: str) -> None:
        super().__init__(name, help=line)
        self._module = f"pgqueue.cli.{module}"

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        return self.load().make_context(*args, **settings)

    def load(self) -> click.Command:
        commands: Iterable[click.Command] = import_module(self._module).COMMANDS
        return next(command for command in commands if command.name == self.name)


def loaded(command: click.Command) -> click.Command:
    """The command with its parameters and its own commands."""
    return command.load() if isinstance(command, LazyCommand) else command


@click.group(cls=ErrorHandlingGroup, context_settings=SETTINGS, epilog=EXIT_CODES)
@click.option("--app", envvar="PGQUEUE_APP", show_envvar=True, **APP)
@click.option("--url", envvar="PGQUEUE_URL", show_envvar=True, **URL)
@verbose_option
@click.version_option(package_name="sqlalchemy-pgqueue", prog_name="pgqueue")
@click.pass_context
def main(ctx: click.Context, app: str | None, url: str | None) -> None:
    """Background jobs that commit with your rows, in your PostgreSQL.

    \b
    See it work:         pgqueue demo
    Create the tables:   pgqueue --app shop.jobs:queue upgrade
    Run the jobs:        pgqueue --app shop.jobs:queue worker
    See failed jobs:     pgqueue --app shop.jobs:queue jobs --status failed
    Run one once again:  pgqueue --app shop.jobs:queue requeue 4711
    """
    from pgqueue.cli.app_loader import CliState

    given = ctx.ensure_object(CliState)
    given.app = app
    if ctx.get_parameter_source("url") is ParameterSource.ENVIRONMENT:
        given.url_of_environment = url
    else:
        given.url = url


@main.command()
@click.option("--url", metavar="URL", help="Your server; left out, the demo starts one of its own.")
@click.option("--workers", type=click.IntRange(2, 32), default=2, show_default=True)
@click.option(
    "--limit", type=click.IntRange(min=20), default=2000, show_default=True, help="Files to index."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Which files, and in what order."
)
@click.option(
    "--keep", is_flag=True, help="With --url: leave the demo's tables for you to look at."
)
@click.pass_obj
def demo(given: "CliState", /, url: str | None, **options: Any) -> None:
    """Watch it work: index Python's standard library, and kill a worker in the middle.

    One job per source file parses it and writes a row of statistics, in one commit with the
    job's own end.  Files that do not parse fail, are retried, and keep their error.

    With --url everything happens in a schema of its own, pgqueue_demo, dropped at the end.

    \b
    Example:  pgqueue demo --workers 2 --limit 1000
    """
    from pgqueue.demo import run

    # Not PGQUEUE_URL: if it is set for an application, the demo must not use that database.
    run(url=url or given.url, **options)


for each in COMMANDS.splitlines():
    main.add_command(LazyCommand(*each.split(maxsplit=2)))
