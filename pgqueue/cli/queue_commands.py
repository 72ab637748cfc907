"""The commands pause, resume and prune."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from pgqueue.cli.completion import complete_queue, complete_task
from pgqueue.cli.group import CliState, app_option, json_option, on_database, verbose_option
from pgqueue.cli.limit_commands import key_of
from pgqueue.terminal import harmless

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

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


_limit = click.option(
    "--limit", metavar="NAME", help="With --key: a limit by argument, or that of fair_by."
)
_key = click.option(
    "--key", metavar="VALUE", help="This value of the limit's argument; JSON for several."
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a command pauses or resumes."""

    queues: list[str]
    tasks: list[str]
    limit: str | None
    key: str | None

    @classmethod
    def of(
        cls, queues: tuple[str, ...], tasks: tuple[str, ...], limit: str | None, key: str | None
    ) -> "Targets":
        if not queues and not tasks and limit is None and key is None:
            raise click.UsageError("name a queue, a task with --task, or a key with --limit, --key")
        if (limit is None) != (key is None):
            raise click.UsageError("give --limit and --key together")
        return cls(list(dict.fromkeys(queues)), list(dict.fromkeys(tasks)), limit, key)

    def set_paused(self, queue: "PgQueue", session: "Session", *, is_paused: bool) -> list[str]:
        """Pause or resume all; returns the names of the keys."""
        change = queue.pause if is_paused else queue.resume
        change_task = queue.pause_task if is_paused else queue.resume_task
        change_key = queue.pause_key if is_paused else queue.resume_key
        for name in self.queues:
            change(session, name)
        for name in self.tasks:
            change_task(session, name)
        if self.limit is None or self.key is None:
            return []
        return [change_key(session, self.limit, key_of(self.key))]


@click.command()
@_queues
@_tasks
@_limit
@_key
@on_database
def pause(
    given: CliState,
    as_json: bool,
    queues: tuple[str, ...],
    tasks: tuple[str, ...],
    limit: str | None,
    key: str | None,
) -> None:
    """Make all workers skip queues, tasks or a key, within two seconds.

    Running jobs go on, and enqueuing continues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    Or:       pgqueue --app shop.jobs:queue pause --task shop.jobs.send
    Or:       pgqueue --app shop.jobs:queue pause --limit shop.report:tenant_id --key 7
    """
    _set_paused(given, Targets.of(queues, tasks, limit, key), is_paused=True, as_json=as_json)


@click.command()
@_queues
@_tasks
@_limit
@_key
@on_database
def resume(
    given: CliState,
    as_json: bool,
    queues: tuple[str, ...],
    tasks: tuple[str, ...],
    limit: str | None,
    key: str | None,
) -> None:
    """Undo `pgqueue pause`.

    \b
    Example:  pgqueue --app shop.jobs:queue resume mail
    """
    _set_paused(given, Targets.of(queues, tasks, limit, key), is_paused=False, as_json=as_json)


def _set_paused(given: CliState, targets: Targets, *, is_paused: bool, as_json: bool) -> None:
    from pgqueue.cli.app_loader import opened

    queue = given.database()
    with opened(queue) as session:
        keys = targets.set_paused(queue, session, is_paused=is_paused)
        session.commit()
    if as_json:
        said = {"queues": targets.queues, "tasks": targets.tasks, "keys": keys}
        click.echo(json.dumps({**said, "is_paused": is_paused}, indent=2))
        return
    _tell(queue, targets, keys, "paused" if is_paused else "resumed")


def _tell(queue: "PgQueue", targets: Targets, keys: list[str], change: str) -> None:
    known = {task.settings.queue for task in queue.tasks.values()}
    for name in targets.queues:
        click.echo(f"{name}: {change}")
        if known and name not in known:
            click.echo(f"No task of the app uses queue {name}. Is the name misspelt?", err=True)
    for name in targets.tasks:
        click.echo(f"{name}: {change}")
        if queue.tasks and name not in queue.tasks:
            click.echo(f"The app has no task {name}. Is the name misspelt?", err=True)
    for name in keys:
        click.echo(harmless(f"{name}: {change}"))


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
