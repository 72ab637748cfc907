"""Transactions of a page that somebody looks at: few at once, short, and read-only where possible.

They take no connection from the application's pool, so handlers and requests keep theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore

from sqlalchemy import Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from pgqueue.database.opening import connect_idle, with_own_pool, worker_engine
from pgqueue.database.settings import NOTHING_HIDDEN
from pgqueue.repository.transactions import set_local

MOST_CONNECTIONS = 2
LONGEST_WAIT = 2.0
"""Seconds until a page that gets no connection is refused."""

LIMITS = {
    "statement_timeout": 2000,
    # What a worker or another operator has locked: the page says so at once.
    "lock_timeout": 250,
    "idle_in_transaction_session_timeout": 10000,
    "application_name": "'pgqueue dashboard'",
    "timezone": "'UTC'",
    **NOTHING_HIDDEN,
}
READ_ONLY = {"transaction_read_only": "on", **LIMITS}


class BoundedTransactions:
    """At most two transactions at once, on connections of their own."""

    def __init__(self, engine: Engine) -> None:
        self._own = with_own_pool(worker_engine(engine))
        self._free = BoundedSemaphore(MOST_CONNECTIONS)

    @contextmanager
    def begin(self, *, read_only: bool) -> Iterator[Session]:
        """A Session in a transaction that commits at the end of the block.

        Raises SQLAlchemy's TimeoutError if no connection gets free in time.
        """
        if not self._free.acquire(timeout=LONGEST_WAIT):
            raise PoolTimeout("the two connections of the dashboard are in use; try again")
        try:
            with connect_idle(self._own) as connection:
                connection.execution_options(isolation_level="READ COMMITTED")
                with connection.begin(), Session(connection) as session:
                    settings = READ_ONLY if read_only else LIMITS
                    connection.exec_driver_sql(set_local(settings.items()))
                    yield session
                    session.flush()
        finally:
            self._free.release()
