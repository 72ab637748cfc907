"""The commands that change what workers may start: ``pause``, ``resume`` and ``set-limit``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pgqueue.checks import ALL_QUEUES, check_known_task_name, check_queue_or_all
from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.operators import operator_of, reason_option
from pgqueue.cli.options import (
    complete_queue,
    complete_task,
    hint_at_names,
    on_database_with_json,
    together,
)
from pgqueue.job_queue import PgQueue
from pgqueue.operations import Operator
from pgqueue.terminal import harmless, print_json
from pgqueue.views.limits import LimitState

HINTS = {"queues": "queue_name", "tasks": "task"}
"""Which name of the app is expected, as a parameter of hint_at_names."""

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
    reason_option,
    on_database_with_json,
)


@click.command()
@_what
def pause(given: CliState, **what: Any) -> None:
    """Make all workers skip queues, tasks or a key, within two seconds.

    Running jobs go on, and enqueuing continues.  '*' stands for all queues.

    \b
    Example:  pgqueue --app shop.jobs:queue pause mail
    Or:       pgqueue --app shop.jobs:queue pause '*'
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
    queues: Sequence[str],
    tasks: Sequence[str],
    limit: str | None,
    key: str | None,
    reason: str,
    is_paused: bool,
    as_json: bool,
) -> None:
    if not queues and not tasks and limit is None and key is None:
        raise click.UsageError("name a queue, a task with --task, or a key with --limit, --key")
    if (limit is None) != (key is None):
        raise click.UsageError("give --limit and --key together")
    for name in queues:
        check_queue_or_all(name)
    for name in tasks:
        check_known_task_name(name)
    queue = given.database()
    operator = operator_of(queue, reason)
    before = _limits(queue) if key is not None else []
    changed: dict[str, list[str]] = {
        # The first, because it may be refused: a limit must be known.
        "keys": [] if limit is None else [_change_key(operator, limit, key, is_paused=is_paused)],
        "queues": list(dict.fromkeys(queues)),
        "tasks": list(dict.fromkeys(tasks)),
    }
    verb = "pause" if is_paused else "resume"
    for method, names in ((f"{verb}_queue", changed["queues"]), (f"{verb}_task", changed["tasks"])):
        for name in names:
            getattr(operator, method)(name)
    after = _limits(queue) if key is not None else []
    if as_json:
        print_json({**changed, "is_paused": is_paused})
    else:
        _print(queue, changed, before, after, is_paused=is_paused)


def _print(
    queue: PgQueue,
    changed: Mapping[str, Sequence[str]],
    before: Sequence[LimitState],
    after: Sequence[LimitState],
    *,
    is_paused: bool,
) -> None:
    for kind, names in changed.items():
        for name in names:
            click.echo(harmless(f"{name}: {'paused' if is_paused else 'resumed'}"))
            if kind in HINTS and name != ALL_QUEUES:
                hint_at_names(queue, **{HINTS[kind]: name})
    if changed["queues"] and not is_paused and _are_all_paused(queue):
        click.echo("All queues are paused: run `pgqueue resume '*'` too.", err=True)
    for name in changed["keys"]:
        if hint := _hint_at_key(name, before, after, is_paused=is_paused):
            click.echo(harmless(hint), err=True)


def _are_all_paused(queue: PgQueue) -> bool:
    with opened(queue) as session:
        return queue.views.queues(session, ()).all_paused_at is not None


def _change_key(operator: Operator, limit: str, key: str | None, *, is_paused: bool) -> str:
    """Pause or resume a key; returns its name in lists."""
    value = _value_of(key or "")
    return (operator.pause_key if is_paused else operator.resume_key)(limit, value)


def _limits(queue: PgQueue) -> Sequence[LimitState]:
    with opened(queue) as session:
        return queue.limits(session)


def _hint_at_key(
    name: str, before: Sequence[LimitState], after: Sequence[LimitState], *, is_paused: bool
) -> str | None:
    """Doubt a key that no job has, such as a text for a number, or that was not paused."""
    if is_paused and not any(one.name == name and (one.held or one.waiting) for one in after):
        return f"No job of {name} waits or runs. A key is JSON: 7 is a number, '\"7\"' is a text."
    if not is_paused and all(one.name != name for one in before):
        return f"{name} was not paused. `pgqueue limits` lists the keys that are."
    return None


@click.command(name="set-limit")
@click.argument("name")
@click.argument("capacity", type=click.IntRange(min=0), required=False)
@click.option("--reset", is_flag=True, help="Return to the capacity in the code.")
@click.option("--key", help="Only for this value of the limit's argument; JSON for several.")
@reason_option
@on_database_with_json
def set_limit(
    given: CliState,
    as_json: bool,
    name: str,
    capacity: int | None,
    reset: bool,
    key: str | None,
    reason: str,
) -> None:
    """Set how many jobs of a limit run at once, or start in its period, for all workers.

    Jobs that were admitted go on.  With 0 no more are admitted.

    \b
    Example:  pgqueue --app shop.jobs:queue set-limit bank 5
              pgqueue --app shop.jobs:queue set-limit bank --reset
              pgqueue --app shop.jobs:queue set-limit shop.report:tenant_id 0 --key 7
    """
    if reset == (capacity is not None):
        raise click.UsageError("give either a CAPACITY or --reset")
    queue = given.database()
    value = None if key is None else _value_of(key)
    written, _ = operator_of(queue, reason).set_limit(name, capacity, key=value)
    known = {one.name: one for one in _limits(queue)}
    found = known.get(written, known[name])
    if as_json:
        print_json(found)
        return
    click.echo(f"{written}: {found.words(found.capacity)}")


def _value_of(key: str) -> Any:
    """The value of an argument as JSON or, if it is none, as text."""
    try:
        value = json.loads(key)
    except ValueError:
        return key
    return (None,) if value is None else value


COMMANDS = (pause, resume, set_limit)
