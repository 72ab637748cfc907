"""``ctx.finish()`` in a child process: its transaction ends the job, whatever happens next."""

from pathlib import Path
from typing import Any

import cells
import pytest
from worker_rig import Rig, WorkerProgram

pytestmark = pytest.mark.journey


def start(rig: Rig) -> WorkerProgram:
    return rig.start(modules=["cells"], concurrency=2)


def enqueue(rig: Rig, task: Any, *arguments: Any) -> int:
    with rig.session() as session, session.begin():
        job: int = task.enqueue(session, *arguments).id
    return job


@pytest.mark.parametrize("then", ["", "raise", "die"])
def test_the_block_commits_the_end_of_the_job_and_nothing_later_changes_it(
    database_url: str, tmp_path: Path, then: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        job = enqueue(rig, cells.pay_at_end_in_cell, then)

        rig.until_ended()
        assert worker.terminate() == 0

        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert (rig.effects(job), rig.bad_attempts()) == (1, [])
        result = rig.scalar("SELECT result FROM pgqueue.jobs WHERE id = :id", id=job)
        assert result == {"paid": job}
        log = worker.log.read_text()
        assert ("too late to fail" in log) == (then == "raise")
        assert "its result is not kept" not in log
        assert "it is retried" not in log
        assert rig.check() == []


def test_the_end_counts_when_it_is_committed_and_not_when_the_handler_returns(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        start(rig)
        job = enqueue(rig, cells.pay_at_end_in_cell, "wait")

        rig.until_ended()

        assert rig.outcome(job) == "succeeded"
        rig.open("after")  # its handler has waited for this


def test_a_process_that_dies_inside_the_block_leaves_nothing(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        start(rig)
        job = enqueue(rig, cells.pay_at_end_in_cell, "die inside")

        rig.until_ended()

        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 2)
        assert rig.effects(job) == 1
        assert rig.bad_attempts(job) == ["crashed"]
        assert rig.check() == []


@pytest.mark.parametrize("then", ["lose its lease", "be cancelled"])
def test_a_block_that_may_not_end_the_job_is_rolled_back(
    database_url: str, tmp_path: Path, then: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        job = enqueue(rig, cells.pay_at_end_in_cell, then)

        if then == "be cancelled":
            rig.until_ended()
            assert rig.outcome(job) == "cancelled"
        else:
            what = "its result is not kept"
            rig.until(lambda: what in worker.log.read_text(), what=what)

        assert (rig.effects(job), rig.notes("end")) == (0, [])


def test_a_handler_past_its_timeout_after_the_block_has_succeeded(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        job = enqueue(rig, cells.overrun_at_end)

        rig.until_ended()
        next_job = enqueue(rig, cells.echo)
        rig.until_ended(next_job)
        assert worker.terminate() == 0

        assert (rig.outcome(job), rig.bad_attempts(job), rig.effects(job)) == ("succeeded", [], 1)


def test_a_child_that_only_says_that_the_job_has_ended_is_not_believed(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        job = enqueue(rig, cells.only_say_it_has_ended)

        rig.until_ended()

        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["failed"])
        assert "it has succeeded" not in worker.log.read_text()
        assert rig.check() == []
