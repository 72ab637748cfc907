"""How soon each end of a connection gives it up when the network between them is cut."""

import os
import select
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import psycopg

NETWORK = {
    "client_connection_check_interval": "1000",
    "tcp_user_timeout": "10000",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Milliseconds and seconds.  With these settings the server detects a lost client in seconds, even
in the middle of a statement or behind a cut cable, and releases its locks; by default this takes
hours.  https://www.postgresql.org/docs/current/runtime-config-connection.html"""

BRIEF = {"idle_in_transaction_session_timeout": "5000"}
"""Milliseconds that a worker's upkeep may hold its locks while idle: a worker that freezes during
a rescue must not keep all others from rescuing."""

HERE = {
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
    "tcp_keepalives_idle": "TCP_KEEPIDLE",
    "tcp_keepalives_interval": "TCP_KEEPINTVL",
    "tcp_keepalives_count": "TCP_KEEPCNT",
}
"""The same settings on the client, where the operating system has them."""


def notice_loss_of_server(fileno: int, settings: Mapping[str, str]) -> None:
    """Make the client too give up a connection that the network has cut.

    A client that only waits for an answer sends nothing, so it does not learn that the server has
    ended the connection: for two hours, by default.
    """
    wire = socket.socket(fileno=fileno)
    try:
        if wire.family not in (socket.AF_INET, socket.AF_INET6):
            return
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, option in HERE.items():
            if name in settings and hasattr(socket, option):
                wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), int(settings[name]))
    finally:
        wire.detach()  # the driver owns the socket


LONGEST_NAME = 63
"""Bytes of an ``application_name`` that PostgreSQL keeps."""


def name_of_connection(driver: psycopg.BaseConnection[Any], purpose: str) -> dict[str, str]:
    """The name of a worker's connection: the worker, and the connection's purpose.

    It follows the name that the application gives to its connections, if there is one.
    """
    if not purpose:
        return {}
    theirs = driver.info.parameter_status("application_name") or "pgqueue"
    host = socket.gethostname()
    rest = f" worker :{os.getpid()} {purpose}"
    room = max(LONGEST_NAME - len(rest) - len(theirs.encode()), 0)
    name = f"{theirs} worker {host[:room]}:{os.getpid()} {purpose}"
    return {"application_name": name}


_not_for_children: WeakSet[psycopg.BaseConnection[Any]] = WeakSet()


def keep_from_children(driver: psycopg.BaseConnection[Any]) -> None:
    """Close this connection's socket in every process that is forked from this one.

    A child process that survives its worker would keep the worker's connections open: the server
    would not see them end, and would not release the worker's locks.
    """
    _not_for_children.add(driver)


def leave_to_parent(drivers: Iterable[psycopg.BaseConnection[Any]]) -> None:
    """Close the sockets of these connections in this forked process."""
    for driver in list(drivers):
        with suppress(psycopg.Error, OSError):  # the connection is closed
            # Send nothing: the connection belongs to the parent.  Keep the descriptor in use: the
            # driver closes it some day, and it must not be another file's by then.  Close it first:
            # the process may have reached its limit of open files.
            os.close(number := driver.fileno())
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=partial(leave_to_parent, _not_for_children))


def has_ended(driver: psycopg.BaseConnection[Any]) -> bool:
    """Whether either end has ended a connection.  Reads nothing: another thread may be reading."""
    try:
        fileno = driver.fileno()
    except psycopg.Error:  # ended by this end
        return True
    if not hasattr(select, "poll"):  # on Windows
        return False
    poller = select.poll()
    poller.register(fileno, ENDED)
    return any(events & (ENDED | select.POLLHUP | select.POLLERR) for _, events in poller.poll(0))


ENDED = getattr(select, "POLLRDHUP", 0)
"""Linux: set even if the server's last message has not been read yet, such as that of a server
process that was told to end."""
