"""The pruner: deletes ended jobs whose time is over, in rounds some minutes apart.

It has a thread and a connection of its own, so that a slow delete holds up no rescue.  The
connection is open during a round only.
"""

import random
import time
from functools import partial
from threading import Event

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.connections.settings import PRUNING
from pgqueue.retention import Retention
from pgqueue.worker.outage import Outage, words_of
from pgqueue.worker.pruning import Progress, PruneRound
from pgqueue.worker.reconnecting import GRANT_AGAIN, ReconnectingConnection, lacks_right
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

FIRST_AFTER = 10.0
"""Seconds from the start of a worker to its first round."""
PAUSE = 300.0
"""Seconds between two rounds."""
REST = 50
"""A round rests so many times as long as it has read without finding a job to delete.  Jobs that
are kept are read again by each round: a worker spends 2 % of its time on them at most."""

MOMENT = 0.2
NO_RIGHT = f"prune: no ended job is deleted, because the worker's role may not: %s; {GRANT_AGAIN}"


class Pruner(WorkerThread):
    """The pruning thread.  Every worker has one; an advisory lock lets one prune at a time."""

    def __init__(
        self,
        engine: Engine,
        retention: Retention,
        outage: Outage,
        *,
        first_after: float = FIRST_AFTER,
        pause: float = PAUSE,
    ) -> None:
        super().__init__(name="pruner")
        self._retention = retention
        self._first_after = first_after
        self._pause = pause
        self._stopping = Event()
        self._was_refused = False
        self._reconnecting = ReconnectingConnection(
            engine,
            PRUNING,
            outage,
            name="prune",
            stopping=self._stopping,
            isolation_level="READ COMMITTED",
        )

    def work(self) -> None:
        wait = self._first_after
        # Workers that were started together do not prune together.
        while not self._stopping.wait(wait * random.uniform(0.5, 1.5)):  # noqa: S311  # no secret
            wait = max(self._pause, REST * self._run_round())
            self._reconnecting.close()

    def stop(self, *, seconds: float) -> None:
        """End, and cancel a statement that takes longer than a moment: it can be repeated."""
        self._stopping.set()
        self.join(min(seconds, MOMENT))
        if self.is_alive():
            self._reconnecting.cancel()
            self.join(seconds)

    def _run_round(self) -> float:
        """Prune all that is due; returns the seconds spent on reading alone.

        Rests after each step for as long as the step took.  Ends early if another worker prunes, or
        if the database fails a step.
        """
        prune_round = PruneRound(self._retention)
        progress: Progress | None = Progress.MORE
        took = 0.0
        while progress is Progress.MORE and not self._stopping.wait(took):
            began = time.monotonic()
            progress = self._reconnecting.attempt(partial(self._step, prune_round))
            took = time.monotonic() - began
        prune_round.tell()
        return prune_round.reading

    def _step(self, prune_round: PruneRound, connection: Connection) -> Progress:
        """One step; a role without the right to delete ends the round, and is told once."""
        try:
            return prune_round.step(connection)
        except DBAPIError as error:
            if not lacks_right(error):
                raise
            if not self._was_refused:
                self._was_refused = True
                logger.warning(NO_RIGHT, words_of(error))
            return Progress.DONE
