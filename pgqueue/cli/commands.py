"""The commands.  Their imports are made when they run, so that help appears at once."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pgqueue.cli.batches import batches
from pgqueue.cli.group import (
    CliState,
    ErrorHandlingGroup,
    app_option,
    as_seconds,
    log_to_stderr,
    on_database,
    url_option,
    verbose_option,
)
from pgqueue.cli.job_commands import cancel, change_jobs, enqueue, jobs, requeue, run_now
from pgqueue.cli.limits import limits, set_limit
from pgqueue.cli.queues import pause, prune, resume
from pgqueue.cli.roles import grant, revoke
from pgqueue.cli.schedule_commands import schedules
from pgqueue.cli.worker_commands import quiet, workers

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


@click.group(cls=ErrorHandlingGroup, context_settings=SETTINGS, epilog=EXIT_CODES)
@click.option(
    "--app",
    metavar="MODULE:QUEUE",
    envvar="PGQUEUE_APP",
    show_envvar=True,
    help="Where your PgQueue is, e.g. shop.jobs:queue; a function that returns it will do.",
)
@click.option(
    "--url",
    metavar="URL",
    envvar="PGQUEUE_URL",
    show_envvar=True,
    help="The database, for commands that need no app, e.g. postgresql://me@localhost/shop.",
)
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
@app_option
@url_option
@verbose_option
@click.pass_obj
def upgrade(given: CliState) -> None:
    """Create or upgrade pgqueue's tables.

    Safe to run at every deployment, and from several processes at once.  An application with
    Alembic should upgrade the tables in a revision of its own: see `pgqueue revision --help`.

    \b
    Example:  pgqueue --app shop.jobs:queue upgrade
    """
    from pgqueue.models import SCHEMA
    from pgqueue.schema import SCHEMA_VERSION

    given.database().upgrade()
    click.echo(f"The tables in schema {SCHEMA} are up to date: version {SCHEMA_VERSION}.")


@main.command()
@click.argument("host", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("-m", "--message", default="add pgqueue", show_default=True)
@click.option("--head", default="head", show_default=True, help="The revision to follow.")
@verbose_option
def revision(host: Path | None, message: str, head: str) -> None:
    """Write a revision by which your own Alembic history upgrades pgqueue's tables.

    HOST is your alembic.ini or your directory of migrations; by default ./alembic.ini or
    ./migrations.  Run this again after an update of pgqueue that needs newer tables.

    \b
    Example:  pgqueue revision migrations && flask db upgrade
    """
    from pgqueue.schema import write_revision

    if host is None:
        usual = [Path("alembic.ini"), Path("migrations")]
        host = next((path for path in usual if path.exists()), None)
    if host is None:
        raise click.UsageError(
            "This directory has no alembic.ini and no migrations: give the path of yours, or make "
            "them first, with `flask db init` or `alembic init`"
        )
    click.echo(f"Wrote {write_revision(host, message=message, head=head)}")


@main.command()
@click.option(
    "--queues",
    multiple=True,
    metavar="A,B",
    help="Queues to serve; all by default.  With weights: A=3,B=1.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Jobs at a time.",
)
@click.option(
    "--mode",
    type=click.Choice(["lease", "transaction"]),
    default="lease",
    show_default=True,
    help="lease is fast; transaction gives a crashed worker's jobs back at once.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Jobs per transaction, with --mode transaction.",
)
@click.option(
    "--grace",
    type=float,
    metavar="SECONDS",
    callback=as_seconds,
    default=30,
    show_default=True,
    help="How long running jobs may take to end after SIGTERM.",
)
@click.option(
    "--poll-interval",
    type=click.FloatRange(min=0.01),
    metavar="SECONDS",
    callback=as_seconds,
    default=1,
    show_default=True,
    help="The longest a job waits when a wake-up is lost.",
)
@click.option(
    "--log-jobs",
    type=click.Choice(["info", "debug"]),
    help="Log the end of each attempt, at this level.",
)
@click.option(
    "--age-after",
    type=float,
    metavar="SECONDS",
    callback=as_seconds,
    help="A job that has waited so long counts as one priority more urgent, twice as long as two.",
)
@click.option("--until-empty", is_flag=True, help="Stop when no job is due or running.")
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Worker processes; one that dies is replaced.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve /metrics for Prometheus and /healthz; with --processes, on as many ports.",
)
@click.option("--reload", is_flag=True, help="Restart when a Python file here changes.")
@app_option
@verbose_option
@click.pass_obj
def worker(given: CliState, /, processes: int, reload: bool, **options: Any) -> None:
    """Run jobs until SIGTERM or Ctrl-C; a second signal ends the grace period.

    After the signal, starts no more jobs and lets the running ones finish.  Logs to stderr.

    \b
    Example:  pgqueue --app shop.jobs:queue worker --queues mail,default --concurrency 20
    """
    from pgqueue.cli.worker_processes import end_with_parent, is_under_parent, run_processes
    from pgqueue.cli.working import work

    log_to_stderr(given)
    if is_under_parent():
        end_with_parent()
    elif processes > 1 or reload:
        code = run_processes(processes, reload=reload, until_empty=options["until_empty"])
        sys.exit(code)
    work(given.application(), **options)


@main.command()
@click.option(
    "--exact", is_flag=True, help="Count the succeeded and blocked too, however many there are."
)
@on_database
def status(given: CliState, exact: bool, as_json: bool) -> None:
    """Show the number of jobs by queue and status, and the live workers.

    A job is running as soon as it is claimed.  A worker with quick jobs claims more than it has
    slots; the number of jobs claimed ahead is shown below the table.

    \b
    Example:  pgqueue --app shop.jobs:queue status
    """
    from pgqueue.cli.status import show_status

    show_status(given.database(), exact=exact, as_json=as_json)


@main.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Ask the worker with this --metrics-port; left out, the heartbeats of this host.",
)
@app_option
@url_option
@verbose_option
@click.pass_obj
def health(given: CliState, port: int | None) -> None:
    """Exit with 0 if a worker on this host lives, with 1 if none does.

    With --port, a worker lives if it looks for jobs and PostgreSQL acknowledges its heartbeats.
    Without it, any worker of this host with a recent heartbeat counts.

    \b
    Example:  pgqueue health --port 9187
              pgqueue --app shop.jobs:queue health
    """
    from pgqueue.cli.health import ask_database, ask_port

    if port is not None:
        ask_port(port)
    else:
        ask_database(given.database())


@main.command()
@on_database
def doctor(given: CliState, as_json: bool) -> None:
    """Look for problems: the tables' version, broken rows, settings that lose commits.

    Changes nothing, reads all jobs, and exits with 1 if something is wrong.

    \b
    Example:  pgqueue --url postgresql://me@localhost/shop doctor
    """
    from pgqueue.cli.doctor import examine

    examine(given.database(), as_json=as_json)


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


for command in (jobs, enqueue, requeue, run_now, change_jobs, cancel, pause, resume):
    main.add_command(command)
for command in (workers, quiet, limits, set_limit, batches, prune):
    main.add_command(command)
for command in (grant, revoke):
    main.add_command(command)
main.add_command(schedules)
