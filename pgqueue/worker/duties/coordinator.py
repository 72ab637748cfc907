"""Wake-ups on a node of Citus: who enqueues by key through the coordinator notifies there."""

from collections.abc import Callable

from sqlalchemy import Connection, Engine

from pgqueue.database.notifications import Listener
from pgqueue.database.settings import CLAIMING
from pgqueue.repository.transactions import NOTHING
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import Outage

LOOK_EVERY = 5.0
"""Seconds after which the connection is tested, if nothing is enqueued."""
PAUSE = 0.02
"""Seconds after a wake-up in which no enqueuer notifies: with NOTIFY, commits wait in turn."""


class CoordinatorListener(Loop):
    """The thread that listens on the coordinator.  While that is down, the worker polls."""

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        """``wake`` is called when a job may have been enqueued."""
        super().__init__(
            engine, CLAIMING, Outage(), name="coordinator", isolation_level="AUTOCOMMIT"
        )
        self._wake = wake
        self._listener = Listener(enabled=True)
        self._generation = 0

    def step(self, connection: Connection) -> float:
        if self._generation != self.reconnecting.generation:
            self._generation = self.reconnecting.generation
            self._listener.share(connection)
        connection.exec_driver_sql(NOTHING)  # the listener closes a connection that is lost
        if self._listener.arm():
            self._wake()  # enqueuers have not notified since the last step
        if not self._listener.wait(LOOK_EVERY):
            return 0.0
        self._listener.disarm()
        self._wake()
        return PAUSE

    def stop(self, *, seconds: float) -> None:
        self.stopping.set()
        self._listener.poke()
        super().stop(seconds=seconds)
        self._listener.close()
