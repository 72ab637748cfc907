"""The options of all commands; they import SQLAlchemy only when they have a value."""

from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Any], Any]


def option_of_state(*names: str, **settings: Any) -> Decorator:
    """An option before or after the command's name; the later one takes precedence."""

    def keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            from pgqueue.cli.app_loader import CliState

            setattr(ctx.ensure_object(CliState), str(parameter.name), value)

    return click.option(*names, expose_value=False, callback=keep, **settings)


APP: dict[str, Any] = {
    "metavar": "MODULE:QUEUE",
    "help": (
        "Where your PgQueue is, e.g. shop.jobs:queue; a function that returns it will do.  "
        "Default: app in [tool.pgqueue] of pyproject.toml."
    ),
}
URL: dict[str, Any] = {
    "metavar": "URL",
    "help": "The database, for commands that need no app, e.g. postgresql://me@localhost/shop.",
}
verbose_option = option_of_state(
    "-v",
    "--verbose",
    "is_verbose",
    is_flag=True,
    default=None,
    help="Log more, and show the traceback of an error.",
)
