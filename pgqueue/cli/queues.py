"""The commands for queues and for ended jobs: pause, resume, prune."""

import json
from typing import TYPE_CHECKING

import click

from pgqueue.cli.completion import complete_queue, complete_task
from pgqueue.cli.group import CliState, app_option, json_option, on_database, verbose_option

if TYPE_CHECKING:
    from pgqueue.job_queue import PgQueue

_queues = click.argument("queues", metavar="[QUEUE]...", nargs=-1, shell_complete=complete_queue)
_tasks = click.option(
    "--task",
    "tasks",
    metavar="NAME",
    multiple=True,
    help="This task in all queues; may be repeated.",
    shell_complete=complete_task,
)


@click.command()
@_queues
@_tasks
@on_database
def pause(given: CliState, as_json: bool, queues: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    """Make all workers skip queues or tasks, within two seconds.

    Running jobs go on, and enqueuing continues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    Or:       pgqueue --app shop.jobs:queue pause --task shop.jobs.send
    """
    _set_paused(given, queues, tasks, is_paused=True, as_json=as_json)


@click.command()
@_queues
@_tasks
@on_database
def resume(given: CliState, as_json: bool, queues: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    """Undo `pgqueue pause`.

    \b
    Example:  pgqueue --app shop.jobs:queue resume mail
    """
    _set_paused(given, queues, tasks, is_paused=False, as_json=as_json)


def _set_paused(
    given: CliState,
    queues: tuple[str, ...],
    tasks: tuple[str, ...],
    *,
    is_paused: bool,
    as_json: bool,
) -> None:
    from pgqueue.cli.app_loader import opened

    if not queues and not tasks:
        raise click.UsageError("name a queue, or a task with --task")
    queue = given.database()
    change = queue.pause if is_paused else queue.resume
    change_task = queue.pause_task if is_paused else queue.resume_task
    with opened(queue) as session:
        for name in dict.fromkeys(queues):
            change(session, name)
        for name in dict.fromkeys(tasks):
            change_task(session, name)
        session.commit()
    names, task_names = list(dict.fromkeys(queues)), list(dict.fromkeys(tasks))
    if as_json:
        said = {"queues": names, "tasks": task_names, "is_paused": is_paused}
        click.echo(json.dumps(said, indent=2))
        return
    _tell(queue, names, task_names, "paused" if is_paused else "resumed")


def _tell(queue: "PgQueue", queues: list[str], tasks: list[str], change: str) -> None:
    known = {task.settings.queue for task in queue.tasks.values()}
    for name in queues:
        click.echo(f"{name}: {change}")
        if known and name not in known:
            click.echo(f"No task of the app uses queue {name}. Is the name misspelt?", err=True)
    for name in tasks:
        click.echo(f"{name}: {change}")
        if queue.tasks and name not in queue.tasks:
            click.echo(f"The app has no task {name}. Is the name misspelt?", err=True)


@click.command()
@click.option("--dry-run", is_flag=True, help="Count the jobs, and delete none.")
@app_option
@verbose_option
@json_option
@click.pass_obj
def prune(given: CliState, as_json: bool, dry_run: bool) -> None:
    """Delete ended jobs whose time is over, as the workers do every few minutes.

    The rules are those of the app: `keep` of its tasks, its queues and its PgQueue.  With
    --dry-run, counts these jobs by task, and reads all jobs.

    \b
    Example:  pgqueue --app shop.jobs:queue prune --dry-run
    """
    from pgqueue.cli.pruning import count, delete

    (count if dry_run else delete)(given.application(), as_json=as_json)
