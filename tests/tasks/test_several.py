"""``queue.enqueue_all``: jobs of several tasks in one statement."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import (
    ArgumentsError,
    DuplicateJob,
    Job,
    JobStatus,
    Limit,
    MessageQueue,
    PgQueue,
    Worker,
)

HOUR = timedelta(hours=1)


class Shop:
    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine, queue_limits={"mail": Limit(1)})
        self.note = self.queue.task(name="note")(lambda number: None)
        self.mail = self.queue.task(name="mail", queue="mail", priority=2)(lambda number: None)
        self.once = self.queue.task(name="once", unique_key=lambda number: f"once:{number}")(
            lambda number: None
        )
        self.raises = self.once.options(on_duplicate="raise")


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def test_jobs_of_several_tasks_are_one_statement(
    shop: Shop, engine: Engine, session: Session
) -> None:
    shop.note.enqueue(session, -1)  # the first enqueue of an engine asks for Citus
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    at = datetime.now(UTC) + HOUR
    late = shop.note.options(delay=HOUR, meta={"who": "ann"}, tags=["a"], max_attempts=3)

    ids = shop.queue.enqueue_all(
        session,
        [
            *(shop.note.job(n) for n in range(50)),
            *(shop.mail.job(n) for n in range(50)),
            *(late.job(n) for n in range(50)),
            *(shop.note.options(run_at=at, priority=9).job(n) for n in range(50)),
        ],
    )

    assert len(sent) == 1
    session.commit()
    jobs = session.scalars(select(Job).order_by(Job.id)).all()[1:]
    assert ids == [job.id for job in jobs]
    assert [job.args["number"] for job in jobs] == list(range(50)) * 4
    assert [(job.task, job.priority) for job in jobs[40:60:19]] == [("note", 5), ("mail", 2)]
    assert (jobs[100].meta, jobs[100].tags, jobs[100].max_attempts) == ({"who": "ann"}, ["a"], 3)
    assert jobs[150].run_at == at
    now = session.scalars(select(func.clock_timestamp())).one()
    assert timedelta(minutes=50) < jobs[100].run_at - now <= HOUR
    assert jobs[60].status is JobStatus.BLOCKED
    assert session.scalar(select(func.count()).select_from(MessageQueue)) == 151
    assert shop.queue.check(session) == []


def test_none_is_no_statement(shop: Shop, session: Session) -> None:
    assert shop.queue.enqueue_all(session, []) == []


def test_a_taken_key_gives_the_id_of_its_holder(shop: Shop, session: Session) -> None:
    holder = shop.once.enqueue(session, 7).id
    session.commit()

    first, other, again, of_queue, plain = shop.queue.enqueue_all(
        session,
        [
            shop.once.job(7),
            shop.once.job(8),
            shop.once.job(8),
            shop.once.options(queue="other").job(7),
            shop.note.job(1),
        ],
    )
    session.commit()

    assert (first, again) == (holder, other)
    assert len({holder, other, of_queue, plain}) == 4
    assert session.scalars(select(Job.id).order_by(Job.id)).all() == sorted(
        {holder, other, of_queue, plain}
    )
    assert session.get_one(Job, of_queue).held_unique_key == "once:7"
    assert shop.queue.check(session) == []


def test_a_taken_key_that_must_raise_enqueues_none(shop: Shop, session: Session) -> None:
    holder = shop.once.enqueue(session, 7).id
    session.commit()

    with pytest.raises(DuplicateJob, match=f"task once: job {holder} of queue 'default' holds"):
        shop.queue.enqueue_all(session, [shop.note.job(1), shop.raises.job(7), shop.once.job(9)])
    with pytest.raises(DuplicateJob, match="jobs 0 and 1 have the same unique key 'once:5'"):
        shop.queue.enqueue_all(session, [shop.once.job(5), shop.raises.job(5)])

    session.commit()
    assert session.scalars(select(Job.id)).all() == [holder]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shop, session: Job(task="note", args={}),
        lambda shop, session: shop.note.enqueue(session, 1),
        lambda shop, session: shop.note,
    ],
    ids=["by hand", "enqueued", "a task"],
)
def test_what_is_no_new_job_is_refused(
    shop: Shop, session: Session, wrong: Callable[[Shop, Session], Any]
) -> None:
    with pytest.raises(ArgumentsError, match=r"enqueue_all: job 1 is .*; give new jobs, as task"):
        shop.queue.enqueue_all(session, [shop.note.job(1), wrong(shop, session)])


def test_an_async_session_and_connection_enqueue_all(shop: Shop, engine: Engine) -> None:
    async def enqueue() -> list[int]:
        own = create_async_engine(engine.url)
        async with AsyncSession(own) as session, session.begin():
            ids = await shop.queue.enqueue_all_async(session, [shop.note.job(1)])
        async with own.begin() as connection:
            ids += await shop.queue.enqueue_all_async(connection, [shop.once.job(2)])
            ids += await shop.note.enqueue_many_async(connection, [(3,)])
            ids.append((await shop.once.enqueue_async(connection, 4)).id)
        await own.dispose()
        return ids

    ids = asyncio.run(enqueue())

    with Session(engine) as session:
        assert ids == session.scalars(select(Job.id).order_by(Job.id)).all()
        assert shop.queue.check(session) == []


def test_a_connection_enqueues_in_its_transaction(shop: Shop, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        shop.note.enqueue(connection, 1)
        transaction.rollback()
    with engine.begin() as connection:
        job = shop.once.enqueue(connection, 7)
        again = shop.once.enqueue(connection, 7)
        ids = shop.note.enqueue_many(connection, [(1,), (2,)])
        ids += shop.queue.enqueue_all(connection, [shop.mail.job(3)])

    assert (job.is_new, again.is_new, again.id) == (True, False, job.id)
    assert again.args == job.args == {"number": 7}
    with Session(engine) as session:
        assert session.scalars(select(Job.id).order_by(Job.id)).all() == [job.id, *ids]
        assert shop.queue.check(session) == []


def test_the_jobs_of_a_workflow_may_be_enqueued_so(shop: Shop, session: Session) -> None:
    with shop.queue.workflow(session) as flow:
        first = flow.add(shop.note.job(1))
        with flow.after(first):
            ids = shop.queue.enqueue_all(
                session, [shop.note.options(meta={"a": 1}).job(2), shop.mail.job(3)]
            )

    assert [session.get_one(Job, id).status for id in ids] == [JobStatus.BLOCKED] * 2
    session.commit()
    assert Worker(shop.queue, queues=["default", "mail"]).run_until_empty() == {"succeeded": 3}
    assert shop.queue.get_batch(session, flow.id).outcome == "succeeded"
    assert session.get_one(Job, ids[0]).meta == {"a": 1, "pgqueue.workflow": flow.id}


def test_callers_with_the_same_keys_in_opposite_orders_do_not_deadlock(
    shop: Shop, engine: Engine
) -> None:
    def enqueue(session: Session, *numbers: int) -> list[int]:
        return shop.queue.enqueue_all(session, [shop.once.job(number) for number in numbers])

    with Session(engine) as one, Session(engine) as other, ThreadPoolExecutor(1) as thread:
        first = enqueue(one, 1)
        waiting = thread.submit(enqueue, other, 2, 1)
        wait_until(lambda: is_any_waiting(engine))
        second = enqueue(one, 2)
        one.commit()

        assert waiting.result() == [*second, *first]
        other.commit()


def is_any_waiting(engine: Engine) -> bool:
    """Whether a server process waits for a lock."""
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )
    with engine.connect() as connection:
        return bool(connection.scalar(waits))
