"""Runs an example, hand-written and with pgqueue, on a private PostgreSQL or in your database."""

import os
import subprocess
import sys
from contextlib import nullcontext

import click

from pgqueue.embedded import EmbeddedPostgres

HAND_WRITTEN = (
    "two_tables",
    "polling_worker",
    "claim_with_cte",
    "delete_returning",
    "later_and_regularly",
)


@click.command()
@click.argument("name", type=click.Choice(HAND_WRITTEN))
@click.option("--url", help="An empty database of yours.  Default: a private PostgreSQL.")
def main(name: str, url: str | None) -> None:
    """Run the hand-written form of the example NAME, and then the form with pgqueue."""
    with nullcontext(url) if url else EmbeddedPostgres() as server:
        given = server.url if isinstance(server, EmbeddedPostgres) else server
        environment = {**os.environ, "DATABASE_URL": str(given)}
        for module in ("by_hand", "with_pgqueue"):
            click.echo(f"-- {name}/{module}.py")
            program = [sys.executable, "-m", f"examples.{name}.{module}"]
            subprocess.run(program, env=environment, check=True)


if __name__ == "__main__":
    main()
