"""The commands of ``pgqueue``, and those about its tables."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.batches import batches
from pgqueue.cli.changing import cancel, change_jobs, requeue, run_now
from pgqueue.cli.doctor import doctor
from pgqueue.cli.group import ErrorHandlingGroup, on_database, verbose_option
from pgqueue.cli.jobs import enqueue, jobs
from pgqueue.cli.limits import limits, set_limit
from pgqueue.cli.pruning import prune
from pgqueue.cli.queues import pause, resume
from pgqueue.cli.roles import grant, revoke
from pgqueue.cli.schedules import schedules
from pgqueue.cli.status import health, quiet, status, workers
from pgqueue.cli.working import worker
from pgqueue.models import SCHEMA
from pgqueue.schema import SCHEMA_VERSION, write_revision

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
@on_database
def upgrade(given: CliState) -> None:
    """Create or upgrade pgqueue's tables.

    Safe to run at every deployment, and from several processes at once.  An application with
    Alembic should upgrade the tables in a revision of its own: see `pgqueue revision --help`.

    \b
    Example:  pgqueue --app shop.jobs:queue upgrade
    """
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
    *(worker, status, health, doctor, workers, quiet),
    *(jobs, enqueue, requeue, run_now, change_jobs, cancel, pause, resume),
    *(limits, set_limit, batches, prune, grant, revoke, schedules),
):
    main.add_command(command)
