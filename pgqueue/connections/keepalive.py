"""How soon each end of a connection gives the other up when the network between them is cut."""

import os
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
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
"""Milliseconds and seconds.  With these the server notices a dead client in seconds, also in the
middle of a statement or behind a cut cable, and gives its locks back; the defaults take hours.
https://www.postgresql.org/docs/current/runtime-config-connection.html"""

BRIEF = {"idle_in_transaction_session_timeout": "5000"}
"""Milliseconds that a worker's upkeep may hold its locks without a word: one that is frozen while
it rescues must not keep all others from it."""

HERE = {
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
    "tcp_keepalives_idle": "TCP_KEEPIDLE",
    "tcp_keepalives_interval": "TCP_KEEPINTVL",
    "tcp_keepalives_count": "TCP_KEEPCNT",
}
"""The same at this end, where the operating system has them."""


def notice_loss_of_server(fileno: int, settings: Mapping[str, str]) -> None:
    """Have this end too give up a connection that the network has cut.

    Whoever only waits for an answer sends nothing, and so never hears that the server has ended
    the connection meanwhile: for two hours, by the defaults.
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
        wire.detach()  # it is the driver's


LONGEST_NAME = 63
"""Bytes of an ``application_name`` that PostgreSQL keeps."""


def name_of_connection(driver: psycopg.BaseConnection[Any], purpose: str) -> dict[str, str]:
    """How a connection of a worker is named: which worker, and what for.

    Behind the name that the application has given to its connections, if it has.
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

    A child that outlives a worker would keep the worker's connections alive: the server would see
    no end of them, and leave the worker's locks where they are.
    """
    _not_for_children.add(driver)


def _leave_sockets_to_parent() -> None:
    for driver in list(_not_for_children):
        with suppress(psycopg.Error, OSError):  # it is closed
            # Nothing is sent, as it is the parent's.  And the number stays taken: the driver will
            # close it some day, and it must not be that of another file by then.  Closed first:
            # a process may have as many files open as it may.
            os.close(number := driver.fileno())
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_sockets_to_parent)


def has_ended(driver: psycopg.BaseConnection[Any]) -> bool:
    """Whether either end of a connection has ended it.  Reads nothing: another thread may."""
    try:
        fileno = driver.fileno()
    except psycopg.Error:  # this end
        return True
    if not hasattr(select, "poll"):  # on Windows
        return False
    told = select.poll()
    told.register(fileno, ENDED)
    return any(events & (ENDED | select.POLLHUP | select.POLLERR) for _, events in told.poll(0))


ENDED = getattr(select, "POLLRDHUP", 0)
"""Linux: also where the server's last words have not been read yet, as those of a server process
that was told to end."""
