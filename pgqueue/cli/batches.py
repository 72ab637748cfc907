"""``pgqueue batches``: the newest batches."""

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import on_database_with_json
from pgqueue.repository import BatchState
from pgqueue.terminal import print_json, print_table


@click.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@on_database_with_json
def batches(given: CliState, as_json: bool, limit: int) -> None:
    """List the newest batches with their progress.

    Counts the jobs of those that are open.

    \b
    Example:  pgqueue --app shop.jobs:queue batches
    """
    queue = given.database()
    with opened(queue) as session:
        found = queue.batches(session, limit)
    if as_json:
        print_json({"batches": found})
        return
    columns = ["batch", "name", "outcome", "ended", "failed", "cancelled"]
    print_table(columns, list(map(_cells, found)), otherwise="There are no batches.")


def _cells(one: BatchState) -> list[str | int]:
    ended = f"{one.ended} of {one.total}"
    return [one.id, one.name or "-", one.outcome or "open", ended, one.failed, one.cancelled]
