"""SIGTERM: what runs may end, what has not started goes back, and nothing is forgotten."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from worker_rig import Rig, promised

pytestmark = pytest.mark.journey

OTHERS = (worker_tasks.wait, worker_tasks.wait_and_pay, worker_tasks.wait_async)


def test_a_stopped_worker_loses_nothing_and_burns_no_attempt(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            ids = worker_tasks.brief.enqueue_many(session, [(1,)] * 1500)
            session.commit()
        rig.until(lambda: rig.unfinished() < 1450)

        code = worker.terminate()

        started = {note["job"] for note in rig.notes("start")}
        assert code == 0
        assert 0 < rig.unfinished() < 1500
        assert rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0
        assert rig.scalar("SELECT count(*) FROM pgqueue.workers") == 0
        assert rig.scalar("SELECT sum(attempt) FROM pgqueue.message_queue") == 0
        assert rig.scalar("SELECT count(*) FROM pgqueue.jobs WHERE attempts = 1") == len(started)
        assert rig.unfinished() == len(ids) - len(started)
        assert rig.bad_attempts() == []
        assert rig.check() == []


@pytest.mark.parametrize(
    ("task", "number"),
    [*((task, signal.SIGTERM) for task in OTHERS), (worker_tasks.wait, signal.SIGINT)],
)
def test_a_running_handler_ends_within_the_grace(
    database_url: str, tmp_path: Path, task: Any, number: signal.Signals
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=60, concurrency=1)
        with rig.session() as session:
            job = task.enqueue(session, "go").id
            waiting = task.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)

        worker.send(number)
        rig.until(lambda: "stopping" in worker.log.read_text())
        rig.open("go")
        code = worker.exit_code()

        assert code == 0
        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert (rig.outcome(waiting), rig.attempts(waiting)) == (None, 0)
        assert rig.notes("start", job=waiting) == []
        assert rig.check() == []


@pytest.mark.timed
@pytest.mark.parametrize("task", OTHERS)
def test_a_handler_longer_than_the_grace_is_interrupted_and_uses_up_no_attempt(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=0.3)
        with rig.session() as session:
            job = task.options(max_attempts=1).enqueue(session, "go").id
            session.commit()
        rig.until_started(job)

        began = time.monotonic()
        code = worker.terminate()
        took = time.monotonic() - began

        assert code == 0
        assert took < promised(3)
        assert rig.bad_attempts(job) == ["interrupted"]
        assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
        assert rig.scalar("SELECT interruptions FROM pgqueue.jobs") == 1
        assert rig.effects() == 0
        assert rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0
        assert rig.check() == []
        rig.open("go")
        rig.start()
        rig.until_ended(job)
        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert rig.effects() == (1 if task is worker_tasks.wait_and_pay else 0)
        assert rig.check() == []


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


@pytest.mark.parametrize("task", [worker_tasks.wait_for_pool, worker_tasks.wait_for_thread])
def test_an_interrupted_attempt_is_recorded_before_python_waits_for_threads_of_executors(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=0.3)
        with rig.session() as session:
            job = task.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)

        worker.send(signal.SIGTERM)
        rig.until(lambda: rig.bad_attempts(job) == ["interrupted"])

        assert worker.is_running
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.workers") == 0)
        assert rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0
        rig.open("go")
        assert worker.exit_code() == 0
        assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
        assert rig.check() == []


def test_a_second_signal_ends_the_grace(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=600)
        with rig.session() as session:
            job = worker_tasks.wait_and_pay.enqueue(session, "never").id
            session.commit()
        rig.until_started(job)
        worker.send(signal.SIGTERM)
        rig.until(lambda: "stopping" in worker.log.read_text())
        assert worker.is_running

        code = worker.terminate()

        assert code == 0
        assert rig.bad_attempts(job) == ["interrupted"]
        assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
        assert rig.effects() == 0
        assert rig.check() == []
        assert f"job {job} {worker_tasks.wait_and_pay.name}: its handler still runs" in (
            worker.log.read_text()
        )


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
