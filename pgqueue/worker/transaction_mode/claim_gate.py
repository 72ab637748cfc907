"""The claim gate of transaction mode: each slot claims for itself, one at a time."""

from threading import Event, Lock

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from pgqueue.connections.keepalive import has_ended
from pgqueue.connections.opening import driver_connection
from pgqueue.connections.settings import STAMPING
from pgqueue.repository import Attempts, Claimed, Locked
from pgqueue.worker.poller import Poller
from pgqueue.worker.reconnecting import REST_AFTER, ReconnectingConnection, is_lock_timeout
from pgqueue.worker.runtime import WorkerRuntime


class ClaimGate:
    """Lets one slot at a time claim, or sleep for all slots; and one at a time stamp.

    The sleeping slot keeps its turn, so that the others need no connection meanwhile.
    """

    def __init__(self, runtime: WorkerRuntime, *, poll_interval: float, until_empty: bool) -> None:
        self.runtime = runtime
        self.poller = Poller(runtime, poll_interval=poll_interval)
        self.until_empty = until_empty
        self.claiming = Lock()
        self.finished = Event()
        self._stamping = Lock()
        self._stamp_connection = ReconnectingConnection(
            runtime.engine, STAMPING, runtime.outage, name="stamps", stopping=runtime.stopping
        )

    def wait_for_turn(self) -> bool:
        """Wait until this slot may claim; False if another slot keeps its turn for long."""
        return self.claiming.acquire(timeout=REST_AFTER)

    @property
    def is_open(self) -> bool:
        return not self.runtime.stopping.is_set() and not self.finished.is_set()

    def close(self) -> None:
        self._stamp_connection.close()

    def rest(self) -> None:
        """Close the connection of the stamps if it is idle; called when nothing was claimed."""
        with self._stamping:
            self._stamp_connection.rest()

    def stamp(self, locked: Locked, holder: Connection) -> Claimed | None:
        """Commit the start of an attempt; None if another worker was first or this failed."""

        def stamp(connection: Connection) -> Claimed | None:
            try:
                return Attempts(connection, self.runtime.identity.worker_id).stamp(locked)
            except OperationalError as error:
                if not is_lock_timeout(error):
                    raise
                connection.rollback()
                return None

        with self._stamping:
            if has_ended(driver_connection(holder)):
                return None  # its message is free again: the stamp would count as a crash
            return self._stamp_connection.attempt(stamp)
