"""Wake-ups.  They are hints: a worker that misses one finds the message at the next poll."""

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy import Connection, Select, select
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.opening import driver_connection
from pgqueue.repository.tables import CHANNEL, SLEEPERS, notify, pg
from pgqueue.repository.transactions import listen

logger = redaction.logger(__name__)

TEST_EVERY = 30.0
DEADLINE = 1.0
"""Seconds for an answer: the same thread claims, and must not wait for a dead connection."""
LATER = 30.0
ANSWERS = (
    ExecStatus.TUPLES_OK,
    ExecStatus.COMMAND_OK,
    ExecStatus.PIPELINE_SYNC,
    ExecStatus.EMPTY_QUERY,
)


def _as_text(statement: Select[Any]) -> str:
    return str(statement.compile(compile_kwargs={"literal_binds": True}))


LOCK = _as_text(select(pg.pg_advisory_lock_shared(SLEEPERS)))
UNLOCK = _as_text(select(pg.pg_advisory_unlock_shared(SLEEPERS)))


class Listener:
    """Listens for notifications on the connection of the claims.

    While it is *armed* it holds the sleepers' lock in shared mode; enqueuers notify only while a
    listener holds it.  Used by one thread; only :meth:`poke` may be called from others.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        channel: str = CHANNEL,
        aside: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        """
        Args:
            channel: The channel whose payloads :meth:`wait` returns.
            aside: Functions by channels.  They get the payloads of other channels, which wake
                nobody.
        """
        self._enabled = enabled
        self._channel = channel
        self._aside = aside or {}
        self._driver: Any
        """The driver's connection, which is shared with the claims."""
        self._is_listening = False
        self._is_armed = False
        self._retry_at = 0.0
        self._heard_at = time.monotonic()
        self._kept: set[str] = set()
        """Payloads that came together with an answer."""
        self._heard_aside = 0
        """How many notifications of other channels have come."""
        self._inbox, self._doorbell = socket.socketpair()
        self._inbox.setblocking(False)
        self._doorbell.setblocking(False)

    def close(self) -> None:
        self._inbox.close()
        self._doorbell.close()

    def poke(self) -> None:
        """Wake the thread that listens."""
        try:
            self._doorbell.send(b"!")
        except OSError:
            return  # full: the thread is waking up already; closed: it has stopped

    def share(self, connection: Connection) -> None:
        """Listen on this connection, on which the same thread claims; it is in autocommit.

        Must be called for each new connection of that thread.
        """
        self._driver = driver_connection(connection)
        self._is_listening = self._is_armed = False
        # For notifications that come together with the answer to a claim.
        self._driver.add_notify_handler(lambda note: self._hear(note.channel, note.payload))

    def arm(self) -> bool:
        """Make enqueuers notify from now on; True if they did not before.

        The caller must then look for messages committed before.  When this returns, the connection
        has answered or is closed.
        """
        if self._is_armed or not self._listens():
            self._probe()
            return False
        with self._surviving():
            self._ask(LOCK)
            self._is_armed = True
        return self._is_armed

    def disarm(self) -> None:
        """Spare enqueuers the notification again."""
        if self._is_armed:
            self._is_armed = False
            with self._surviving():
                self._ask(UNLOCK)

    def wait(self, seconds: float) -> set[str]:
        """Wait for a notification, a poke or the end of the time; returns the payloads."""
        until = time.monotonic() + seconds
        while (payloads := self._wait(until - time.monotonic())) is None:
            pass
        return payloads

    def _wait(self, seconds: float) -> set[str] | None:
        """The same; None after notifications of other channels alone."""
        aside = self._heard_aside
        readable: list[Any] = [self._inbox]
        try:
            if self._listens():
                self._keep_payloads()  # notifications after the answer to a claim
                readable.append(self._driver)
            if self._kept:
                return self._taken()
            ready = _ready(readable, seconds)
        except (OSError, ValueError, psycopg.Error):
            self._disconnect()  # the server has closed the connection
            return set()
        if self._inbox in ready:
            with suppress(BlockingIOError):
                self._inbox.recv(4096)
        if self._driver in ready:
            with self._surviving():
                self._driver.pgconn.consume_input()
                self._keep_payloads()
                self._heard_at = time.monotonic()
        elif self._is_listening and time.monotonic() - self._heard_at >= TEST_EVERY:
            self._test()
        is_aside = self._heard_aside != aside and self._inbox not in ready
        return self._taken() if self._kept or not is_aside else None

    def _test(self) -> None:
        """Notify itself: half-open connections and poolers lose notifications silently."""
        with self._surviving():
            self._ask(_as_text(select(notify("test", self._channel))))
            deadline = time.monotonic() + DEADLINE
            while not self._kept and _ready([self._driver], deadline - time.monotonic()):
                self._driver.pgconn.consume_input()
                self._keep_payloads()
            if self._kept:
                self._heard_at = time.monotonic()
                return
            logger.warning("notifications do not arrive (is there a pooler?): polling instead")
            self.disarm()
            self._stop_listening()

    def _ask(self, statement: str) -> None:
        """Run a statement; raises if the connection does not answer in time."""
        self._driver.pgconn.send_query(statement.encode())
        self._await_answer()

    def _probe(self) -> None:
        """Close a connection that does not answer: claims on it would wait very long.

        A Sync alone begins no transaction; an empty query does.
        """
        if self._driver.closed:
            return
        with self._surviving():
            if not psycopg.Pipeline.is_supported():
                self._ask("")
                return
            server = self._driver.pgconn
            server.enter_pipeline_mode()
            server.pipeline_sync()
            self._await_answer()
            server.exit_pipeline_mode()

    def _await_answer(self) -> None:
        """Wait for an answer up to the deadline: on a half-open connection neither an answer nor
        an error ever comes, and the driver would wait for ever."""
        server = self._driver.pgconn
        deadline = time.monotonic() + DEADLINE
        while True:
            server.flush()
            server.consume_input()
            while not server.is_busy():
                result = server.get_result()
                if result is None:
                    self._keep_payloads()
                    return
                if result.status not in ANSWERS:
                    raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
            if not _ready([server.socket], deadline - time.monotonic()):
                raise psycopg.OperationalError(f"no answer for {DEADLINE:g} s")

    def _keep_payloads(self) -> None:
        while (note := self._driver.pgconn.notifies()) is not None:
            self._hear(note.relname.decode(), note.extra.decode(errors="replace"))

    def _hear(self, channel: str, payload: str) -> None:
        if channel in self._aside:
            self._heard_aside += 1
            self._aside[channel](payload)
        else:
            self._kept.add(payload)

    def _taken(self) -> set[str]:
        payloads, self._kept = self._kept, set()
        return payloads

    def _listens(self) -> bool:
        if self._is_listening:
            return True
        if not self._enabled or time.monotonic() < self._retry_at:
            return False
        with self._surviving():
            self._ask("; ".join(map(listen, (self._channel, *self._aside))))
            self._is_listening = True
            self._heard_at = time.monotonic()
        return self._is_listening

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Give the connection up after an error: the worker goes on by polling."""
        try:
            yield
        except (DBAPIError, psycopg.Error, OSError) as error:
            logger.info("lost the listening connection, polling for a while: %s", error)
            self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection.  The claimer finds it closed and opens another."""
        self._stop_listening()
        self._driver.close()

    def _stop_listening(self) -> None:
        self._is_listening = self._is_armed = False
        self._retry_at = time.monotonic() + LATER


def _ready(readable: list[Any], seconds: float) -> list[Any]:
    """Like ``select.select``, but also for file descriptors over 1023."""
    with selectors.DefaultSelector() as selector:
        for file in readable:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(seconds, 0.0))]
