"""Wake-ups.  They are hints: whoever misses one finds the message at the next poll."""

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy import Engine, Select, select
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.statements.tables import CHANNEL, SLEEPERS, notify, pg
from pgqueue.unit_of_work import OWN, driver_connection, own_connection

logger = redaction.logger(__name__)

TEST_EVERY = 30.0
DEADLINE = 1.0
"""Seconds for an answer: the same thread claims, and must not wait for a dead connection."""
LATER = 30.0


def _in_words(statement: Select[Any]) -> str:
    return str(statement.compile(compile_kwargs={"literal_binds": True}))


LOCK = _in_words(select(pg.pg_advisory_lock_shared(SLEEPERS)))
UNLOCK = _in_words(select(pg.pg_advisory_unlock_shared(SLEEPERS)))
TEST = _in_words(select(notify("test")))


class Listener:
    """Hears the enqueuers of this schema, on a connection of its own.

    While it is *armed* it holds the sleepers' lock shared; enqueuers notify exactly while
    somebody does.  Used by one thread; only :meth:`poke` may be called from others.
    """

    def __init__(self, engine: Engine, *, enabled: bool) -> None:
        self._engine = engine
        self._enabled = enabled
        self._resources = ExitStack()
        self._connection: Any = None
        self._is_armed = False
        self._retry_at = 0.0
        self._heard_at = time.monotonic()
        self._kept: set[str] = set()
        """Words that came together with an answer."""
        self._inbox, self._doorbell = socket.socketpair()
        self._inbox.setblocking(False)
        self._doorbell.setblocking(False)

    def close(self) -> None:
        self._disconnect()
        self._inbox.close()
        self._doorbell.close()

    def poke(self) -> None:
        """Wake the thread that listens."""
        try:
            self._doorbell.send(b"!")
        except OSError:
            return  # full: it is waking up already; closed: it has stopped

    def arm(self) -> bool:
        """Have enqueuers notify from now on; True when they did not before.

        What was committed before must then be looked for.
        """
        if self._is_armed or not self._is_connected():
            return False
        with self._surviving():
            self._ask(LOCK)
            self._is_armed = True
        return self._is_armed

    def disarm(self) -> None:
        """Let enqueuers save the notification again."""
        if not self._is_armed:
            return
        self._is_armed = False
        with self._surviving():
            self._ask(UNLOCK)

    def wait(self, seconds: float) -> set[str]:
        """Wait for a word, a poke or the end of the time; returns the words heard."""
        if self._kept:
            return self._taken()
        readable: list[Any] = [self._inbox]
        if self._is_connected():
            readable.append(driver_connection(self._connection))
        try:
            ready = _ready(readable, seconds)
        except (OSError, ValueError, psycopg.Error):
            self._disconnect()  # the server has closed the connection under us
            return set()
        if self._inbox in ready:
            self._empty_inbox()
        if len(ready) > (self._inbox in ready):
            return self._words()
        self._test_now_and_then()
        return set()

    def _words(self) -> set[str]:
        with self._surviving():
            server = driver_connection(self._connection).pgconn
            server.consume_input()
            self._keep_words(server)
            self._heard_at = time.monotonic()
        return self._taken()

    def _test_now_and_then(self) -> None:
        """Hear oneself: a half-open connection, or a pooler, swallows notifications silently."""
        if self._connection is None or time.monotonic() - self._heard_at < TEST_EVERY:
            return
        with self._surviving():
            self._ask(TEST)
            notes = driver_connection(self._connection).notifies(timeout=DEADLINE, stop_after=1)
            if self._kept or any(notes):
                self._heard_at = time.monotonic()
                return
            logger.warning("notifications do not arrive (is there a pooler?): polling instead")
            self._disconnect()

    def _ask(self, statement: str) -> None:
        """Run a statement; a connection that does not answer in time is given up.

        Over a half-open connection neither an answer nor an error ever comes, and the driver
        would wait for ever.
        """
        server = driver_connection(self._connection).pgconn
        server.send_query(statement.encode())
        deadline = time.monotonic() + DEADLINE
        while not _has_answered(server):
            if not _ready([server.socket], deadline - time.monotonic()):
                raise psycopg.OperationalError(f"no answer for {DEADLINE:g} s")
        self._keep_words(server)

    def _keep_words(self, server: Any) -> None:
        while (note := server.notifies()) is not None:
            self._kept.add(note.extra.decode(errors="replace"))

    def _taken(self) -> set[str]:
        words, self._kept = self._kept, set()
        return words

    def _is_connected(self) -> bool:
        if self._connection is not None:
            return True
        if not self._enabled or time.monotonic() < self._retry_at:
            return False
        with self._surviving():
            opened = own_connection(self._engine, OWN, purpose="listener")
            self._connection = self._resources.enter_context(opened)
            self._ask(f"LISTEN {CHANNEL}")
            self._heard_at = time.monotonic()
        return self._connection is not None

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Whatever happens to this connection, the worker goes on by polling."""
        try:
            yield
        except (DBAPIError, psycopg.Error, OSError) as error:
            logger.info("lost the listening connection, polling for a while: %s", error)
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection, self._is_armed = self._connection, None, False
        if connection is not None and not connection.closed and not connection.invalidated:
            driver_connection(connection).close()
            connection.invalidate()  # or it would be asked to roll back, and may not answer
        self._retry_at = time.monotonic() + LATER
        try:
            self._resources.close()
        except DBAPIError:
            logger.debug("the listening connection was gone already", exc_info=True)

    def _empty_inbox(self) -> None:
        try:
            self._inbox.recv(4096)
        except BlockingIOError:
            return


def _has_answered(server: Any) -> bool:
    """Whether the statement that was sent has ended; reads what has come so far."""
    server.flush()
    server.consume_input()
    while not server.is_busy():
        result = server.get_result()
        if result is None:
            return True
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
    return False


def _ready(readable: list[Any], seconds: float) -> list[Any]:
    """Like ``select.select``, which cannot take a file number over 1023."""
    with selectors.DefaultSelector() as selector:
        for file in readable:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(seconds, 0.0))]
