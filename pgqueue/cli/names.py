"""Hints on stderr at names that the app does not have."""

import click

from pgqueue.job_queue import PgQueue
from pgqueue.terminal import harmless


def hint_at_task(queue: PgQueue, name: str) -> None:
    """Ask whether a task's name is misspelt; without the app, nothing is known of its tasks."""
    if queue.tasks and name not in queue.tasks:
        click.echo(harmless(f"The app has no task {name}. Is the name misspelt?"), err=True)


def hint_at_queue(queue: PgQueue, name: str) -> None:
    """Ask whether a queue's name is misspelt."""
    known = {task.settings.queue for task in queue.tasks.values()}
    if known and name not in known:
        click.echo(
            harmless(f"No task of the app uses queue {name}. Is the name misspelt?"), err=True
        )


def print_no_job(queue: PgQueue, task: str | None, queue_name: str | None) -> None:
    """Say that no job fits, and hint at the names that were looked for."""
    click.echo("No job fits.")
    if task is not None:
        hint_at_task(queue, task)
    if queue_name is not None:
        hint_at_queue(queue, queue_name)
