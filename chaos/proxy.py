"""A network between client and server that does what a scenario says.

It passes on, delays, holds, resets, and cuts connections at one word of the protocol.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import URL, make_url

COMMIT = b"COMMIT\x00"
"""How psycopg sends it: a simple query of its own."""

UNPREPARED = {"connect_args": {"prepare_threshold": None}}
"""Of an engine: each statement is sent in words, so that a cut can find it."""

REMEMBERED = 1_000_000
RESET = struct.pack("ii", 1, 0)


@dataclass
class Cut:
    """What is cut next: connections that send ``at``, having sent ``after`` since a COMMIT."""

    at: bytes = COMMIT
    after: bytes = b""
    forwarding: bool = True
    left: int = 0


class Proxy:
    """Forwards connections, all alike unless it is told to treat some of them otherwise.

    A cut may forward its word first, or not: the client cannot tell one from the other.
    """

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._held: bytes | None = None
        self._cut = Cut()
        self.cuts = 0

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()
        here = self._server.set(host=host, port=port, query={})
        return here.render_as_string(hide_password=False)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.pass_on()
        self.reset()

    def lead_to(self, url: str) -> None:
        """Lead new connections to another server."""
        self._server = make_url(url)

    def cut(
        self, *, at: bytes = COMMIT, after: bytes = b"", forwarding: bool, times: int = 1
    ) -> None:
        """Cut at the next words ``at`` of connections on which ``after`` was sent before."""
        self._cut = Cut(at, after, forwarding, times)

    @property
    def is_idle(self) -> bool:
        """Whether all cuts that were asked for have been made."""
        return not self._cut.left

    def hold(self, *, after: bytes = b"") -> int:
        """Keep whatever is sent, by new connections too, and tell nobody: half-open.

        With words, only that of those connections which have sent these; returns how many.
        """
        with self._lock:
            self._held = after
            held = [link for link in self._links if link.is_open and after in link.seen]
            for link in held:
                link.flows.clear()
        return len(held)

    def pass_on(self) -> None:
        """Let everything through again, late as it is."""
        with self._lock:
            self._held = None
            for link in self._links:
                link.flows.set()

    def reset(self) -> int:
        """End all connections by a reset, in both directions; returns how many."""
        with self._lock:
            links, self._links = [link for link in self._links if link.is_open], []
        for link in links:
            link.reset()
        return len(links)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = _connected(self._server)
                except OSError:
                    client.close()
                    continue
                self._take(Link(self, client, server))

    def _take(self, link: Link) -> None:
        with self._lock:
            if self._held == b"":
                link.flows.clear()
            self._links = [*(one for one in self._links if one.is_open), link]
        link.start()

    def sees(self, link: Link, data: bytes) -> bool:
        """Look at what a client sends; True if the connection is to be cut here."""
        link.seen = (link.seen + data)[-REMEMBERED:]
        with self._lock:
            cut = self._cut
            if cut.left and cut.at in data and cut.after in link.seen:
                cut.left -= 1
                return True
            if self._held and self._held in data:
                link.flows.clear()
        if COMMIT in data:
            link.seen = b""
        return False

    def ends(self, link: Link, data: bytes) -> None:
        """Cut it: the client hears nothing any more, the server perhaps one word."""
        if self._cut.forwarding:
            with suppress(OSError):
                link.server.sendall(data)
        _close(link.client)
        # The server reads what it was sent before it sees the end of the connection.
        with suppress(OSError):
            link.server.shutdown(socket.SHUT_WR)
        self.cuts += 1


class Link:
    """One connection through the proxy, with a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self.client = client
        self.server = server
        self.seen = b""
        self.flows = threading.Event()
        self.flows.set()
        self._is_reset = False

    def start(self) -> None:
        for work in (self._upward, self._downward):
            threading.Thread(target=work, daemon=True).start()

    @property
    def is_open(self) -> bool:
        return self.client.fileno() != -1

    def reset(self) -> None:
        self._is_reset = True
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads, and tells nobody

    def _upward(self) -> None:
        with suppress(OSError):
            while data := self._received(self.client):
                if self._proxy.sees(self, data):
                    self._proxy.ends(self, data)
                    return
                self.flows.wait()
                self.server.sendall(data)
        self._close()

    def _downward(self) -> None:
        with suppress(OSError):
            while data := self._received(self.server):
                self.client.sendall(data)
        self._close()

    def _received(self, source: socket.socket) -> bytes:
        """What comes, or the end of it, when the network lets it through."""
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        if not self._is_reset:
            self.flows.wait()
        return data

    def _close(self) -> None:
        if self._is_reset:
            self.client.close()  # the other way round, a shutdown would end it politely
            self.server.close()
        else:
            _close(self.client, self.server)


def _connected(target: URL) -> socket.socket:
    folder = target.query.get("host")
    if isinstance(folder, str) and folder.startswith("/"):
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(Path(folder, f".s.PGSQL.{target.query.get('port', 5432)}")))
        return server
    return socket.create_connection((target.host or "localhost", target.port or 5432))


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
