"""Finds out what has become of a COMMIT whose answer was lost."""

import time
from threading import Event

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.opening import ConnectFailed, own_connection
from pgqueue.database.settings import OWN
from pgqueue.repository.fate import Fate, Fates

logger = redaction.logger(__name__)

LOOK_FIRST_AFTER = 0.1
LOOK_EVERY = 1.0
LOOK_FOR = 60.0


def fate_of(engine: Engine, transaction: str, job_id: int, *, stopping: Event) -> Fate:
    """Return the fate of the transaction that has settled an attempt; UNKNOWN if that stays open.

    The transaction may still commit, and locks the lease, until its server process has ended.
    """
    logger.info("job %s: asking whether it was committed", job_id)
    deadline = time.monotonic() + LOOK_FOR
    wait = LOOK_FIRST_AFTER
    while time.monotonic() < deadline:
        fate = _ask(engine, transaction, job_id)
        if fate is not Fate.IN_PROGRESS:
            return fate
        stopping.wait(wait) if not stopping.is_set() else time.sleep(wait)
        wait = min(2 * wait, LOOK_EVERY)  # each look is a connection
    return Fate.UNKNOWN


def _ask(engine: Engine, transaction: str, job_id: int) -> Fate:
    """Ask once; IN_PROGRESS if the database does not answer, or is in recovery."""
    try:
        with own_connection(engine, OWN) as connection:
            return Fates(connection).of(transaction)
    except (DBAPIError, ConnectFailed) as error:
        logger.debug("job %s: not known yet: %s", job_id, error)
        return Fate.IN_PROGRESS
