"""``flask pgqueue ...``: the commands of ``pgqueue``, on the queue of the app."""

import copy
import re
from typing import Any

import click
from flask import current_app
from flask.cli import ScriptInfo
from flask.logging import default_handler

from pgqueue.cli import main
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.app_options import verbose_option
from pgqueue.cli.commands import ErrorHandlingGroup, loaded

STAND_ALONE = {"demo"}
"""Commands that do not use an application."""

REPLACED = {"app", "url"}
"""Options that the Flask app replaces."""

NAMED = re.compile(r"pgqueue --(?:app|url) \S+")
"""How the examples in the help texts call the commands."""


class AppCommands(ErrorHandlingGroup):
    """All commands of ``pgqueue``, without the options that name an application."""

    def invoke(self, ctx: click.Context) -> Any:
        if not current_app:  # Flask's test runner calls it without a context
            ctx.with_resource(ctx.ensure_object(ScriptInfo).load_app().app_context())
        given = ctx.ensure_object(CliState)
        given.queue = current_app.extensions["pgqueue"]
        given.replaced_handler = (current_app.logger, default_handler)
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in main.list_commands(ctx) if name not in STAND_ALONE]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = main.get_command(ctx, name)
        if command is None or name in STAND_ALONE:
            return None
        return _joined(loaded(command))


def _joined(command: click.Command) -> click.Command:
    joined = copy.copy(command)
    joined.params = [option for option in command.params if option.name not in REPLACED]
    joined.help = NAMED.sub("flask pgqueue", command.help or "")
    if isinstance(joined, click.Group):
        joined.commands = {name: _joined(inner) for name, inner in joined.commands.items()}
    return joined


@click.group("pgqueue", cls=AppCommands, context_settings=main.context_settings, epilog=main.epilog)
@verbose_option
def commands() -> None:
    """Background jobs: their tables, their workers, and their status.

    \b
    Create the tables:  flask pgqueue upgrade
    Run the jobs:       flask pgqueue worker
    """
