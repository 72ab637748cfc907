"""Upkeep: every worker looks after the others, on a connection of its own."""

import time
from threading import Event

from sqlalchemy import Connection, Engine

from pgqueue.maintenance import LOOK_EVERY, Witness, drop_left_stamps, forget_dead, rescue_dead
from pgqueue.unit_of_work import UPKEEP
from pgqueue.worker.line import Line
from pgqueue.worker.loops import Loop
from pgqueue.worker.outage import Outage

FORGET_EVERY = 3600.0
LAST_LOOK = 5.0
"""Seconds a worker that ends waits for a server that does not answer."""


class Upkeep(Loop):
    """Rescues what dead workers held.  A new connection begins to witness anew."""

    def __init__(self, engine: Engine, outage: Outage) -> None:
        super().__init__(name="upkeep")
        self._stopping = Event()
        self._line = Line(
            engine,
            UPKEEP,
            outage,
            name="upkeep",
            stopping=self._stopping,
            isolation_level="READ COMMITTED",
        )
        self._generation = 0
        self._witness = Witness()
        self._forgot_at = time.monotonic()

    def work(self) -> None:
        while not self._stopping.wait(LOOK_EVERY.total_seconds()):
            self._line.attempt(self._look)
        # For the last time: a worker that ends may be the last of all, and leave one itself.
        self._line.attempt(drop_left_stamps)
        self._line.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join(LAST_LOOK)

    def _look(self, connection: Connection) -> None:
        if self._generation != self._line.generation:
            self._generation = self._line.generation
            self._witness = Witness()
        rescue_dead(connection, self._witness)
        if time.monotonic() - self._forgot_at > FORGET_EVERY:
            self._forgot_at = time.monotonic()
            forget_dead(connection)
