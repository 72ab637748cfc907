"""Cancel: a running handler hears of it within a second, and its job ends as cancelled."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from worker_rig import Rig, promised

from pgqueue import Change

pytestmark = pytest.mark.journey

HEEDERS = [worker_tasks.heed, worker_tasks.heed_and_pay, worker_tasks.heed_async]
DEAF = [worker_tasks.wait, worker_tasks.wait_and_pay, worker_tasks.wait_async]


@pytest.mark.timed
@pytest.mark.parametrize("task", HEEDERS)
def test_a_running_handler_hears_of_its_cancel_within_a_second(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start()
        with rig.session() as session:
            job = task.enqueue(session).id
            session.commit()
        rig.until_started(job)

        with rig.session() as session:
            change = rig.queue.cancel(session, job)
            session.commit()
        began = time.monotonic()
        rig.until(lambda: rig.notes("cancelled", job=job))
        took = rig.notes("cancelled", job=job)[0]["at"] - began

        print(f"heard after {took:.2f} s")
        assert took < promised(1.2)
        assert change is Change.CANCEL_REQUESTED
        rig.until_ended(job)
        assert rig.outcome(job) == "cancelled"
        assert rig.effects() == 0
        assert rig.check() == []


@pytest.mark.parametrize("task", DEAF)
def test_a_cancelled_job_ends_as_cancelled_however_its_handler_ends(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start()
        with rig.session() as session:
            job = task.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        with rig.session() as session:
            rig.queue.cancel(session, job)
            session.commit()

        rig.open("go")

        rig.until_ended(job)
        assert rig.outcome(job) == "cancelled"
        assert rig.effects() == 0
        assert rig.scalar("SELECT count(*) FROM pgqueue.dead_letters WHERE job_id = :id", id=job)
        assert worker.terminate() == 0
        assert rig.check() == []


def test_a_cancelled_and_requeued_job_is_not_ended_by_its_old_run(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start()
        with rig.session() as session:
            job = worker_tasks.wait.options(delay=None).enqueue(session, "go").id
            waiting = [worker_tasks.wait.enqueue(session, "go").id for _ in range(6)]
            session.commit()
        rig.until_started(job)
        with rig.session() as session:
            changes = [rig.queue.cancel(session, each) for each in [job, *waiting]]
            session.commit()

        rig.open("go")

        rig.until_ended()
        assert rig.outcomes() == {"cancelled": 7}
        assert set(changes) == {Change.CANCEL_REQUESTED, Change.CANCELLED}
        for each in [job, *waiting]:
            rig.until(partial(is_requeued, rig, each))
        rig.until_ended()
        assert rig.outcomes() == {"succeeded": 7}
        assert rig.check() == []


def is_requeued(rig: Rig, job_id: int) -> bool:
    """Requeue a job; not yet, if a worker that claims it has not noticed the cancel."""
    with rig.session() as session:
        change = rig.queue.requeue(session, job_id)
        session.commit()
    return change == Change.REQUEUED


def test_a_handler_may_cancel_its_own_job_in_its_own_transaction(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start()
        with rig.session() as session:
            job = worker_tasks.cancel_from_within.enqueue(session).id
            session.commit()

        rig.until_ended(job)

        assert rig.outcome(job) == "cancelled"
        assert [note["change"] for note in rig.notes("change")] == [Change.CANCEL_REQUESTED]
        assert rig.effects() == 0
        assert rig.check() == []
