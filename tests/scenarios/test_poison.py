"""A job that kills whoever runs it: it ends, and its neighbours do not pay for it twice."""

from datetime import timedelta
from pathlib import Path

import pytest
import worker_tasks
from worker_rig import Rig, promised

pytestmark = pytest.mark.journey


def test_a_job_of_one_attempt_never_dies_of_its_neighbour_before_it_started(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        only_once = worker_tasks.quick.options(max_attempts=1)
        with rig.session() as session:
            worker_tasks.quick.enqueue_many(session, [()] * 200)
            fragile = only_once.enqueue_many(session, [()] * 20)
            poison = worker_tasks.poison.enqueue(session).id
            fragile += only_once.enqueue_many(session, [()] * 20)
            session.commit()

        _run_until_ended(rig, concurrency=1)

        assert rig.outcome(poison) == "failed"
        started = {note["job"] for note in rig.notes("start")}
        # One that had ended may die of it: its success was not yet written down.
        assert {job for job in fragile if rig.outcome(job) != "succeeded"} <= started
        assert rig.check() == []


def _run_until_ended(rig: Rig, **options: int) -> int:
    """Start a worker again whenever it has died, until all jobs have ended; how often it died."""
    worker = rig.start(waits=False, **options)
    deaths = 0

    def is_over() -> bool:
        nonlocal worker, deaths
        if not worker.is_running:
            deaths += 1
            worker = rig.start(waits=False, **options)
        return rig.unfinished() == 0

    rig.until(is_over, seconds=60, what="all jobs end")
    return deaths


@pytest.mark.timed
def test_jobs_that_are_not_claimed_ahead_do_not_wait_for_a_sweep(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            worker_tasks.quick.enqueue_many(session, [()] * 300)
            only_once = worker_tasks.quick.options(max_attempts=1)
            only_once.enqueue_many(session, [()] * 300)
            worker_tasks.quick.enqueue_many(session, [()] * 300)
            session.commit()
        old = "SELECT count(*) FROM pgqueue.message_queue WHERE run_at > clock_timestamp() - :age"
        rig.until(lambda: rig.scalar(old, age=timedelta(seconds=2)) == 0)

        rig.start(concurrency=1)

        rig.until_ended(seconds=promised(12))  # by sweeps alone it takes twenty
        assert rig.outcomes() == {"succeeded": 900}
        assert rig.check() == []
