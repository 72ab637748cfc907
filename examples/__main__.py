"""Runs an example on a private PostgreSQL, or in your database."""

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import click

from examples.shop.run import URL
from examples.shop.run import main as shop
from pgqueue.embedded import EmbeddedPostgres

HAND_WRITTEN = (
    "two_tables",
    "polling_worker",
    "claim_with_cte",
    "delete_returning",
    "later_and_regularly",
)


@click.group()
def main() -> None:
    """Run an example."""


def run_both_forms(name: str, url: str | None) -> None:
    with nullcontext(url) if url else EmbeddedPostgres() as server:
        given = server.url if isinstance(server, EmbeddedPostgres) else server
        environment = {**os.environ, "DATABASE_URL": str(given)}
        for module in ("by_hand", "with_pgqueue"):
            click.echo(f"-- {name}/{module}.py")
            program = [sys.executable, "-m", f"examples.{name}.{module}"]
            subprocess.run(program, env=environment, check=True)


for name in HAND_WRITTEN:
    words = "Run the hand-written form, and then the form with pgqueue."
    run = partial(run_both_forms, name)
    main.add_command(click.Command(name, params=[URL], callback=run, help=words))
main.add_command(shop)


if __name__ == "__main__":
    main(prog_name="python -m examples")
