"""Names for shell completion, from the application and never from the database."""

import os
from contextlib import redirect_stderr

import click

from pgqueue.cli.app_loader import CliState
from pgqueue.tasks import Task


def complete_task(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the application's tasks."""
    return sorted(task.name for task in _tasks(ctx) if task.name.startswith(incomplete))


def complete_queue(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Queues of the application's tasks."""
    queues = {task.settings.queue for task in _tasks(ctx)}
    return sorted(queue for queue in queues if queue.startswith(incomplete))


def _tasks(ctx: click.Context) -> list[Task[..., object]]:
    given = ctx.ensure_object(CliState)
    given.app = given.app or ctx.find_root().params.get("app")
    # Output of the application's import must not appear in the line that is being typed.
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            return list(given.application().tasks.values())
        except Exception:  # an application may raise anything
            return []
