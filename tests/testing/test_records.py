"""record_steps: a handler starts from records that the test has written."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from pgqueue import ArgumentsError, JobContext, PayloadError, PgQueue, PgQueueError, Task
from pgqueue.testing import record_steps, run_jobs

Order = Task[[int], Any]


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def queue(session: Session) -> PgQueue:
    return PgQueue(session.connection())


@pytest.fixture
def order(queue: PgQueue) -> Order:
    calls.clear()

    def call(name: str) -> str:
        calls.append(name)
        return name

    @queue.task
    def order(ctx: JobContext, order_id: int) -> list[Any]:
        return [ctx.step(name, call, name) for name in ("charge", "book")]

    return order


calls: list[str] = []


def test_a_step_on_record_is_not_run_and_returns_what_json_gives_back(
    queue: PgQueue, session: Session, order: Order
) -> None:
    job = order.enqueue(session, 7)

    record_steps(session, job, {"charge": "replaced"})
    record_steps(session, job, {"charge": (1, {"receipt": None})})
    run_jobs(session, queue=queue)

    assert (job.result, calls) == ([[1, {"receipt": None}], "book"], ["book"])


def test_a_job_that_waits_for_another_or_for_later_has_records(
    queue: PgQueue, session: Session, order: Order
) -> None:
    with queue.workflow(session) as flow:
        first = flow.add(order.options(delay=timedelta(days=1)).job(1))
        second = flow.add(order.job(2), after=first)

    for job in (first, second):
        record_steps(session, job, {"charge": None, "book": None})
    run_jobs(session, queue=queue, until=timedelta(days=2))

    assert (first.result, second.result, calls) == ([None, None], [None, None], [])


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        ({"pgqueue.any": 1}, ArgumentsError, "begin with 'pgqueue.' are reserved"),
        ({"": 1}, PgQueueError, "give 1 to 200 printable characters"),
        ({"charge": object()}, PayloadError, "object"),
    ],
)
def test_what_no_handler_could_record_is_refused(
    session: Session, order: Order, steps: dict[str, Any], error: type[Exception], words: str
) -> None:
    job = order.enqueue(session, 7)

    with pytest.raises(error, match=words):
        record_steps(session, job, steps)


def test_a_job_that_has_ended_is_refused(queue: PgQueue, session: Session, order: Order) -> None:
    job = order.enqueue(session, 7)
    run_jobs(session, queue=queue)

    with pytest.raises(PgQueueError, match="has ended"):
        record_steps(session, job, {"charge": 1})
