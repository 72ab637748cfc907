"""A worker of so many queues that a claim reads only the pairs that have messages."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from worker_rig import running, wait_until

from pgqueue import Job, JobStatus, PgQueue, Worker

QUEUES = [f"tenant-{number:03}" for number in range(150)]


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="note")(lambda: None)
    return queue


def enqueue(queue: PgQueue, name: str, **options: Any) -> int:
    with queue.session() as session, session.begin():
        return queue.tasks["note"].options(queue=name, **options).enqueue(session).id


def has_run(queue: PgQueue, *job_ids: int) -> bool:
    with queue.session() as session:
        jobs = [session.get_one(Job, job_id) for job_id in job_ids]
        return all(job.status is JobStatus.SUCCEEDED for job in jobs)


def of_unknown_task(queue: PgQueue, names: list[str]) -> None:
    """Due jobs that this worker must not claim."""
    other = PgQueue(queue.engine)
    task = other.task(name="unknown")(lambda: None)
    with other.session() as session, session.begin():
        for name in names:
            task.options(queue=name, priority=0).enqueue(session)


def test_messages_that_nobody_may_claim_hide_none_behind_them(queue: PgQueue) -> None:
    of_unknown_task(queue, QUEUES[:-1])
    job = enqueue(queue, QUEUES[-1], priority=9)

    Worker(queue, QUEUES).run_until_empty(timeout=60)

    assert has_run(queue, job)


def test_paused_queues_hide_none_and_run_when_they_are_resumed(queue: PgQueue) -> None:
    paused = [enqueue(queue, name, priority=0) for name in QUEUES[:-1]]
    with queue.session() as session, session.begin():
        for name in QUEUES[:-1]:
            queue.pause(session, name)

    with running(Worker(queue, QUEUES, poll_interval=timedelta(hours=1))):
        first = enqueue(queue, QUEUES[-1])
        wait_until(lambda: has_run(queue, first))
        second = enqueue(queue, QUEUES[-1])  # the worker sleeps, or is about to
        wait_until(lambda: has_run(queue, second))
        with queue.session() as session, session.begin():
            for name in QUEUES[:-1]:
                queue.resume(session, name)
        wait_until(lambda: has_run(queue, *paused))

    assert has_run(queue, first, second, *paused)


def test_a_delayed_job_of_one_of_them_starts_when_it_is_due(queue: PgQueue) -> None:
    job = enqueue(queue, QUEUES[7], delay=timedelta(seconds=0.3))

    with running(Worker(queue, QUEUES, poll_interval=timedelta(hours=1))):
        wait_until(lambda: has_run(queue, job))

    assert has_run(queue, job)


def test_a_message_that_is_committed_behind_the_cursor_is_found(queue: PgQueue) -> None:
    with running(Worker(queue, QUEUES)), queue.session() as session:
        late = queue.tasks["note"].options(queue=QUEUES[0]).enqueue(session).id
        for table in ("jobs", "message_queue"):
            earlier = f"UPDATE pgqueue.{table} SET run_at = run_at - interval '1 hour'"
            session.execute(text(earlier))
        passed = [enqueue(queue, QUEUES[0]) for _ in range(3)]
        wait_until(lambda: has_run(queue, *passed))
        session.commit()
        wait_until(lambda: has_run(queue, late))

    assert has_run(queue, late)


def test_a_worker_until_empty_runs_what_handlers_enqueue_into_other_queues(
    queue: PgQueue,
) -> None:
    @queue.task(name="spread")
    def spread(number: int) -> None:
        if number:
            with queue.session() as session, session.begin():
                spread.options(queue=QUEUES[number]).enqueue(session, number - 1)

    with queue.session() as session, session.begin():
        spread.options(queue=QUEUES[0]).enqueue(session, 120)

    assert Worker(queue, QUEUES).run_until_empty(timeout=60)["succeeded"] == 121


def test_ten_thousand_queues_with_a_job_each(queue: PgQueue) -> None:
    with queue.session() as session, session.begin():
        session.execute(
            text(
                """
                WITH job AS (
                    INSERT INTO pgqueue.jobs (queue, task)
                    SELECT 'q' || n, 'note' FROM pg_catalog.generate_series(1, 10000) AS n
                    RETURNING id, queue, task, run_at, priority
                )
                INSERT INTO pgqueue.message_queue (target_id, queue, task, run_at, priority)
                SELECT id, queue, task, run_at, priority FROM job
                """
            )
        )

    assert Worker(queue, ["*"]).run_until_empty(timeout=120)["succeeded"] == 10_000
