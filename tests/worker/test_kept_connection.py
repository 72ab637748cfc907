"""A slot keeps its connection from one transactional job to the next, and no longer."""

from collections.abc import Iterator
from threading import Event

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session
from worker_rig import running, wait_until

from pgqueue import Job, JobContext, JobStatus, PgQueue, Retry, Worker
from pgqueue.worker.pool_transaction import KeptConnection


@pytest.fixture
def pooled(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url, pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


def test_it_is_kept_until_it_is_given_back_or_its_time_is_over(
    pooled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptConnection(pooled)
    first = kept.take()
    kept.give_back(first)
    assert kept.take() is first

    kept.give_back(first)
    kept.close()
    assert first.closed
    second = kept.take()
    second.execute(text("SELECT 1"))  # begins a transaction
    kept.give_back(second)
    assert second.closed, "its transaction has not ended"

    monkeypatch.setattr("pgqueue.worker.pool_transaction.KEPT_FOR", 0.0)
    third = kept.take()
    kept.give_back(third)
    assert third.closed


@pytest.mark.parametrize("name", ["checkout", "checkin", "reset", "engine_connect"])
def test_it_is_not_kept_where_the_application_is_told(pooled: Engine, name: str) -> None:
    event.listen(pooled, name, lambda *_: None)
    kept = KeptConnection(pooled)

    first = kept.take()
    kept.give_back(first)

    assert first.closed


def test_a_slot_that_waits_for_a_job_or_runs_another_kind_holds_none(
    pooled: Engine, engine: Engine
) -> None:
    queue, goes, left = PgQueue(pooled), Event(), Event()

    @queue.task(name="write")
    def write(session: Session) -> None:
        session.execute(text("SELECT 1"))

    @queue.task(name="compute")
    def compute(ctx: JobContext) -> None:
        goes.set()
        assert left.wait(30)

    with running(Worker(queue, concurrency=1)):
        with queue.session() as session, session.begin():
            for _ in range(3):
                write.enqueue(session)
            compute.enqueue(session)
        assert goes.wait(30)
        with pooled.connect() as connection:  # the only one of the pool
            assert connection.scalar(text("SELECT 1")) == 1
        left.set()
        write.delay()
        unfinished = text("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")
        with engine.connect() as observer:
            wait_until(lambda: not observer.scalar(unfinished))
        wait_until(lambda: pooled.pool.checkedout() == 0)  # type: ignore[attr-defined]


def test_a_failed_transaction_is_not_passed_to_the_next_job(pooled: Engine) -> None:
    queue, seen = PgQueue(pooled), []

    @queue.task(name="write", max_attempts=1, retry=Retry.never())
    def write(session: Session, number: int) -> None:
        seen.append(session.scalar(text("SHOW work_mem")))
        session.execute(text("SET LOCAL work_mem = '7MB'"))
        if number % 2:
            session.execute(text("SELECT 1 / 0"))

    with queue.session() as session, session.begin():
        write.enqueue_many(session, [(number,) for number in range(6)])
    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    with queue.session() as session:
        statuses = [job.status for job in session.query(Job).order_by(Job.id)]
    assert statuses == [JobStatus.SUCCEEDED, JobStatus.FAILED] * 3
    assert "7MB" not in seen
