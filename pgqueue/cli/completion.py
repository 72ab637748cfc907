"""Completion in the shell.  Names come from the application; the database is never asked."""

import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import click

from pgqueue.cli.group import Given

if TYPE_CHECKING:
    from pgqueue.job_queue import PgQueue

SHELLS = ["bash", "zsh", "fish"]


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets your shell complete commands, options and names.

    Task and queue names are completed when PGQUEUE_APP, or --app, says where they are.

    \b
    Example:  eval "$(pgqueue completion bash)"                  in ~/.bashrc
              eval "$(pgqueue completion zsh)"                   in ~/.zshrc
              pgqueue completion fish > ~/.config/fish/completions/pgqueue.fish
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None  # click knows the three
    root = ctx.find_root()
    click.echo(complete(root.command, {}, "pgqueue", "_PGQUEUE_COMPLETE").source())


def complete_task(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the application's tasks."""
    return _names(ctx, incomplete, lambda queue: set(queue.tasks))


def complete_queue(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Queues that the application's tasks name."""
    return _names(
        ctx, incomplete, lambda queue: {task.settings.queue for task in queue.tasks.values()}
    )


def _names(ctx: click.Context, incomplete: str, of: "Callable[[PgQueue], set[str]]") -> list[str]:
    given = ctx.ensure_object(Given)
    given.app = given.app or ctx.find_root().params.get("app")
    # Whatever the application prints or raises on import, the line being typed stays as it is.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            names = of(given.application())
        except Exception:  # an application may raise anything
            return []
    return sorted(name for name in names if name.startswith(incomplete))
