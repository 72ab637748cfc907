"""A worker ends by itself after so many attempts, or so long without a job."""

from datetime import timedelta
from threading import Event

import pytest
from sqlalchemy import Engine

from pgqueue import Job, JobStatus, PgQueue, Worker

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def left(queue: PgQueue) -> int:
    with queue.session() as session:
        return session.query(Job).filter(Job.status == JobStatus.PENDING).count()


def test_it_ends_after_so_many_attempts(queue: PgQueue) -> None:
    task = queue.task(name="t")(lambda: None)
    task.delay()
    task.options(delay=HOUR).delay()

    Worker(queue, max_jobs=1).run()

    assert left(queue) == 1


def test_a_job_that_runs_at_its_end_ends_too(queue: PgQueue) -> None:
    has_begun, may_end = Event(), Event()

    @queue.task(name="slow")
    def slow() -> None:
        has_begun.set()
        may_end.wait(60)

    @queue.task(name="quick")
    def quick() -> None:
        has_begun.wait(60)

    @queue.on_attempt_end
    def ended(event: object) -> None:
        may_end.set()

    slow.delay()
    quick.delay()

    Worker(queue, concurrency=2, max_jobs=1).run()

    assert left(queue) == 0
    with queue.session() as session:
        assert {job.status for job in session.query(Job)} == {JobStatus.SUCCEEDED}


def test_it_ends_after_so_long_without_a_job(queue: PgQueue) -> None:
    ran: list[int] = []
    task = queue.task(name="t")(lambda: ran.append(1))
    task.delay()

    Worker(queue, max_idle=timedelta(seconds=3)).run()

    assert ran == [1]
