"""``pgqueue dashboard``: serves the dashboard alone, behind a user and a password."""

import gc
import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from waitress.server import create_server
from werkzeug import Request, Response
from werkzeug.exceptions import BadRequest

from pgqueue.dashboard.access import RIGHTS, Access
from pgqueue.dashboard.dashboard import Dashboard
from pgqueue.job_queue import PgQueue

THREADS = 4
DELAY = 1.0
"""Seconds after which a wrong password is answered."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Door:
    """Checks who asks; an instance is the ``authorize`` of a dashboard."""

    def __init__(self, user: str, password: str | None, *, is_local: bool) -> None:
        self._user = user
        self._password = password
        self._is_local = is_local
        self._one_at_a_time = threading.Lock()

    def __call__(self, request: Request) -> Access | Response:
        # A page of another site that has its own name lead here must not act as this user.
        if self._is_local and _without_port(request.host) not in LOOPBACK:
            raise BadRequest(f"this dashboard answers on {', '.join(LOOPBACK)} only")
        if self._password is None or self._is_right(request):
            return Access(user=self._user, rights=RIGHTS)
        if request.authorization is not None:
            with self._one_at_a_time:
                threading.Event().wait(DELAY)
        return Response(
            "User and password, please.",
            401,
            {"WWW-Authenticate": 'Basic realm="pgqueue", charset="UTF-8"'},
            content_type="text/plain",
        )

    def _is_right(self, request: Request) -> bool:
        given = request.authorization
        if given is None or given.type != "basic":
            return False
        is_user = _are_equal(given.username, self._user)
        is_password = _are_equal(given.password, self._password)
        return is_user and is_password


def _are_equal(given: str | None, own: str | None) -> bool:
    """Compares in a time that does not depend on where they differ."""
    return hmac.compare_digest((given or "").encode(), (own or "").encode())


def _without_port(host: str) -> str:
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def serve(
    queue: PgQueue,
    *,
    host: str,
    port: int,
    user: str,
    password: str | None,
    environment: str = "",
    around: Callable[[], AbstractContextManager[object]],
    on_start: Callable[[str], None],
) -> None:
    """Serve the dashboard of a queue until the process is stopped.

    ``password``: None to let everybody in who reaches the port; the caller allows this on a
    loopback address only.  ``around``: the context manager around each request.  ``on_start`` is
    called with the address as soon as the port is open.
    """
    door = Door(user, password, is_local=is_loopback(host))
    dashboard = Dashboard(
        queue, authorize=door, environment=environment, secret=secrets.token_urlsafe(32)
    )
    dashboard.around = around
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        server = create_server(
            dashboard.wsgi,
            sockets=[listening],
            threads=THREADS,
            ident="",
            clear_untrusted_proxy_headers=True,
        )
        shown = f"[{host}]" if ":" in host else host
        on_start(f"http://{shown}:{listening.getsockname()[1]}/")
        # Otherwise each full collection, in one request of twenty, reads all modules: 50 ms.
        gc.collect()
        gc.freeze()
        try:
            server.run()
        finally:
            server.close()
