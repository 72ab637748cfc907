"""The failed attempts of a job, as a relationship."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.orm import Session, selectinload

from pgqueue import Job, JobAttempt, PgQueue, Retry, Worker


@pytest.fixture
def job_ids(engine: Engine) -> list[int]:
    queue = PgQueue(engine)

    @queue.task(name="tests.fail", max_attempts=2, retry=Retry.constant(timedelta(0)))
    def fail(name: str) -> None:
        raise ValueError(name)

    jobs = [fail.delay("a").id, fail.delay("b").id]
    assert Worker(queue).run_until_empty(timeout=60)["failed"] == 2
    return jobs


def test_failed_attempts_come_oldest_first(session: Session, job_ids: list[int]) -> None:
    job = session.get_one(Job, job_ids[0])

    assert [(one.attempt, one.error) for one in job.failed_attempts] == [(1, "a"), (2, "a")]


def test_selectinload_reads_those_of_all_jobs_in_one_statement(
    session: Session, engine: Engine, job_ids: list[int]
) -> None:
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))

    jobs = session.scalars(select(Job).options(selectinload(Job.failed_attempts))).all()

    assert [len(job.failed_attempts) for job in jobs] == [2, 2]
    assert sum("job_attempts" in statement for statement in sent) == 1


def test_failed_attempts_may_be_joined_and_change_nothing(
    session: Session, job_ids: list[int]
) -> None:
    failed_as = select(Job.id).join(Job.failed_attempts).where(JobAttempt.error == "b").distinct()
    assert session.scalars(failed_as).all() == [job_ids[1]]

    job = session.get_one(Job, job_ids[0])
    job.failed_attempts.clear()
    session.commit()
    assert len(job.failed_attempts) == 2


def test_a_job_without_failures_has_an_empty_list(session: Session, engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task
    def nothing() -> None: ...

    assert nothing.enqueue(session).failed_attempts == []
