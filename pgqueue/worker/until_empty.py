"""``run_until_empty`` as tests use it: the jobs of the future run, and errors are raised."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from sqlalchemy.exc import DBAPIError

from pgqueue.context import Around, JobContext
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import Cancel, Discard, Snooze, Suspended
from pgqueue.repository.claim import NOTHING, Upcoming
from pgqueue.repository.due_times import DueTimes
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.rules.served_queues import served_queues
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

        def upcoming() -> Upcoming:
            if deadline is not None and time.monotonic() >= deadline:
                return NOTHING
            names = served_queues(queues, attempts.queues_with_messages)
            pairs = ClaimCursors(names).pairs(from_start=True)
            return attempts.upcoming(pairs, tasks=tasks)

        run_ahead(DueTimes(connection), drain, upcoming, ahead=ahead)


def run_ahead(
    due_times: DueTimes,
    drain: Callable[[], None],
    upcoming: Callable[[], Upcoming],
    *,
    ahead: float,
) -> None:
    """Run what is due, and what becomes due within ``ahead`` seconds, step by step.

    Each step brings all waiting jobs forward to the next due time.  So a job that enqueues
    itself again after an hour runs as often as the hours that are given.  At the end, jobs that
    still wait are put back by all steps together.
    """
    moved, deadline = 0.0, time.monotonic() + ahead
    is_drained_again = False
    try:
        drain()
        while True:
            claim, admission = upcoming(), due_times.next_admission()
            known = [one.seconds for one in (claim, admission) if one.seconds is not None]
            seconds = min(known, default=None)
            # A job may have become due since the drain has looked.  What is due after another
            # drain is kept by a limit or by another transaction.
            if (claim.is_due or admission.is_due) and not is_drained_again:
                is_drained_again = True
                drain()
                continue
            if seconds is None or time.monotonic() + moved + seconds > deadline:
                break
            is_drained_again = False
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


class HandlerErrors:
    """Keeps what each handler has raised; a sleep, a Cancel, Discard or Snooze is no error."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], BaseException] = {}

    def around(self, inner: Around) -> Around:
        """Return what to enter around each handler, with ``inner`` inside of it."""

        @contextmanager
        def keeping(context: JobContext) -> Iterator[None]:
            attempt = (context.job_id, context.attempt)
            self._kept.pop(attempt, None)  # its transaction is replayed
            try:
                with inner(context):
                    yield
            except (Suspended, Cancel, Discard, Snooze):
                raise
            except BaseException as error:
                self._kept[attempt] = error
                raise

        return keeping

    def take_first(self) -> BaseException | None:
        """Return the first error, and forget all."""
        first = next(iter(self._kept.values()), None)
        self._kept.clear()
        return first
