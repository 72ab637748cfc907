"""The state of a job, as a page reads it that asks often."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import LogicalWorker, enqueue, enqueue_many
from pgqueue import JobNotFound, JobState, JobStatus, PgQueue
from pgqueue.outcomes import Succeeded

queue = PgQueue()


def state(engine: Engine, job_id: int) -> JobState:
    with Session(engine) as session:
        return queue.job_state(session, job_id)


def test_it_follows_the_job_by_one_statement(engine: Engine, worker: LogicalWorker) -> None:
    urgent, later = enqueue(engine, priority=0), enqueue(engine, delay=timedelta(hours=1))
    others = enqueue_many(engine, 5)
    assert [state(engine, each).position for each in (urgent, *others)] == [0, 1, 2, 3, 4, 5]
    assert (state(engine, later).status, state(engine, later).position) == ("pending", None)

    [claimed] = worker.claim()
    running = state(engine, urgent)
    assert (running.status, running.attempt, running.position) == ("running", 1, None)
    assert state(engine, others[0]).position == 0

    statements: list[str] = []
    assert worker.settle(claimed, Succeeded({"done": True}))
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    ended = state(engine, urgent)
    assert (ended.status, ended.result, ended.has_ended) == (
        JobStatus.SUCCEEDED,
        {"done": True},
        True,
    )
    assert len(statements) == 1


def test_a_job_that_does_not_exist_is_not_found(engine: Engine) -> None:
    with pytest.raises(JobNotFound, match="job 7 does not exist"):
        state(engine, 7)
