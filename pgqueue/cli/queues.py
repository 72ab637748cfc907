"""``pgqueue pause`` and ``resume``: queues and tasks that workers skip."""

from collections.abc import Collection, Iterable

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import complete_queue, complete_task, on_database_with_json, together
from pgqueue.terminal import print_json

_what = together(
    click.argument("queues", metavar="[QUEUE]...", nargs=-1, shell_complete=complete_queue),
    click.option(
        "--task",
        "tasks",
        metavar="NAME",
        multiple=True,
        help="This task in all queues; may be repeated.",
        shell_complete=complete_task,
    ),
    on_database_with_json,
)


@click.command()
@_what
def pause(given: CliState, as_json: bool, queues: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    """Make all workers skip queues or tasks, within two seconds.

    Running jobs go on, and enqueuing continues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    Or:       pgqueue --app shop.jobs:queue pause --task shop.jobs.send
    """
    _set_paused(given, queues, tasks, is_paused=True, as_json=as_json)


@click.command()
@_what
def resume(given: CliState, as_json: bool, queues: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    """Undo `pgqueue pause`.

    \b
    Example:  pgqueue --app shop.jobs:queue resume mail
    """
    _set_paused(given, queues, tasks, is_paused=False, as_json=as_json)


def _set_paused(
    given: CliState, queues: Iterable[str], tasks: Iterable[str], *, is_paused: bool, as_json: bool
) -> None:
    queues, tasks = list(dict.fromkeys(queues)), list(dict.fromkeys(tasks))
    if not queues and not tasks:
        raise click.UsageError("name a queue, or a task with --task")
    queue = given.database()
    change = queue.pause if is_paused else queue.resume
    change_task = queue.pause_task if is_paused else queue.resume_task
    with opened(queue) as session:
        for name in queues:
            change(session, name)
        for name in tasks:
            change_task(session, name)
        session.commit()
    if as_json:
        print_json({"queues": queues, "tasks": tasks, "is_paused": is_paused})
        return
    change_made = "paused" if is_paused else "resumed"
    known = {task.settings.queue for task in queue.tasks.values()}
    _tell(queues, change_made, known, "No task of the app uses queue {}. Is the name misspelt?")
    _tell(tasks, change_made, queue.tasks, "The app has no task {}. Is the name misspelt?")


def _tell(names: Iterable[str], change: str, known: Collection[str], doubt: str) -> None:
    for name in names:
        click.echo(f"{name}: {change}")
        if known and name not in known:
            click.echo(doubt.format(name), err=True)
