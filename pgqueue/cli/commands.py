"""The group of all commands, which prints their errors."""

import io
import sys
from typing import Any

import click
from click.core import ParameterSource

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.dashboard import dashboard
from pgqueue.cli.doctor import doctor
from pgqueue.cli.error_words import in_words
from pgqueue.cli.jobs import enqueue, jobs
from pgqueue.cli.lists import batches, failures, health, limits, log, stats, status, workers
from pgqueue.cli.options import APP, URL, verbose_option
from pgqueue.cli.pauses import pause, resume, set_limit
from pgqueue.cli.tables import grant, prune, revision, revoke, upgrade
from pgqueue.cli.verbs import JOB_COMMANDS, go_on, mute, quiet, restart, schedules, signal, try_one
from pgqueue.cli.working import worker

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
            with in_words(ctx.ensure_object(CliState)):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


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
def demo(given: CliState, /, url: str | None, **options: Any) -> None:
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


for command in (
    *(upgrade, revision, grant, revoke, prune),
    *(worker, status, workers, health, doctor, quiet),
    *(jobs, enqueue, *JOB_COMMANDS),
    *(pause, resume, limits, set_limit, batches, schedules),
    *(failures, try_one, mute, restart, signal, stats, log, go_on, dashboard),
):
    main.add_command(command)
