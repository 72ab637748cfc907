"""Runs the jobs of the future, in the order of their due times: for tests."""

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy.exc import DBAPIError

from pgqueue.job_queue import PgQueue
from pgqueue.repository import Attempts, DueTimes
from pgqueue.statements.tables import array_of
from pgqueue.worker.claiming.cursors import ClaimCursors

MICROSECOND = 1e-6
"""The precision of a due time."""


def drain_ahead(
    queue: PgQueue,
    queues: Sequence[str],
    drain: Callable[[], None],
    *,
    ahead: float,
    deadline: float | None,
) -> None:
    """Call ``drain`` once, or for each step of :func:`run_ahead` until the deadline.

    Commits each step.
    """
    if not ahead:
        drain()
        return
    with queue.autocommitting() as connection:
        attempts, tasks = Attempts(connection, uuid.uuid4()), array_of(sorted(queue.tasks))

        def seconds_to_next() -> float | None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            pairs = ClaimCursors(queues).pairs(from_start=True)
            return attempts.upcoming(pairs, tasks=tasks).seconds

        run_ahead(DueTimes(connection), drain, seconds_to_next, ahead=ahead)


def run_ahead(
    due_times: DueTimes,
    drain: Callable[[], None],
    seconds_to_next: Callable[[], float | None],
    *,
    ahead: float,
) -> None:
    """Run what is due, and what becomes due within ``ahead`` seconds, step by step.

    Each step brings all waiting jobs forward to the next due time.  So a job that enqueues
    itself again after an hour runs as often as the hours that are given.  At the end, jobs that
    still wait are put back by all steps together.
    """
    moved, deadline = 0.0, time.monotonic() + ahead
    try:
        drain()
        while (seconds := seconds_to_next()) is not None:
            if time.monotonic() + moved + seconds > deadline:
                break
            step = max(seconds, 0.0) + MICROSECOND
            due_times.bring_forward(step)
            moved += step
            drain()
    except BaseException:
        with suppress(DBAPIError):  # the transaction may have failed, and is rolled back then
            _put_back(due_times, moved)
        raise
    _put_back(due_times, moved)


def _put_back(due_times: DueTimes, moved: float) -> None:
    if moved:
        due_times.bring_forward(-moved)
