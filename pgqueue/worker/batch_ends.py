"""Ends the batches whose jobs have ended: in every worker, one batch in one transaction.

No code of the application runs here: a batch has the values of its callback.
"""

from threading import Event

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.repository import Batches

logger = redaction.logger(__name__)


def end_batches(connection: Connection, *, notify: bool, stopping: Event) -> int:
    """Look at every batch that may have ended; returns how many have."""
    ended = after = 0
    while not stopping.is_set():
        with connection.begin():
            looked = Batches(connection).end_next(after=after, notify=notify)
        if looked is None:
            break
        after = looked.id
        if looked.has_ended:
            ended += 1
            logger.info("batch %d has ended", looked.id)
    return ended


def end_batches_inline(connection: Connection) -> int:
    """The same in the transaction of a test."""
    ended = after = 0
    while (looked := Batches(connection).end_next(after=after, notify=False)) is not None:
        after = looked.id
        ended += looked.has_ended
    return ended
