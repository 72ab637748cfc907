"""``pgqueue enqueue``: one job of a task, with arguments as JSON."""

import json
from datetime import timedelta
from typing import Any

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.completion import complete_queue, complete_task
from pgqueue.cli.group import as_seconds, on_app_with_json
from pgqueue.terminal import print_json


@click.command()
@click.argument("task", metavar="TASK", shell_complete=complete_task)
@click.option("--args", metavar="JSON", default="{}", help="The arguments by name, as JSON.")
@click.option(
    "--queue", metavar="NAME", shell_complete=complete_queue, help="Instead of the task's queue."
)
@click.option("--priority", type=click.IntRange(0, 9), help="0 runs first, 9 last.")
@click.option("--unique-key", metavar="KEY", help="Instead of the task's key.")
@click.option("--max-attempts", type=int, metavar="N", help="Instead of the task's number.")
@click.option(
    "--delay", type=float, metavar="SECONDS", callback=as_seconds, default=0, help="Not before."
)
@on_app_with_json
def enqueue(
    given: CliState, /, task: str, args: str, delay: timedelta, as_json: bool, **options: Any
) -> None:
    """Enqueue a job of a task, in a transaction of its own.

    The arguments are checked as in the application.  If an unfinished job of the queue holds the
    unique key, prints that job.

    
    Example:  pgqueue --app shop.jobs:queue enqueue mail.welcome --args '{"user_id": 7}'
    """
    queue = given.application()
    wanted = queue.find(task)
    changed = {key: value for key, value in options.items() if value is not None}
    if delay:
        changed["delay"] = delay
    values = json_object(args)
    wanted.payload.bind((), values)  # refuses unknown and missing names, as in the application
    arguments = wanted.payload.decode(values, noun="argument")
    with opened(queue) as session:
        job = wanted.options(**changed).enqueue(session, **arguments)
        session.commit()
        found = {"id": job.id, "task": job.task, "queue": job.queue, "status": job.status.value}
    if as_json:
        print_json(found)
    else:
        click.echo(f"Job {found['id']} of task {found['task']} is {found['status']}.")


def json_object(text: str) -> dict[str, Any]:
    """Read the arguments of a job as --args has them."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--args is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError(
            "--args is not a JSON object: give the arguments by name, as in '{\"user_id\": 7}'"
        )
    return found
