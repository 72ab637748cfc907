"""``pgqueue grant`` and ``pgqueue revoke``: the rights of roles on the tables."""

import click

from pgqueue import schema
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.group import on_database, together

_PURPOSES = {
    "worker": "Runs jobs: reads and writes the tables, changes none.",
    "enqueue": "Writes jobs and schedules, and reads no arguments of jobs.",
    "dashboard": "Reads all but arguments, results, tracebacks; may cancel, requeue, pause.",
    "owner": "Owns the tables; best a role that cannot log in.",
    "migrator": "May become the owner, to upgrade the tables.",
}

_roles = together(
    *(click.option(f"--{name}", metavar="ROLE", help=help) for name, help in _PURPOSES.items()),
    click.option("--sql", "as_sql", is_flag=True, help="Print the statements; run none of them."),
    on_database,
)


@click.command()
@_roles
def grant(given: CliState, /, as_sql: bool, **names: str | None) -> None:
    """Grant roles exactly the rights on the tables that their work needs.

    The roles must exist; they lose any other rights on the tables.  Run this again after each
    upgrade; an application with Alembic should call pgqueue.schema.grant in the revision that
    upgrades the tables instead.

    \b
    Example:  pgqueue --url postgresql://postgres@localhost/shop grant --worker app_worker \\
                --enqueue app_web --dashboard app_ops --owner app_owner --migrator app_migrator
    """
    if as_sql:
        _print(schema.grant_statements(schema.Roles(**names)))
        return
    with given.database().engine.begin() as connection:
        schema.verify(connection)
        schema.grant(**names, connection=connection)
    click.echo("Granted.")


@click.command()
@_roles
def revoke(given: CliState, /, as_sql: bool, **names: str | None) -> None:
    """Revoke all rights of roles on the tables.

    The tables of --owner pass to the role that runs this.

    \b
    Example:  pgqueue --url postgresql://postgres@localhost/shop revoke --enqueue app_web
    """
    if as_sql:
        _print(schema.revoke_statements(schema.Roles(**names)))
        return
    with given.database().engine.begin() as connection:
        schema.verify(connection)
        schema.revoke(**names, connection=connection)
    click.echo("Revoked.")


def _print(statements: list[str]) -> None:
    click.echo(";\n".join(["BEGIN", *statements, "COMMIT"]) + ";")
