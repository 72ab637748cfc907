"""Who runs a command that acts."""

import getpass
import os
import socket
from functools import partial

import click

from pgqueue.cli.app_loader import committed
from pgqueue.job_queue import PgQueue
from pgqueue.operations import Operator

reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for the log of operators."
)


def operator_of(queue: PgQueue, reason: str) -> Operator:
    """Who runs the command, on the database of the command."""
    begin = partial(committed, queue)
    return Operator(queue, actor(), reason, begin=begin, unlogged=_say_unlogged)


def actor() -> str:
    """The user of the system and the host, or PGQUEUE_ACTOR."""
    if given := os.environ.get("PGQUEUE_ACTOR"):
        return given
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # an account without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _say_unlogged() -> None:
    click.echo("This role may not write the log of operators: the action is not logged.", err=True)
