"""The commands for limits: limits, set-limit."""

import json
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli.group import CliState, on_database

if TYPE_CHECKING:
    from pgqueue.repository import LimitState


@click.command()
@on_database
def limits(given: CliState, as_json: bool) -> None:
    """List the limits: capacities, places held, and jobs that wait.

    A job holds a place while it runs or is about to start.  The capacity of a rate is its starts
    in a period.  With a limit by argument, each value has the whole capacity; the numbers are sums
    over all values.  Reads all these jobs.

    \b
    Example:  pgqueue --app shop.jobs:queue limits
    """
    from pgqueue.cli.app_loader import opened
    from pgqueue.cli.jobs import as_data
    from pgqueue.terminal import print_table

    queue = given.database()
    with opened(queue) as session:
        found = queue.limits(session)
    if as_json:
        click.echo(json.dumps({"limits": [as_data(one._asdict()) for one in found]}, indent=2))
        return
    if not found:
        click.echo("No worker has declared a limit.")
        return
    rows = [
        [
            one.name,
            _capacity(one),
            one.held,
            one.waiting,
        ]
        for one in found
    ]
    print_table(["limit", "capacity", "held", "waiting"], rows)


@click.command(name="set-limit")
@click.argument("name")
@click.argument("capacity", type=click.IntRange(min=0), required=False)
@click.option("--reset", is_flag=True, help="Return to the capacity in the code.")
@click.option("--key", help="Only for this value of the limit's argument; JSON for several.")
@on_database
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
    from pgqueue.cli.app_loader import opened
    from pgqueue.cli.jobs import as_data
    from pgqueue.limits import has_own_capacity

    if reset == (capacity is not None):
        raise click.UsageError("give either a CAPACITY or --reset")
    queue = given.database()
    with opened(queue) as session:
        written = queue.set_limit(session, name, capacity, key=None if key is None else key_of(key))
        session.commit()
        known = {one.name: one for one in queue.limits(session)}
        found = known.get(written, known[name])
    if as_json:
        click.echo(json.dumps(as_data(found._asdict()), indent=2))
        return
    is_number = found.period is None and has_own_capacity(found.capacity, is_fair=found.is_fair)
    words = f"{found.capacity} at once" if is_number else _in_words(found, found.capacity)
    click.echo(f"{written}: {words}")


def key_of(text: str) -> Any:
    """The value of an argument as JSON or, if it is none, as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return (None,) if value is None else value


def _capacity(limit: "LimitState") -> str:
    words = _in_words(limit, limit.capacity) if limit.capacity else "paused"
    return f"{words} (in the code {_in_words(limit, limit.declared)})" if limit.is_set else words


def _in_words(limit: "LimitState", capacity: int) -> str:
    from pgqueue.limits import has_own_capacity, rate_in_words

    if not has_own_capacity(capacity, is_fair=limit.is_fair):
        return "in turns"
    return str(capacity) if limit.period is None else rate_in_words(capacity, limit.period)
