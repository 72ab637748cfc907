"""``pgqueue dashboard``: serves the dashboard alone, behind a user and a password."""

import gc
import hmac
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from waitress.server import create_server
from waitress.utilities import queue_logger
from werkzeug import Request, Response
from werkzeug.exceptions import BadRequest

from pgqueue import redaction
from pgqueue.dashboard.access import RIGHTS, Access
from pgqueue.dashboard.dashboard import Dashboard
from pgqueue.dashboard.protection import LARGEST_BODY
from pgqueue.errors import OptionError
from pgqueue.job_queue import PgQueue

logger = redaction.logger(__name__)

THREADS = 4
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HOST_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]{0,252}[a-zA-Z0-9])?|\[[0-9a-fA-F:.]+\]")
URL_PREFIX = re.compile(r"(/[a-zA-Z0-9._~-]+)*/?")

FREE_GUESSES = 5
"""Wrong passwords of one address that are answered as such; further ones are "too many"."""
GUESSES_FOR = 60.0
"""Seconds after which the wrong passwords of an address are forgotten."""
MOST_ADDRESSES = 1000
LEAST_LENGTH = 12
"""Characters of a password that other machines may try."""


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guesses:
    """Counts the wrong passwords of each address within a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[str, tuple[float, int]] = {}

    def are_too_many(self, address: str, now: float) -> bool:
        """Count one more; returns whether the address has used up its guesses."""
        with self._lock:
            since, count = self._by_address.pop(address, (now, 0))
            if now - since >= GUESSES_FOR:
                since, count = now, 0
            self._by_address[address] = since, count + 1
            if len(self._by_address) > MOST_ADDRESSES:  # the one that was quiet for longest
                del self._by_address[next(iter(self._by_address))]
        if count == FREE_GUESSES:
            logger.warning("the dashboard was given %d wrong passwords by %s", count, address)
        return count >= FREE_GUESSES


class AccessCheck:
    """Checks who asks; an instance is the ``authorize`` of a dashboard.

    ``hosts``: the names under which the dashboard answers; None for any.  The right password is
    answered at once, whatever others have tried meanwhile.
    """

    def __init__(
        self, user: str, password: str | None, *, hosts: Collection[str] | None = None
    ) -> None:
        self._user = user
        self._password = password
        self._hosts = hosts
        self._guesses = Guesses()

    def __call__(self, request: Request) -> Access | Response:
        # A page of another site that has its own name lead here must not act as this user.
        if self._hosts is not None and _without_port(request.host).lower() not in self._hosts:
            raise BadRequest(
                f"this dashboard answers on {', '.join(self._hosts)} only; behind a proxy, name "
                "its host with --public-host"
            )
        if self._password is None or self._is_right(request):
            return Access(user=self._user, rights=RIGHTS)
        address = request.remote_addr or ""
        if request.authorization is not None and self._guesses.are_too_many(
            address, time.monotonic()
        ):
            return Response(
                "Too many wrong passwords; wait a minute.",
                429,
                {"Retry-After": f"{GUESSES_FOR:.0f}"},
                content_type="text/plain",
            )
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


def check_options(
    host: str, password: str | None, public_hosts: Collection[str], url_prefix: str
) -> None:
    """Raises OptionError for a wrong option of :func:`serve`."""
    for name in public_hosts:
        if not HOST_NAME.fullmatch(name):
            raise OptionError(
                f"--public-host is {name!r}; give the name in the address bar without scheme and "
                "port, such as ops.example.com"
            )
    if not URL_PREFIX.fullmatch(url_prefix):
        raise OptionError(f"--url-prefix is {url_prefix!r}; give a path such as /ops/jobs")
    is_open = bool(public_hosts) or not is_loopback(host)
    if password is not None and is_open and len(password) < LEAST_LENGTH:
        raise OptionError(
            f"the password has {len(password)} characters, and other machines may try it; give "
            f"one of at least {LEAST_LENGTH}, as `openssl rand -base64 18` prints"
        )


def serve(
    queue: PgQueue,
    *,
    host: str,
    port: int,
    user: str,
    password: str | None,
    public_hosts: Collection[str] = (),
    url_prefix: str = "",
    environment: str = "",
    around: Callable[[], AbstractContextManager[object]],
    on_start: Callable[[str], None],
) -> None:
    """Serve the dashboard of a queue until the process is stopped.

    ``password``: None to let everybody in who reaches the port; the caller allows this on a
    loopback address only.  ``public_hosts``: the names in addresses, if a proxy stands before it.
    ``url_prefix``: the path below which it is seen.  ``around``: the context manager around each
    request.  ``on_start`` is called with the address as soon as the port is open.
    """
    check_options(host, password, public_hosts, url_prefix)
    hosts = None
    if public_hosts or is_loopback(host):
        hosts = (*LOOPBACK, *(name.lower() for name in public_hosts))
    door = AccessCheck(user, password, hosts=hosts)
    dashboard = Dashboard(
        queue, authorize=door, environment=environment, secret=secrets.token_urlsafe(32)
    )
    dashboard.around = around
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Under load it writes a line for each request.
    queue_logger.setLevel("ERROR")
    with socket.create_server((host, port), family=family) as listening:
        server = create_server(
            dashboard.wsgi,
            sockets=[listening],
            threads=THREADS,
            ident="",
            url_prefix=url_prefix,
            # A body is read before anybody is asked who it is: little of it, and not to the disk.
            max_request_body_size=LARGEST_BODY + 1,
            inbuf_overflow=2 * LARGEST_BODY,
            # A proxy of this machine says whom it asks for: for the count of wrong passwords, and
            # so that cookies are Secure.  No address is made from these headers.
            trusted_proxy="::1" if family == socket.AF_INET6 else "127.0.0.1",
            trusted_proxy_headers={"x-forwarded-for", "x-forwarded-proto"},
            clear_untrusted_proxy_headers=True,
        )
        shown = f"[{host}]" if ":" in host else host
        prefix = url_prefix.rstrip("/")
        on_start(f"http://{shown}:{listening.getsockname()[1]}{prefix}/")
        # Otherwise each full collection, in one request of twenty, reads all modules: 50 ms.
        gc.collect()
        gc.freeze()
        try:
            server.run()
        finally:
            server.close()
