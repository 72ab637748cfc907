"""Looks at what waits for jobs that have just ended, beside the settler.

It has a thread and a connection of its own, so that no settle waits for it.
:mod:`pgqueue.repository.blocked` says why it begins after the commit of a settle.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.database.settings import LOOKING
from pgqueue.repository.batches import Batches
from pgqueue.repository.blocked import BlockedNodes
from pgqueue.worker.loop import NEVER, Loop
from pgqueue.worker.rows import RowGuard
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)


class Looks(Loop):
    """The thread.  It sleeps, and has no connection, until jobs of batches end."""

    def __init__(self, runtime: WorkerRuntime, *, notify: bool) -> None:
        super().__init__(runtime.engine, LOOKING, runtime.outage, name="looks", first_in=NEVER)
        self._looker = Looker(notify=notify)
        self._work_may_be_there = runtime.work_may_be_there
        self._ended: deque[int] = deque()

    def ended(self, node_ids: Iterable[int]) -> None:
        """Look at these nodes, and at what watches them: batches whose jobs have ended, and what a
        sweep has found.  Any thread may call it."""
        self._ended.extend(node_ids)
        self.wake()

    def step(self, connection: Connection) -> float:
        """If the database fails, the sweep finds what is left."""
        node_ids = [self._ended.popleft() for _ in range(len(self._ended))]
        if self._looker.look(connection, node_ids, is_over=self.stopping.is_set):
            self._work_may_be_there()
        return NEVER

    def end(self) -> None:
        """Look at what the last settle has ended."""
        if self._ended:
            self.reconnecting.run(self.step)


class Looker:
    """Looks at batches and jobs.

    A batch that cannot be looked at stays open, and stops no other.
    """

    def __init__(self, *, notify: bool) -> None:
        self._notify = notify
        self._guard = RowGuard()

    def look(
        self,
        connection: Connection,
        node_ids: Iterable[int],
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> int:
        """Look until nothing watches one of these nodes any more; returns how many batches have
        ended or jobs were released.

        ``begin`` begins a transaction; in a test, a savepoint in the transaction of the test.
        """
        begin = begin or connection.begin
        nodes, batches, done = BlockedNodes(connection), Batches(connection), 0
        watched = list(node_ids)
        while watched and not is_over():
            with begin():
                over = nodes.over(watched)
            given, watched = watched, []
            # What something watches now may have ended before that was committed: the second look.
            while over.jobs and not is_over():
                with begin():
                    look = nodes.look(given, notify=self._notify)
                watched += look.watches + look.ended
                done += look.released
                if not look.is_full:
                    break
            for batch_id in over.batch_ids:
                if is_over() or self._guard.rests(batch_id):
                    continue
                with self._guard.row(batch_id, f"batch {batch_id} cannot be ended, and stays open"):
                    with begin():
                        watches, has_ended = batches.look(batch_id)
                    if watches is not None:
                        watched.append(watches)
                    if has_ended:
                        logger.info("batch %d has ended", batch_id)
                        watched.append(-batch_id)
                        done += 1
        return done

    def sweep(
        self,
        connection: Connection,
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> int:
        """Look at all that watches what has ended, whoever has ended it."""
        done, swept_to = 0, None
        while True:
            with (begin or connection.begin)():
                over, swept_to = BlockedNodes(connection).swept(swept_to)
            done += self.look(connection, over, is_over=is_over, begin=begin)
            if swept_to is None or is_over():
                return done
