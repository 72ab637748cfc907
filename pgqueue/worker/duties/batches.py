"""The end of batches: enqueues the callback of a batch whose last job has ended, and counts the
jobs of those that are open.

Every worker ends batches; there is no leader.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.repository.batches import Batches
from pgqueue.worker.duty_list import Duty
from pgqueue.worker.loop import NEVER
from pgqueue.worker.rows import RowGuard

logger = redaction.logger(__name__)

CANDIDATES = 100
"""Batches that may have ended, in one read."""


class EndBatches(Duty):
    """Ends batches when it is told that one may have ended.  A lock on the row lets one worker end
    a batch."""

    def __init__(self, *, notify: bool, stopping: Event) -> None:
        super().__init__(first_in=NEVER, repeat_after=NEVER)
        self._ends = BatchEnds(notify=notify)
        self._stopping = stopping

    def step(self, connection: Connection) -> float:
        self._ends.end(connection, is_over=self._stopping.is_set)
        return NEVER


class BatchEnds:
    """Call :meth:`end` when a batch may have ended.

    A batch that cannot be ended stays open and stops no other.
    """

    def __init__(self, *, notify: bool) -> None:
        self._notify = notify
        self._guard = RowGuard()

    def end(
        self,
        connection: Connection,
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> int:
        """End all batches whose jobs have ended; returns how many.

        ``begin`` begins a transaction; in a test, a savepoint in the transaction of the test.
        """
        begin = begin or connection.begin
        rows, ended, after = Batches(connection), 0, 0
        while not is_over():
            with begin():
                found = rows.candidates(after=after, limit=CANDIDATES)
            for batch_id, may_have_ended, is_count_due in found:
                if is_over() or self._guard.rests(batch_id):
                    continue
                words = f"batch {batch_id} cannot be ended, and stays open"
                has_ended: bool | None = False
                with self._guard.row(batch_id, words):
                    if may_have_ended:
                        with begin():
                            has_ended = rows.end(batch_id, notify=self._notify)
                    if is_count_due and not has_ended:
                        with begin():
                            last = rows.begin_count(batch_id)
                        if last is not None:
                            with begin():
                                rows.count(batch_id, last)
                if has_ended:
                    ended += 1
                    logger.info("batch %d has ended", batch_id)
            if len(found) < CANDIDATES:
                break
            after = found[-1][0]
        return ended
