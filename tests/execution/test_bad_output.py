"""What a handler may do wrong: its own job ends with a reason, its neighbour runs, and the tables
hold one row for each job and nothing else."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from bad_endings import MENDED, RAISED, RETURNED
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobAttempt, PgQueue, Retry, Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def run_beside_a_neighbour(queue: PgQueue, misbehave: Callable[[], Any]) -> Job:
    """Run a job that does wrong and one that does not; returns the first."""

    @queue.task(name="misbehave", retry=Retry.constant(timedelta(0)), max_attempts=2)
    def wrong() -> Any:
        return misbehave()

    @queue.task(name="behave")
    def right(session: Session) -> int:
        return int(session.scalar(text("SELECT 7")) or 0)

    with queue.session() as session:
        jobs = [wrong.enqueue(session).id, right.enqueue(session).id]
        session.commit()
        Worker(queue, concurrency=2).run_until_empty(timeout=60)
        job, neighbour = (session.get_one(Job, id, populate_existing=True) for id in jobs)
        assert (neighbour.outcome, neighbour.result) == ("succeeded", 7)
        assert queue.check(session) == []
        counts = [
            session.scalar(text(f"SELECT count(*) FROM pgqueue.{table}"))
            for table in ("jobs", "message_queue", "leases")
        ]
        assert counts == [2, 0, 0]
        return job


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED.keys())
def test_a_result_that_cannot_be_kept_takes_nothing_from_the_success(
    queue: PgQueue, returned: Callable[[], Any]
) -> None:
    job = run_beside_a_neighbour(queue, returned)

    assert (job.outcome, job.attempts) == ("succeeded", 1)
    assert "unserialisable_result" in job.result


@pytest.mark.parametrize(("returned", "kept"), MENDED.items(), ids=["NUL", "half a surrogate"])
def test_a_character_that_cannot_be_stored_is_replaced_in_a_result(
    queue: PgQueue, returned: str, kept: str
) -> None:
    job = run_beside_a_neighbour(queue, lambda: returned)

    assert (job.outcome, job.result) == ("succeeded", kept)


@pytest.mark.parametrize(("fails", "named"), RAISED.values(), ids=RAISED.keys())
def test_whatever_is_raised_costs_an_attempt_and_is_told(
    queue: PgQueue, fails: Callable[[], Any], named: str
) -> None:
    job = run_beside_a_neighbour(queue, fails)

    assert (job.outcome, job.attempts) == ("failed", 2)
    with queue.session() as session:
        attempts = session.query(JobAttempt).filter_by(job_id=job.id).all()
    assert [attempt.outcome for attempt in attempts] == ["failed", "failed"]
    for attempt in attempts:
        assert named in str(attempt.error_type)
        assert len(attempt.error or "") + len(attempt.traceback or "") < 100_000
