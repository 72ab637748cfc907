"""``pgqueue prune``: deletes or counts the ended jobs whose time is over."""

import time

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import on_app_with_json
from pgqueue.connections.opening import own_connection
from pgqueue.connections.settings import PRUNING
from pgqueue.job_queue import PgQueue
from pgqueue.repository import Pruning
from pgqueue.terminal import print_json, print_table
from pgqueue.worker.pruner import Progress, PruneRound

UNTIL_FREE = 0.05
"""Seconds until the next try while a worker prunes."""


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
    (_count if dry_run else _delete)(given.application(), as_json=as_json)


def _delete(queue: PgQueue, *, as_json: bool) -> None:
    """Delete all that is due, in short transactions."""
    with opened(queue):
        pass  # checks the version of the tables
    prune_round = PruneRound(queue.retention)
    with own_connection(
        queue.engine, PRUNING, isolation_level="READ COMMITTED", purpose="prune"
    ) as connection:
        while (progress := prune_round.step(connection)) is not Progress.DONE:
            time.sleep(UNTIL_FREE if progress is Progress.BUSY else 0)
    if as_json:
        print_json({"deleted": prune_round.deleted, "refused": prune_round.kept})
        return
    click.echo(f"Deleted {prune_round.deleted:,} jobs.")
    if prune_round.kept:
        click.echo(prune_round.refusal, err=True)


def _count(queue: PgQueue, *, as_json: bool) -> None:
    """Count the jobs that :func:`_delete` would delete."""
    with opened(queue) as session:
        pruning = Pruning(session)
        due = pruning.due(queue.retention, pruning.references())
    if as_json:
        print_json({"due": sum(one.jobs for one in due), "jobs": due})
        return
    rows = [[one.task, one.outcome, f"{one.jobs:,}"] for one in due]
    print_table(["task", "status", "jobs"], rows, otherwise="No job to delete.")
