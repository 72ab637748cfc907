"""Tasks whose jobs Python, SQL and Node enqueue, for workers that are killed."""

import os
import time
from datetime import timedelta

import sqlalchemy as sa

from pgqueue import Limit, PgQueue, Unique

URL = os.environ.get("TASKS_DATABASE")
"""Set in worker processes."""
queue = PgQueue(URL)


@queue.task(name="in_turn", limit=Limit(1, by="key"), max_attempts=1000)
def in_turn(key: int) -> None:
    """Notes if another of its key runs: the server frees the lock of a process that is killed."""
    engine = sa.create_engine(str(URL), poolclass=sa.NullPool)
    with engine.begin() as connection:
        if not connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(77, key))):
            connection.execute(sa.text("INSERT INTO met VALUES (:key)"), {"key": key})
        time.sleep(0.01)


@queue.task(name="once", unique=Unique(period=timedelta(days=3650)), max_attempts=1000)
def once(number: int) -> None: ...
