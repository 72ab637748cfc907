"""SIGTERM: what runs may end, what has not started goes back, and nothing is forgotten."""

from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from worker_rig import Rig

pytestmark = pytest.mark.journey


def test_an_interrupted_handler_that_blocks_the_event_loop_does_not_hold_the_process(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=0.3)
        with rig.session() as session:
            before = worker_tasks.pay_async.enqueue(session).id
            session.commit()
        rig.until_ended(before)
        with rig.session() as session:
            job = worker_tasks.block_the_loop.enqueue(session, "never").id
            session.commit()
        rig.until_started(job)

        code = worker.terminate()

        assert code == 0
        assert rig.bad_attempts(job) == ["interrupted"]
        assert rig.check() == []


def test_the_last_interruption_fails_the_job_and_says_so(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            job = worker_tasks.wait_twice.enqueue(session, "never").id
            session.commit()
        for stops in (1, 2):
            assert rig.outcome(job) is None
            worker = rig.start(grace=0)
            rig.until(lambda stops=stops: len(rig.notes("start", job=job)) == stops)  # type: ignore[misc]

            assert worker.terminate() == 0

        assert rig.bad_attempts(job) == ["interrupted"] * 2
        assert (rig.outcome(job), rig.attempts(job)) == ("failed", 0)
        assert "max_interruptions = 2" in rig.scalar("SELECT last_error FROM pgqueue.jobs")
        assert rig.check() == []


@pytest.mark.parametrize(
    "task", [worker_tasks.heed_stop, worker_tasks.heed_stop_and_pay, worker_tasks.heed_stop_async]
)
def test_a_handler_that_hears_of_the_stop_hands_its_job_on(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=600)
        with rig.session() as session:
            job = task.enqueue(session).id
            session.commit()
        rig.until_started(job)
        assert rig.notes("stopping") == []

        code = worker.terminate()

        assert code == 0
        assert [note["cancelled"] for note in rig.notes("stopping", job=job)] == [False]
        assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
        assert rig.bad_attempts(job) == []
        assert rig.effects() == (1 if task is worker_tasks.heed_stop_and_pay else 0)
        assert rig.check() == []
