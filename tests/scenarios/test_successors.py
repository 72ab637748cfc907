"""A job that enqueues its successor under its own unique key."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import Job, PgQueue, Retry, Worker


@pytest.mark.parametrize("kind", ["enqueue", "delay", "enqueue_many", "async"])
def test_a_successor_under_the_own_key_fails_loudly(engine: Engine, kind: str) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.chain", unique_key=lambda n: "chain", retry=Retry.never())
    def chain(session: Session, n: int) -> None:
        match kind:
            case "enqueue":
                chain.enqueue(session, n + 1)
            case "delay":
                chain.delay(n + 1)
            case "enqueue_many":
                chain.enqueue_many(session, [(n + 1,)])

    @queue.task(name="tests.achain", unique_key=lambda n: "chain", retry=Retry.never())
    async def achain(n: int) -> None:
        achain.delay(n + 1)

    job_id = (achain if kind == "async" else chain).delay(1).id

    assert endings(Worker(queue)) == {"failed": 1}
    with Session(engine) as session:
        job = session.scalars(select(Job)).one()
        assert job.id == job_id
        assert "which is running this code, holds the unique key 'chain'" in str(job.last_error)


def test_a_successor_under_another_key_or_of_another_job_is_enqueued(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.chain", unique_key=lambda n: f"chain{n}")
    def chain(session: Session, n: int) -> None:
        if n < 3:
            assert chain.enqueue(session, n + 1).is_new
        assert chain.enqueue(session, 9).id == waiting.id

    waiting = chain.options(delay=timedelta(hours=1)).delay(9)
    chain.delay(1)

    assert endings(Worker(queue)) == {"succeeded": 3}
