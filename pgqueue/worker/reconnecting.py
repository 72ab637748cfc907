"""A connection of a worker's thread, opened again whenever it breaks."""

import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from threading import Event
from typing import TypeVar

import psycopg
from psycopg.errors import InsufficientPrivilege, LockNotAvailable, QueryCanceled
from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pgqueue import redaction
from pgqueue.database.opening import ConnectFailed, driver_connection, own_connection
from pgqueue.errors import RowsHidden
from pgqueue.repository.row_security import remedy
from pgqueue.worker.outage import (
    MORE_CONNECTIONS,
    REPEAT,
    Outage,
    is_away,
    is_crowded,
    is_filtered,
    words_of,
)

logger = redaction.logger(__name__)

T = TypeVar("T")

FIRST_WAIT = 0.05
CANCEL_FOR = 1.0
"""Seconds for the server to accept a cancellation, which needs a connection of its own."""
LONGEST_WAIT = 5.0

IDLE_AFTER = 10.0
"""Seconds without work after which a connection is closed: opening another takes some
milliseconds, and PostgreSQL allows 100 by default."""

GRANT_AGAIN = "as the owner of the tables, run `pgqueue grant --worker ROLE`, as after each upgrade"

BROKEN = (DBAPIError, InvalidRequestError, PoolTimeout, RowsHidden, ConnectFailed)
"""A connection lost inside a savepoint, or closed by a handler, raises InvalidRequestError."""


def is_lock_timeout(error: Exception) -> bool:
    """Whether a statement has waited for a lock for as long as its connection may."""
    return isinstance(error, DBAPIError) and isinstance(error.orig, LockNotAvailable)


def lacks_right(error: Exception) -> bool:
    """Whether the role of the connection may not do what a statement does."""
    is_denied = isinstance(error, DBAPIError) and isinstance(error.orig, InsufficientPrivilege)
    return is_denied and not is_filtered(error)


class ReconnectingConnection:
    """Used by one thread, except for :meth:`cancel`."""

    def __init__(
        self,
        engine: Engine,
        settings: Mapping[str, str],
        outage: Outage,
        *,
        name: str,
        stopping: Event,
        isolation_level: IsolationLevel = "AUTOCOMMIT",
        longest_wait: float = LONGEST_WAIT,
        is_kept: bool = False,
    ) -> None:
        """``is_kept``: keep the connection after a refused statement, for the lock it holds."""
        self._engine = engine
        self._settings = settings
        self._outage = outage
        self.name = name
        self._stopping = stopping
        self._isolation_level = isolation_level
        self._resources = ExitStack()
        self._connection: Connection | None = None
        self._wait = FIRST_WAIT
        self._longest_wait = longest_wait
        self._is_kept = is_kept
        self._opened_at = float("inf")
        self._used_at = float("-inf")
        self._refused, self._refused_at = "", float("-inf")
        self.generation = 0
        """Increases with each new connection: observations on an older one no longer count."""

    def run(self, step: Callable[[Connection], T]) -> T | None:
        """Run one step.  If the database fails it, wait, longer each time, and return None.

        A worker goes on after any error of the database: it must still run when an operator has
        repaired the database.
        """
        asked_at = time.monotonic()
        try:
            connection = self._open()
            result = step(connection)
        except BROKEN as error:
            self._broke(error, asked_at)
            return None
        self._wait = FIRST_WAIT
        self._used_at = time.monotonic()
        self._outage.record_answer(asked_at=asked_at, name=self.name)
        return result

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def close_if_idle(self) -> None:
        """Close the connection if it was not used for a while; the next step opens another."""
        if self._connection is not None and time.monotonic() - self._used_at > IDLE_AFTER:
            self.close()

    def cancel(self) -> None:
        """Cancel the running statement, from another thread; its step then fails."""
        connection = self._connection
        if connection is not None:
            with suppress(*BROKEN, psycopg.Error):  # the connection has just been closed
                driver_connection(connection).cancel_safe(timeout=CANCEL_FOR)

    def close(self) -> None:
        self._connection = None
        try:
            self._resources.close()
        except BROKEN:
            logger.debug("%s: the connection was gone already", self.name, exc_info=True)

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = self._resources.enter_context(
                own_connection(
                    self._engine,
                    self._settings,
                    isolation_level=self._isolation_level,
                    purpose=self.name,
                )
            )
            if self._is_kept:
                # A prepared plan that the server refuses would be refused for ever.
                driver_connection(self._connection).prepare_threshold = None
            self._opened_at = time.monotonic()
            self.generation += 1
        return self._connection

    def _broke(self, error: Exception, asked_at: float) -> None:
        """Close the connection after an error, log the error, and wait.

        The settings or plans of a connection may be what the database refuses.  A connection that
        is kept is rolled back instead.
        """
        is_cancelled = isinstance(error, DBAPIError) and isinstance(error.orig, QueryCanceled)
        if is_cancelled and self._stopping.is_set():
            self.close()
            return
        opened_at = self._opened_at if self._connection is not None else asked_at
        if is_away(error):
            self.close()
            self._outage.record_error(error, name=self.name, opened_at=opened_at)
        else:
            row_security = ""
            if self._connection is not None and isinstance(error, DBAPIError):
                row_security = remedy(driver_connection(self._connection).info.user)
            if self._connection is not None and self._is_kept:
                try:
                    self._connection.rollback()
                except BROKEN:
                    self.close()
            else:
                self.close()
            # Once, then every ``REPEAT`` seconds.
            remedies = {
                GRANT_AGAIN: lacks_right(error),
                MORE_CONNECTIONS: is_crowded(error),
                row_security: bool(row_security) and is_filtered(error),
            }
            message = "; ".join([words_of(error), *filter(remedies.get, remedies)])
            is_news = message != self._refused or time.monotonic() - self._refused_at >= REPEAT
            level = logging.ERROR if is_news else logging.DEBUG
            logger.log(level, "%s: the database refuses: %s", self.name, message)
            if is_news:
                self._refused, self._refused_at = message, time.monotonic()
        self._stopping.wait(self._wait * random.uniform(0.5, 1.0))  # noqa: S311  # not a secret
        self._wait = min(2 * self._wait, self._longest_wait)
