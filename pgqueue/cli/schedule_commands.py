"""``pgqueue schedules``: list the schedules, pause, resume, trigger and remove them."""

from typing import Any

import click

from pgqueue.cli.group import CliState, on_database

_names = click.argument("names", metavar="NAME...", nargs=-1, required=True)


@click.group(invoke_without_command=True)
@on_database
@click.pass_context
def schedules(ctx: click.Context, given: CliState, as_json: bool) -> None:
    """Show the schedules with their next three runs, in their zone and in UTC.

    Below the table are the schedules whose tick is overdue, and why.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules
              pgqueue --app shop.jobs:queue schedules trigger shop.jobs.nightly
    """
    from pgqueue.cli.schedules import show

    if ctx.invoked_subcommand is None:
        show(given.database(), as_json=as_json)


@schedules.command()
@_names
@on_database
def pause(given: CliState, /, **options: Any) -> None:
    """Fire no tick of these schedules until `resume`.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules pause shop.jobs.nightly
    """
    from pgqueue.cli.schedules import change

    change(given.database(), "pause", **options)


@schedules.command()
@_names
@on_database
def resume(given: CliState, /, **options: Any) -> None:
    """Undo `pause`; the ticks of the pause are not made up.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules resume shop.jobs.nightly
    """
    from pgqueue.cli.schedules import change

    change(given.database(), "resume", **options)


@schedules.command()
@_names
@on_database
def trigger(given: CliState, /, **options: Any) -> None:
    """Enqueue a job of each schedule now; their next ticks stay where they are.

    Needs the app, whose tasks encode the arguments.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules trigger shop.jobs.nightly
    """
    from pgqueue.cli.schedules import change

    change(given.application(), "trigger", **options)


@schedules.command()
@_names
@on_database
def remove(given: CliState, /, **options: Any) -> None:
    """Delete schedules; their jobs stay.

    A schedule that the code declares is added again when the next worker starts.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules remove report:7
    """
    from pgqueue.cli.schedules import change

    change(given.database(), "remove", **options)
