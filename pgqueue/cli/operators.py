"""Who runs a command, and the rows that commands write to the log of operators."""

import getpass
import os
import socket
from collections.abc import Mapping
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.repository.operator_actions import Action, OperatorActions

reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for the log of operators."
)


def actor() -> str:
    """The user of the system and the host, or PGQUEUE_ACTOR."""
    if given := os.environ.get("PGQUEUE_ACTOR"):
        return given
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # an account without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def logged(session: Session, new: Action) -> Action:
    """Write an action to the log.

    A role without the right to write it, such as that of workers, can run the command all the same.
    """
    log = OperatorActions(session)
    if log.may_write():
        return log.add(new)
    click.echo("This role may not write the log of operators: the action is not logged.", err=True)
    return new


def log_done(
    session: Session,
    action: str,
    target: Mapping[str, Any],
    *,
    reason: str,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write an action that the same transaction has done."""
    new = Action(
        actor=actor(),
        action=action,
        target=target,
        reason=reason,
        before=before,
        after=after,
    )
    logged(session, new)
