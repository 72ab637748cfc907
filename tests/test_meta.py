"""Meta and tags: every way to enqueue writes them, and only where they are given."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobContext, OptionError, PgQueue, Task, Worker

META = {"tenant": "acme", "depth": {"a": [1, 2.5, None, "\u20ac"]}}
TAGS = ["mail", 'it\'s "quoted", {and} more']


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def by_enqueue(queue: PgQueue, task: Task[[int], Any]) -> Job:
    with queue.session() as session, session.begin():
        job = task.enqueue(session, 1)
        session.expunge(job)
        return job


def by_add(queue: PgQueue, task: Task[[int], Any]) -> Job:
    with queue.session() as session, session.begin():
        job = task.job(1)
        session.add(job)
        session.flush()
        session.refresh(job)
        session.expunge(job)
        return job


def by_delay(queue: PgQueue, task: Task[[int], Any]) -> Job:
    return task.delay(1)


def by_many(queue: PgQueue, task: Task[[int], Any]) -> Job:
    with queue.session() as session, session.begin():
        ids = task.enqueue_many(session, [(1,), (2,)])
        job = session.get_one(Job, ids[1])
        session.expunge(job)
        return job


def by_async(queue: PgQueue, task: Task[[int], Any]) -> Job:
    async def enqueue() -> Job:
        async with queue.async_session() as session, session.begin():
            job = await task.enqueue_async(session, 1)
            session.expunge(job)
            return job

    return asyncio.run(enqueue())


WAYS = [by_enqueue, by_add, by_delay, by_many, by_async]


@pytest.mark.parametrize("unique_key", [None, lambda number: f"k{number}"])
@pytest.mark.parametrize("enqueue", WAYS)
def test_they_are_written_and_are_those_of_the_job_object(
    queue: PgQueue, enqueue: Callable[..., Job], unique_key: Any
) -> None:
    @queue.task(name="count", unique_key=unique_key)
    def count(number: int) -> None: ...

    plain = enqueue(queue, count.options(priority=1, unique_key=None))
    job = enqueue(queue, count.options(meta=META, tags=TAGS))

    with queue.session() as session:
        stored = {
            row.id: (row.meta, row.tags)
            for row in session.execute(select(Job.id, Job.meta, Job.tags))
        }
    assert stored[job.id] == (job.meta, job.tags) == (META, TAGS)
    assert stored[plain.id] == (plain.meta, plain.tags) == (None, None)


def test_what_an_application_adds_at_each_enqueue_is_written_too(queue: PgQueue) -> None:
    @queue.on_enqueue
    def add_tenant(task: Task[..., Any]) -> dict[str, Any]:
        return {"tenant": "acme", "task": task.name}

    @queue.on_enqueue
    def add_nothing(task: Task[..., Any]) -> None: ...

    @queue.task(name="count")
    def count(number: int) -> None: ...

    jobs = [enqueue(queue, count.options(meta={"tenant": "own"})) for enqueue in WAYS]
    count.delay(1)

    with queue.session() as session:
        found = session.scalars(select(Job.meta).order_by(Job.id)).all()
    assert found[-1] == {"tenant": "acme", "task": "count"}
    assert found[:-1] == [{"tenant": "own", "task": "count"}] * (len(jobs) + 1)


def test_what_an_application_adds_is_checked(queue: PgQueue) -> None:
    queue.on_enqueue(lambda task: {"at": object()})
    count = queue.task(name="count")(lambda: None)

    with pytest.raises(OptionError, match=r"task count: on_enqueue: meta\.at must be plain JSON"):
        count.delay()


def test_a_handler_reads_them_whatever_another_has_written_there(
    queue: PgQueue, engine: Engine
) -> None:
    seen: list[Any] = []

    @queue.task(name="look")
    def look(ctx: JobContext) -> None:
        seen.append(dict(ctx.meta))

    look.options(meta=META).delay()
    look.delay()
    damaged = [look.delay().id for _ in range(2)]
    deep = "[" * 5000 + "]" * 5000
    with Session(engine) as session, session.begin():
        for job_id, meta in zip(damaged, ['[1, "pgqueue.x"]', deep], strict=True):
            session.execute(
                text("UPDATE pgqueue.jobs SET meta = CAST(:meta AS jsonb) WHERE id = :id"),
                {"meta": meta, "id": job_id},
            )

    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert seen == [META, {}, {}, {}]


@pytest.mark.parametrize("depth", [900, 930, 960])
def test_meta_that_is_too_deep_to_be_logged_costs_no_worker(
    queue: PgQueue, engine: Engine, depth: int
) -> None:
    @queue.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("no")

    job_id = fail.delay().id
    meta = '{"a":' * depth + "1" + "}" * depth
    with Session(engine) as session, session.begin():
        session.execute(text("UPDATE pgqueue.jobs SET meta = CAST(:meta AS jsonb)"), {"meta": meta})

    assert Worker(queue).run_until_empty(timeout=60)["failed"] == 1

    with Session(engine) as session:
        assert session.scalar(select(Job.last_error).where(Job.id == job_id)) == "no"
