"""The commands for queues and for ended jobs: pause, resume, prune."""

import json

import click

from pgqueue.cli.completion import complete_queue
from pgqueue.cli.group import CliState, app_option, json_option, on_database, verbose_option

_queues = click.argument(
    "queues", metavar="QUEUE...", nargs=-1, required=True, shell_complete=complete_queue
)


@click.command()
@_queues
@on_database
def pause(given: CliState, as_json: bool, queues: tuple[str, ...]) -> None:
    """Make all workers skip queues, within two seconds.

    Running jobs go on, and enqueuing continues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    """
    _set_paused(given, queues, is_paused=True, as_json=as_json)


@click.command()
@_queues
@on_database
def resume(given: CliState, as_json: bool, queues: tuple[str, ...]) -> None:
    """Undo `pgqueue pause`.

    \b
    Example:  pgqueue --app shop.jobs:queue resume mail
    """
    _set_paused(given, queues, is_paused=False, as_json=as_json)


def _set_paused(
    given: CliState, queues: tuple[str, ...], *, is_paused: bool, as_json: bool
) -> None:
    from pgqueue.cli.app_loader import opened

    queue = given.database()
    change = queue.pause if is_paused else queue.resume
    names = list(dict.fromkeys(queues))
    with opened(queue) as session:
        for name in names:
            change(session, name)
        session.commit()
    if as_json:
        click.echo(json.dumps({"queues": names, "is_paused": is_paused}, indent=2))
        return
    known = {task.settings.queue for task in queue.tasks.values()}
    for name in names:
        click.echo(f"{name}: {'paused' if is_paused else 'resumed'}")
        if known and name not in known:
            click.echo(f"No task of the app uses queue {name}. Is the name misspelt?", err=True)


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
