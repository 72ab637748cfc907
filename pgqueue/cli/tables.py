"""The commands on pgqueue's tables: their versions, the rights on them, and what they keep."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pgqueue import schema
from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.app_options import verbose_option
from pgqueue.cli.nodes import on_nodes
from pgqueue.cli.options import on_app_with_json, on_database, together
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import JANITOR
from pgqueue.models import SCHEMA
from pgqueue.terminal import print_json, print_table
from pgqueue.worker.duties.prune import PruneRound, RoundState

UNTIL_FREE = 0.05
"""Seconds until the next try while a worker prunes."""

_PURPOSES = {
    "worker": "Runs jobs: reads and writes the tables, changes none.",
    "enqueue": "Writes jobs and schedules, and reads no arguments of jobs.",
    "dashboard": "Reads all but arguments, results, tracebacks; may cancel, requeue, pause.",
    "owner": "Owns the tables; best a role that cannot log in.",
    "migrator": "May become the owner, to upgrade the tables.",
}


@click.command()
@on_database
@on_nodes()
def upgrade(given: CliState) -> None:
    """Create or upgrade pgqueue's tables.

    Safe to run at every deployment, and from several processes at once.  An application with
    Alembic should upgrade the tables in a revision of its own: see `pgqueue revision --help`.  With
    --nodes, also gives each node its number.

    \b
    Example:  pgqueue --app shop.jobs:queue upgrade
    """
    given.database().upgrade()
    version = schema.SCHEMA_VERSION
    click.echo(f"The tables in schema {SCHEMA} are up to date: version {version}.")


@click.command()
@click.argument("host", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("-m", "--message", default="add pgqueue", show_default=True)
@click.option("--head", default="head", show_default=True, help="The revision to follow.")
@verbose_option
def revision(host: Path | None, message: str, head: str) -> None:
    """Write a revision by which your own Alembic history upgrades pgqueue's tables.

    HOST is your alembic.ini, a pyproject.toml with [tool.alembic], or your directory of migrations;
    by default ./alembic.ini, ./pyproject.toml or ./migrations.  Run this again after an update of
    pgqueue that needs newer tables.

    \b
    Example:  pgqueue revision migrations && flask db upgrade
    """
    if host is None:
        host = schema.find_host(Path())
    if host is None:
        raise click.UsageError(
            "This directory has no alembic.ini, no [tool.alembic] in pyproject.toml and no "
            "migrations: give the path of yours, or make them first, with `flask db init` or "
            "`alembic init`"
        )
    click.echo(f"Wrote {schema.write_revision(host, message=message, head=head)}")


_roles = together(
    *(click.option(f"--{name}", metavar="ROLE", help=help) for name, help in _PURPOSES.items()),
    click.option("--sql", "as_sql", is_flag=True, help="Print the statements; run none of them."),
    on_database,
)


@click.command()
@_roles
def grant(given: CliState, /, **options: Any) -> None:
    """Grant roles exactly the rights on the tables that their work needs.

    The roles must exist; they lose any other rights on the tables.  Run this again after each
    upgrade; an application with Alembic should call pgqueue.schema.grant in the revision that
    upgrades the tables instead.

    \b
    Example:  pgqueue --url postgresql://postgres@localhost/shop grant --worker app_worker \\
                --enqueue app_web --dashboard app_ops --owner app_owner --migrator app_migrator
    """
    if _run_for_roles(given, schema.grant_statements, schema.grant, **options):
        click.echo("Granted.")


@click.command()
@_roles
def revoke(given: CliState, /, **options: Any) -> None:
    """Revoke all rights of roles on the tables.

    The tables of --owner pass to the role that runs this.

    \b
    Example:  pgqueue --url postgresql://postgres@localhost/shop revoke --enqueue app_web
    """
    if _run_for_roles(given, schema.revoke_statements, schema.revoke, **options):
        click.echo("Revoked.")


def _run_for_roles(
    given: CliState,
    statements: Callable[[schema.Roles], list[str]],
    run: Callable[..., None],
    /,
    *,
    as_sql: bool,
    **names: str | None,
) -> bool:
    """Run the statements, or print them; whether they were run."""
    if as_sql:
        click.echo(";\n".join(["BEGIN", *statements(schema.Roles(**names)), "COMMIT"]) + ";")
        return False
    with given.database().engine.begin() as connection:
        schema.verify(connection)
        run(**names, connection=connection)
    return True


@click.command()
@click.option("--dry-run", is_flag=True, help="Count the jobs, and delete none.")
@on_app_with_json
def prune(given: CliState, as_json: bool, dry_run: bool) -> None:
    """Delete ended jobs whose time is over, as the workers do every few minutes.

    The rules are those of the app: `keep` of its tasks, its queues and its PgQueue.  With
    --dry-run, counts these jobs by task, and reads all jobs.

    \b
    Example:  pgqueue --app shop.jobs:queue prune --dry-run
    """
    queue = given.application()
    with opened(queue) as session:
        due = queue.views.prunable(session) if dry_run else []
    if dry_run and as_json:
        print_json({"due": sum(one.jobs for one in due), "jobs": due})
        return
    if dry_run:
        rows = [[one.task, one.outcome, f"{one.jobs:,}"] for one in due]
        print_table(["task", "status", "jobs"], rows, otherwise="No job to delete.")
        return
    prune_round = PruneRound(queue.retention)
    with own_connection(
        queue.engine, JANITOR, isolation_level="READ COMMITTED", purpose="prune"
    ) as connection:
        while (progress := prune_round.step(connection)) is not RoundState.DONE:
            time.sleep(UNTIL_FREE if progress is RoundState.BUSY else 0)
    if as_json:
        print_json({"deleted": prune_round.deleted, "refused": prune_round.kept})
        return
    click.echo(f"Deleted {prune_round.deleted:,} jobs.")
    if prune_round.kept:
        click.echo(prune_round.refusal, err=True)


COMMANDS = (upgrade, revision, grant, revoke, prune)
