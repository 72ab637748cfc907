"""``ctx.finish()`` in the transaction of a test."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import Connection, NestedTransaction
from sqlalchemy.util import greenlet_spawn

from pgqueue.outcomes import Succeeded
from pgqueue.repository.transactions import CHECK_CONSTRAINTS
from pgqueue.unit_of_work import TransactionEnded, begin_now, release_savepoints, undo_savepoints
from pgqueue.worker.finishing import Finishing


class InlineFinishing(Finishing):
    """Ends a job in a savepoint of the test's transaction."""

    def __init__(self, connection: Connection, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connection = connection
        self._outer: NestedTransaction | None = None

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            yield self._begin_savepoint()
        finally:
            self._undo()

    @asynccontextmanager
    async def _async_transaction(self) -> AsyncIterator[Connection]:
        # The connection may be that of an AsyncConnection, which needs a greenlet.
        try:
            yield await greenlet_spawn(self._begin_savepoint)
        finally:
            await greenlet_spawn(self._undo)

    def _begin_savepoint(self) -> Connection:
        self._outer = self._connection.get_nested_transaction()
        self._connection.begin_nested()
        return self._connection

    def _undo(self) -> None:
        undo_savepoints(self._connection, outer=self._outer)

    def _begin(self, connection: Connection) -> None:
        begin_now(connection)

    def _settle(self, connection: Connection, outcome: Succeeded) -> None:
        if connection.get_nested_transaction() is self._outer:
            raise TransactionEnded("by the handler")
        connection.exec_driver_sql(CHECK_CONSTRAINTS)
        self._complete(connection, outcome)

    def _commit(self, connection: Connection) -> None:
        release_savepoints(connection, outer=self._outer)
