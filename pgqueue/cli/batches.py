"""The command for batches."""

import json
from dataclasses import asdict

import click

from pgqueue.cli.group import CliState, on_database


@click.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@on_database
def batches(given: CliState, as_json: bool, limit: int) -> None:
    """List the newest batches with their progress.

    Counts the jobs of those that are open.

    \b
    Example:  pgqueue --app shop.jobs:queue batches
    """
    from pgqueue.cli.app_loader import opened
    from pgqueue.cli.jobs import as_data
    from pgqueue.terminal import print_table

    queue = given.database()
    with opened(queue) as session:
        found = queue.batches(session, limit)
    if as_json:
        click.echo(json.dumps({"batches": [as_data(asdict(one)) for one in found]}, indent=2))
        return
    if not found:
        click.echo("There are no batches.")
        return
    rows = [
        [
            one.id,
            one.name or "-",
            one.outcome or "open",
            f"{one.ended} of {one.total}",
            one.failed,
            one.cancelled,
        ]
        for one in found
    ]
    print_table(["batch", "name", "outcome", "ended", "failed", "cancelled"], rows)
