"""``pgqueue limits`` and ``set-limit``."""

import json
from typing import Any

import click

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import on_database_with_json
from pgqueue.limits import has_own_capacity, rate_in_words
from pgqueue.repository import LimitState
from pgqueue.terminal import print_json, print_table


@click.command()
@on_database_with_json
def limits(given: CliState, as_json: bool) -> None:
    """List the limits: capacities, places held, and jobs that wait.

    A job holds a place while it runs or is about to start.  The capacity of a rate is its starts
    in a period.  With a limit by argument, each value has the whole capacity; the numbers are sums
    over all values.  Reads all these jobs.

    \b
    Example:  pgqueue --app shop.jobs:queue limits
    """
    queue = given.database()
    with opened(queue) as session:
        found = queue.limits(session)
    if as_json:
        print_json({"limits": found})
        return
    rows = [[one.name, _capacity(one), one.held, one.waiting] for one in found]
    columns = ["limit", "capacity", "held", "waiting"]
    print_table(columns, rows, otherwise="No worker has declared a limit.")


@click.command(name="set-limit")
@click.argument("name")
@click.argument("capacity", type=click.IntRange(min=0), required=False)
@click.option("--reset", is_flag=True, help="Return to the capacity in the code.")
@click.option("--key", help="Only for this value of the limit's argument; JSON for several.")
@on_database_with_json
def set_limit(
    given: CliState, as_json: bool, name: str, capacity: int | None, reset: bool, key: str | None
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
    with opened(queue) as session:
        written = queue.set_limit(session, name, capacity, key=None if key is None else key_of(key))
        session.commit()
        known = {one.name: one for one in queue.limits(session)}
        found = known.get(written, known[name])
    if as_json:
        print_json(found)
        return
    click.echo(f"{written}: {_in_force(found)}")


def key_of(text: str) -> Any:
    """The value of an argument as JSON or, if it is none, as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return (None,) if value is None else value


def _capacity(limit: LimitState) -> str:
    words = _in_words(limit, limit.capacity) if limit.capacity else "paused"
    return f"{words} (in the code {_in_words(limit, limit.declared)})" if limit.is_set else words


def _in_force(limit: LimitState) -> str:
    if not limit.capacity:
        return "paused"
    is_number = limit.period is None and has_own_capacity(limit.capacity, is_fair=limit.is_fair)
    return f"{limit.capacity} at once" if is_number else _in_words(limit, limit.capacity)


def _in_words(limit: LimitState, capacity: int) -> str:
    if not has_own_capacity(capacity, is_fair=limit.is_fair):
        return "in turns"
    return str(capacity) if limit.period is None else rate_in_words(capacity, limit.period)
