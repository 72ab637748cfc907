"""A network between worker and server that can be cut at one word of the protocol."""

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from sqlalchemy import make_url

COMMIT = b"COMMIT\x00"
"""How psycopg sends it: a simple query of its own."""


class Proxy:
    """Forwards connections; cuts those of them in which a COMMIT is sent, as often as it is told.

    ``forwarding`` the COMMIT first, or not: the client cannot tell one from the other.
    """

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cuts_left = 0
        self._forwarding = False
        self._after = b""
        self._cut_any = False
        self.cuts = 0

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()
        here = self._server.set(host=host, port=port, query={})
        return here.render_as_string(hide_password=False)

    def cut(self, *, times: int, forwarding: bool, after: bytes) -> None:
        """Cut at the next COMMITs of connections on which ``after`` was sent before."""
        self._forwarding, self._after, self._cuts_left = forwarding, after, times

    def cut_answer(self, *, after: bytes) -> None:
        """Cut the next connection that sends these words, when its statement has been run."""
        self._after, self._cut_any = after, True

    @property
    def is_idle(self) -> bool:
        """Whether all cuts that were asked for have been made."""
        return not self._cuts_left and not self._cut_any

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                threading.Thread(target=self._upward, args=(client, server), daemon=True).start()
                threading.Thread(target=_pump, args=(server, client), daemon=True).start()

    def _connect(self) -> socket.socket:
        folder = self._server.query.get("host")
        if isinstance(folder, str) and folder.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(Path(folder, f".s.PGSQL.{self._server.query.get('port', 5432)}")))
            return server
        return socket.create_connection(
            (self._server.host or "localhost", self._server.port or 5432)
        )

    def _upward(self, client: socket.socket, server: socket.socket) -> None:
        seen = b""
        with suppress(OSError):
            while data := client.recv(65536):
                seen = (seen + data)[-1_000_000:]
                if self._cuts_left and COMMIT in data and self._after in seen:
                    self._cuts_left -= 1
                    if self._forwarding:
                        server.sendall(data)
                    self._cut(client, server)
                    return
                if self._cut_any and self._after in data:
                    self._cut_any = False
                    server.sendall(data)
                    self._cut(client, server)
                    return
                if COMMIT in data:
                    seen = b""
                server.sendall(data)
        _close(client, server)

    def _cut(self, client: socket.socket, server: socket.socket) -> None:
        # The server reads what it was sent before it sees the end of the connection.
        _close(client)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)
        self.cuts += 1


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _close(source, sink)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
