"""``pgqueue enqueue``: one job of a task, with arguments as JSON."""

import json
from datetime import timedelta
from typing import Any

import click

from pgqueue.cli.app_loader import opened
from pgqueue.job_queue import PgQueue


def enqueue(
    queue: PgQueue, name: str, /, *, args: str, delay: timedelta, as_json: bool, **options: Any
) -> None:
    """Enqueue a job, and print its id."""
    task = queue.find(name)
    given = {key: value for key, value in options.items() if value is not None}
    if delay:
        given["delay"] = delay
    values = json_object(args)
    task.payload.bind((), values)  # refuses unknown and missing names, as in the application
    arguments = task.payload.decode(values, noun="argument")
    with opened(queue) as session:
        job = task.options(**given).enqueue(session, **arguments)
        session.commit()
        found = {"id": job.id, "task": job.task, "queue": job.queue, "status": job.status.value}
    if as_json:
        click.echo(json.dumps(found, indent=2))
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
