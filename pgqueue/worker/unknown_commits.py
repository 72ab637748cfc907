"""Finds out what has become of a COMMIT whose answer was lost."""

import time
from threading import Event
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import OWN
from pgqueue.repository.claim import Claimed
from pgqueue.repository.workers import Workers

logger = redaction.logger(__name__)

LOOK_FIRST_AFTER = 0.1
LOOK_EVERY = 1.0
LOOK_FOR = 60.0


def was_committed(engine: Engine, worker_id: UUID, claimed: Claimed, *, stopping: Event) -> bool:
    """Whether the transaction of an attempt has settled it; False also if that stays unknown.

    The transaction may still commit, and locks the lease, until its server process has ended.
    """
    logger.info("job %s: asking whether it was committed", claimed.job_id)
    deadline = time.monotonic() + LOOK_FOR
    wait = LOOK_FIRST_AFTER
    while time.monotonic() < deadline:
        settled = is_settled(engine, worker_id, claimed)
        if settled is not None:
            return settled
        stopping.wait(wait) if not stopping.is_set() else time.sleep(wait)
        wait = min(2 * wait, LOOK_EVERY)  # each look is a connection
    return False


def is_settled(engine: Engine, worker_id: UUID, claimed: Claimed) -> bool | None:
    """Ask once whether an attempt was settled; None if that is not known yet."""
    try:
        with own_connection(engine, OWN) as connection:
            return Workers(connection).has_settled(worker_id, claimed)
    except DBAPIError as error:
        logger.debug("job %s: not known yet: %s", claimed.job_id, error)
        return None
