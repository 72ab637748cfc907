"""``pgqueue prune``: deletes or counts the ended jobs whose time is over."""

import json
import time

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import opened
from pgqueue.connections.opening import own_connection
from pgqueue.connections.settings import PRUNING
from pgqueue.job_queue import PgQueue
from pgqueue.repository import DueJobs, Pruning
from pgqueue.terminal import print_table
from pgqueue.worker.pruner import Progress, PruneRound

UNTIL_FREE = 0.05
"""Seconds until the next try while a worker prunes."""


def delete(queue: PgQueue, *, as_json: bool) -> None:
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
        found = {"deleted": prune_round.deleted, "refused": prune_round.kept}
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"Deleted {prune_round.deleted:,} jobs.")
    if prune_round.kept:
        click.echo(prune_round.refusal, err=True)


def count(queue: PgQueue, *, as_json: bool) -> None:
    """Count the jobs that :func:`delete` would delete."""
    with opened(queue) as session:
        due = _due(queue, session)
    if as_json:
        found = {"due": sum(one.jobs for one in due), "jobs": [one._asdict() for one in due]}
        click.echo(json.dumps(found, indent=2))
    elif due:
        print_table(
            ["task", "status", "jobs"], [[one.task, one.outcome, f"{one.jobs:,}"] for one in due]
        )
    else:
        click.echo("No job to delete.")


def _due(queue: PgQueue, session: Session) -> list[DueJobs]:
    pruning = Pruning(session)
    return pruning.due(queue.retention, pruning.references())
