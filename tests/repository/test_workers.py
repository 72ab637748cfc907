"""The live workers with the jobs that they hold, as an application reads them."""

import asyncio

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    LogicalWorker,
    declare_dead,
    enqueue,
    enqueue_many,
    workers_at,
)
from pgqueue import PgQueue, Worker, WorkerState
from pgqueue.outcomes import Succeeded
from pgqueue.repository.workers import Workers

queue = PgQueue()


def live(engine: Engine) -> list[WorkerState]:
    with Session(engine) as session:
        return queue.workers(session)


def test_a_worker_has_the_jobs_that_it_holds_in_the_order_of_their_claims(
    engine: Engine, worker: LogicalWorker
) -> None:
    early, later = enqueue_many(engine, 2)
    [first] = worker.claim()
    worker.claim()
    [state] = live(engine)

    assert (state.id, state.slots, state.queues, state.is_quiet) == (
        worker.id,
        1,
        ("default",),
        False,
    )
    assert [(job.job_id, job.task, job.queue, job.attempt) for job in state.jobs] == [
        (early, "tests.task", "default", 1),
        (later, "tests.task", "default", 1),
    ]
    assert state.started_at <= state.jobs[0].since <= state.jobs[1].since
    assert state.claimed_ahead == 1

    worker.settle(first, Succeeded())
    [state] = live(engine)
    assert [job.job_id for job in state.jobs] == [later]
    assert state.claimed_ahead == 0


def test_the_dead_are_not_among_them_and_the_idle_are(engine: Engine) -> None:
    with workers_at(engine, 3) as [dead, busy, idle]:
        enqueue(engine)
        busy.claim()
        declare_dead(engine, dead)

        assert [(state.id, len(state.jobs)) for state in live(engine)] == [
            (busy.id, 1),
            (idle.id, 0),
        ]


def test_a_worker_says_how_many_attempts_it_has_ended(
    engine: Engine, worker: LogicalWorker
) -> None:
    assert live(engine)[0].attempts_ended == 0

    with engine.begin() as connection:
        Workers(connection).beat(worker.id, attempts_ended=7)

    assert live(engine)[0].attempts_ended == 7


@pytest.mark.parametrize(("version", "known"), [("v7", "v7"), ("", None)])
def test_a_worker_says_which_version_of_its_application_it_runs(
    engine: Engine, version: str, known: str | None
) -> None:
    found: list[WorkerState] = []
    versioned = PgQueue(engine, version=version)

    @versioned.task
    def look(session: Session) -> None:
        found.extend(versioned.workers(session))

    look.delay()
    Worker(versioned).run_until_empty(timeout=60)

    assert [state.version for state in found] == [known]


def test_an_async_session_reads_them_too(engine: Engine, worker: LogicalWorker) -> None:
    async def read() -> list[WorkerState]:
        other = create_async_engine(engine.url)
        try:
            async with AsyncSession(other) as session:
                return await session.run_sync(queue.workers)
        finally:
            await other.dispose()

    assert [state.id for state in asyncio.run(read())] == [worker.id]
