"""Runs of the jobs of the future: none is left because it became due between two looks."""

from datetime import timedelta

from sqlalchemy import Engine

from chaos.interleavings.logical_workers import (
    TASKS,
    enqueue,
    logical_workers,
    pairs,
    wait_until,
    worker_settings,
)
from pgqueue.repository.claim import Claimed, Upcoming
from pgqueue.repository.due_times import DueTimes
from pgqueue.repository.settle import Attempts
from pgqueue.worker.until_empty import run_ahead


def test_a_job_that_becomes_due_after_the_drain_has_looked_runs(
    engine: Engine, database_url: str
) -> None:
    ran: list[Claimed] = []
    with logical_workers(worker_settings(database_url), 1) as [worker]:
        attempts = Attempts(worker.line, worker.id)

        def upcoming() -> Upcoming:
            if not ran:
                wait_until(lambda: attempts.upcoming(pairs(), tasks=TASKS).is_due)
            return attempts.upcoming(pairs(), tasks=TASKS)

        enqueue(worker.line, delay=timedelta(milliseconds=200))
        run_ahead(DueTimes(worker.line), lambda: ran.extend(worker.claim()), upcoming, ahead=60.0)

    assert len(ran) == 1
