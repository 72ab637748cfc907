"""A handler past its timeout loses its job; the worker keeps its slot."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import worker_tasks
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from worker_rig import Rig, endings, wait_until

from pgqueue import Job, JobContext, PgQueue, Retry, Worker

pytestmark = pytest.mark.journey

OVERRUNS = [worker_tasks.overrun, worker_tasks.overrun_and_pay]
ASYNC_OVERRUNS = [worker_tasks.overrun_async, worker_tasks.overrun_and_pay_async]


@pytest.mark.parametrize("task", OVERRUNS)
def test_a_thread_past_its_timeout_is_told_and_its_slot_runs_other_jobs(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        once = task.options(max_attempts=1)
        with rig.session() as session:
            job = once.enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.attempts(job)) == ("failed", 1)
        assert rig.bad_attempts(job) == ["timeout"]
        rig.until(lambda: rig.notes("cancelled", job=job), what="the handler is told")
        with rig.session() as session:
            both_slots = [worker_tasks.wait.enqueue(session, "both").id for _ in range(2)]
            session.commit()
        rig.until_started(*both_slots)
        rig.open("both")
        rig.until_ended(*both_slots)
        rig.open("go")
        rig.until(lambda: rig.notes("end", job=job))
        _still_works(rig)
        assert rig.outcome(job) == "failed"
        assert rig.bad_attempts() == ["timeout"]
        assert rig.effects(job) == 0
        assert worker.terminate() == 0
        assert rig.check() == []


def test_a_worker_does_not_end_if_its_overdue_handlers_obey(engine: Engine) -> None:
    """All slots are overdue at the same moment, and each handler ends soon after it is told."""
    queue, together = PgQueue(engine), Barrier(2)

    @queue.task(name="obey", timeout=timedelta(seconds=0.2), retry=Retry.never())
    def obey(ctx: JobContext) -> None:
        together.wait(60)
        wait_until(ctx.is_cancelled, what="it is told")
        together.wait(60)

    obey.delay()
    obey.delay()

    assert endings(Worker(queue, concurrency=2)) == {"failed": 2}


@pytest.mark.parametrize("task", [*OVERRUNS, *ASYNC_OVERRUNS])
def test_a_job_that_timed_out_is_tried_again(database_url: str, tmp_path: Path, task: Any) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=4)
        arguments = ("go",) if task in OVERRUNS else ()
        rig.open("go")  # a thread ends soon after it is told

        with rig.session() as session:
            job = task.enqueue(session, *arguments).id
            session.commit()

        rig.until_ended(job)
        assert (rig.outcome(job), rig.attempts(job)) == ("failed", 2)
        assert set(rig.bad_attempts(job)) == {"timeout"}
        [[error]] = rig.rows("SELECT last_error FROM pgqueue.jobs WHERE id = :job", job=job)
        assert "the handler ran longer than 0:00:00.3" in error
        assert len(rig.notes("start", job=job)) == 2
        _still_works(rig)
        assert rig.effects(job) == 0
        assert worker.terminate() == 0
        assert rig.check() == []


def test_an_async_handler_that_blocks_its_loop_past_its_timeout_loses_its_job(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start()
        with rig.session() as session:
            job = worker_tasks.block_past_timeout.enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
        rig.open("go")
        rig.until(lambda: rig.notes("end", job=job))
        _still_works(rig)
        assert rig.outcome(job) == "failed"
        assert rig.check() == []


def test_an_overdue_job_needs_no_connection_of_the_application_to_end(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(engine={"pool_size": 1, "max_overflow": 0})
        with rig.session() as session:
            hog = worker_tasks.hog_the_pool.enqueue(session, "hog").id
            session.commit()
        rig.until_started(hog)
        with rig.session() as session:
            job = worker_tasks.overrun.options(max_attempts=1).enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
        rig.open("hog")
        rig.open("go")
        rig.until_ended()
        assert rig.check() == []


def test_a_worker_whose_threads_are_all_stuck_ends_with_an_error(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            stuck = [
                worker_tasks.overrun.options(max_attempts=1).enqueue(session, "never").id
                for _ in range(2)
            ]
            session.commit()

        code = worker.exit_code()

        assert code == 1
        assert "TooManyStuck" in worker.log.read_text()
        rig.start()
        rig.until_ended(*stuck)
        assert [rig.bad_attempts(job) for job in stuck] == [["timeout"]] * 2
        _still_works(rig)
        assert rig.check() == []


def test_a_worker_that_ends_over_stuck_threads_lets_the_others_finish(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2, grace=60)
        jobs = []
        for task in (worker_tasks.overrun, worker_tasks.wait, worker_tasks.overrun):
            with rig.session() as session:
                jobs.append(task.options(max_attempts=1).enqueue(session, "go").id)
                session.commit()
            rig.until_started(jobs[-1])
        stuck_first, running, stuck_last = jobs
        rig.until(lambda: "stopping" in worker.log.read_text())

        rig.open("go")

        assert worker.exit_code() == 1
        assert "TooManyStuck" in worker.log.read_text()
        assert (rig.outcome(running), rig.attempts(running)) == ("succeeded", 1)
        assert rig.bad_attempts(stuck_first) == ["timeout"]
        assert rig.bad_attempts(stuck_last) == ["timeout"]
        assert rig.check() == []


def _still_works(rig: Rig) -> None:
    with rig.session() as session:
        jobs = [worker_tasks.pay.enqueue(session).id, worker_tasks.pay_async.enqueue(session).id]
        session.commit()
    rig.until_ended(*jobs)
    assert [rig.effects(job) for job in jobs] == [1, 1]


def overrun(ctx: JobContext) -> None:
    wait_until(ctx.is_cancelled, what="the handler is told")


def overrun_in_transaction(session: Session, ctx: JobContext) -> None:
    overrun(ctx)


async def overrun_async() -> None:
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("handler", "executor"),
    [
        (overrun, "thread"),
        (overrun_in_transaction, "thread"),
        (overrun_async, "thread"),
        (overrun, "process"),
    ],
)
def test_one_job_has_its_own_timeout_also_when_it_is_retried_and_requeued(
    engine: Engine, handler: Any, executor: Any
) -> None:
    queue = PgQueue(engine)
    at_once = Retry.constant(timedelta(0))
    task = queue.task(max_attempts=2, retry=at_once, executor=executor)(handler)
    job = task.options(timeout=timedelta(seconds=0.3), meta={"by": "Ada"}).delay()

    for _ in range(2):
        assert endings(Worker(queue)) == {"retried": 1, "failed": 1}
        with queue.session() as session, session.begin():
            found = session.get_one(Job, job.id)
            assert found.last_error == "the handler ran longer than 0:00:00.300000"
            assert {str(one.outcome) for one in found.failed_attempts} == {"timeout"}
            queue.requeue(session, job.id)


def test_one_job_may_run_longer_than_its_task_says(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(executor="process", timeout=timedelta(seconds=0.1), max_attempts=1)
    def outlast() -> None:
        time.sleep(0.3)

    for longer in (timedelta(minutes=5), None):
        outlast.options(timeout=longer).delay()

    assert endings(Worker(queue)) == {"succeeded": 2}
