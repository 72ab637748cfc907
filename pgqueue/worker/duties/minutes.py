"""Writes the statistics that a worker has counted, every ten seconds."""

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.task_minutes import TaskMinutes
from pgqueue.worker.attempt_counts import AttemptCounts
from pgqueue.worker.outage import words_of
from pgqueue.worker.reconnecting import GRANT_AGAIN, lacks_right
from pgqueue.worker.rows import may_be_of_row

logger = redaction.logger(__name__)

EVERY = 10.0
"""Seconds between two writes: what a worker counts and does not write, because it is killed."""


class MinuteWriter:
    """What cannot be written is kept and written later.  Jobs never wait for it: an error that is
    not one of the connection is logged, and upkeep goes on.
    """

    def __init__(self, counts: AttemptCounts, *, application: str, version: str) -> None:
        self._counts = counts
        self._application = application
        self._version = version
        self._is_noted = not version
        self._refused = ""

    def write(self, connection: Connection) -> None:
        """Write all that was counted, in one transaction.

        If the connection breaks during its COMMIT, the numbers may be written twice.
        """
        counted = self._counts.take()
        if not counted.numbers and not counted.started:
            return
        try:
            with connection.begin():
                TaskMinutes(connection).add(counted.minutes())
                QueueMinutes(connection).add_started(counted.queues())
                groups = ErrorGroups(connection)
                if counted.errors:
                    groups.add(counted.groups(), version=self._version)
                if not self._is_noted:
                    groups.note_deploy(self._application, self._version)
        except BaseException as error:
            self._counts.give_back(counted)
            if not isinstance(error, DBAPIError) or not self._is_refusal(error):
                raise
        else:
            self._is_noted, self._refused = True, ""

    def _is_refusal(self, error: DBAPIError) -> bool:
        """Log an error that is not one of the connection; False for other errors."""
        if not lacks_right(error) and not may_be_of_row(error):
            return False
        remedy = f"; {GRANT_AGAIN}" if lacks_right(error) else ""
        message = f"the statistics cannot be written: {words_of(error)}{remedy}"
        if message != self._refused:
            self._refused = message
            logger.warning("%s", message)
        return True
