"""``pgqueue pause`` and ``resume``: queues, tasks and keys that workers skip."""

from collections.abc import Iterable
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import complete_queue, complete_task, on_database_with_json, together
from pgqueue.cli.limits import key_of
from pgqueue.cli.names import hint_at_queue, hint_at_task
from pgqueue.job_queue import PgQueue
from pgqueue.terminal import harmless, print_json

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
    click.option(
        "--limit", metavar="NAME", help="With --key: a limit by argument, or that of fair_by."
    ),
    click.option(
        "--key", metavar="VALUE", help="This value of the limit's argument; JSON for several."
    ),
    on_database_with_json,
)


@click.command()
@_what
def pause(given: CliState, **what: Any) -> None:
    """Make all workers skip queues, tasks or a key, within two seconds.

    Running jobs go on, and enqueuing continues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    Or:       pgqueue --app shop.jobs:queue pause --task shop.jobs.send
    Or:       pgqueue --app shop.jobs:queue pause --limit shop.report:tenant_id --key 7
    """
    _set_paused(given, **what, is_paused=True)


@click.command()
@_what
def resume(given: CliState, **what: Any) -> None:
    """Undo `pgqueue pause`.

    \b
    Example:  pgqueue --app shop.jobs:queue resume mail
    """
    _set_paused(given, **what, is_paused=False)


def _set_paused(
    given: CliState,
    *,
    queues: Iterable[str],
    tasks: Iterable[str],
    limit: str | None,
    key: str | None,
    is_paused: bool,
    as_json: bool,
) -> None:
    _check_what(queues, tasks, limit, key)
    queue = given.database()
    queues, tasks, keys = list(dict.fromkeys(queues)), list(dict.fromkeys(tasks)), []
    hint: str | None = None
    with opened(queue) as session:
        for name in queues:
            (queue.pause if is_paused else queue.resume)(session, name)
        for name in tasks:
            (queue.pause_task if is_paused else queue.resume_task)(session, name)
        if limit is not None and key is not None:
            change_key = _pause_key if is_paused else _resume_key
            name, hint = change_key(queue, session, limit, key_of(key))
            keys.append(name)
        session.commit()
    if as_json:
        print_json({"queues": queues, "tasks": tasks, "keys": keys, "is_paused": is_paused})
    else:
        _print_change(queue, queues, tasks, keys, "paused" if is_paused else "resumed")
        if hint:
            click.echo(harmless(hint), err=True)


def _check_what(
    queues: Iterable[str], tasks: Iterable[str], limit: str | None, key: str | None
) -> None:
    if not queues and not tasks and limit is None and key is None:
        raise click.UsageError("name a queue, a task with --task, or a key with --limit, --key")
    if (limit is None) != (key is None):
        raise click.UsageError("give --limit and --key together")


def _pause_key(queue: PgQueue, session: Session, limit: str, key: Any) -> tuple[str, str | None]:
    """Pause a key; doubt one that no job has, such as a text where the argument is a number."""
    name = queue.pause_key(session, limit, key)
    if any(one.name == name and (one.held or one.waiting) for one in queue.limits(session)):
        return name, None
    hint = f"No job of {name} waits or runs. A key is JSON: 7 is a number, '\"7\"' is a text."
    return name, hint


def _resume_key(queue: PgQueue, session: Session, limit: str, key: Any) -> tuple[str, str | None]:
    """Resume a key; doubt one that was not paused."""
    known = {one.name for one in queue.limits(session)}
    name = queue.resume_key(session, limit, key)
    hint = f"{name} was not paused. `pgqueue limits` lists the keys that are."
    return name, None if name in known else hint


def _print_change(
    queue: PgQueue, queues: list[str], tasks: list[str], keys: list[str], change: str
) -> None:
    for name in queues:
        click.echo(f"{name}: {change}")
        hint_at_queue(queue, name)
    for name in tasks:
        click.echo(f"{name}: {change}")
        hint_at_task(queue, name)
    for name in keys:
        click.echo(harmless(f"{name}: {change}"))
