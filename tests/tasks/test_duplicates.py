"""What an enqueue says of a unique key: whether its job is new, and who holds the key."""

import asyncio

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import DuplicateJob, Job, PgQueue

queue = PgQueue()


@queue.task(name="tests.once", unique_key=lambda n: f"k{n}")
def once(n: int) -> None: ...


@pytest.fixture(autouse=True)
def _bound(engine: Engine) -> None:
    queue.bind(engine)


def test_a_new_job_says_so_and_a_holder_does_not(session: Session) -> None:
    first = once.enqueue(session, 1)
    assert first.is_new
    session.commit()

    assert first.is_new
    assert once.enqueue(session, 1).is_new is False
    assert session.get_one(Job, first.id).is_new is False


def test_delay_and_add_say_whether_the_job_is_new(session: Session) -> None:
    assert once.delay(1).is_new
    assert once.delay(1).is_new is False

    added = once.job(2)
    session.add(added)
    session.flush()
    assert added.is_new


def test_enqueue_async_says_whether_the_job_is_new(database_url: str) -> None:
    async def enqueue() -> list[bool]:
        engine = create_async_engine(database_url)
        async with AsyncSession(engine) as session:
            told = [(await once.enqueue_async(session, 1)).is_new for _ in range(2)]
        await engine.dispose()
        return told

    assert asyncio.run(enqueue()) == [True, False]


def test_on_duplicate_raise_names_the_holder_and_leaves_the_transaction_usable(
    session: Session,
) -> None:
    strict = once.options(on_duplicate="raise")
    holder = strict.enqueue(session, 1)

    with pytest.raises(DuplicateJob, match=f"job {holder.id} of queue 'default'.*'k1'") as raised:
        strict.enqueue(session, 1)

    assert raised.value.holder == holder.id
    assert strict.enqueue(session, 2).is_new


def test_on_duplicate_raise_holds_for_delay(session: Session) -> None:
    holder = once.delay(1)

    with pytest.raises(DuplicateJob) as raised:
        once.options(on_duplicate="raise").delay(1)

    assert raised.value.holder == holder.id


def test_enqueue_many_with_raise_enqueues_all_rows_or_none(session: Session) -> None:
    holder = once.enqueue(session, 7)
    strict = once.options(on_duplicate="raise")

    with pytest.raises(DuplicateJob, match=f"job {holder.id} ") as raised:
        strict.enqueue_many(session, [(5,), (7,), (9,)])
    with pytest.raises(DuplicateJob, match="rows 0 and 2 of enqueue_many"):
        strict.enqueue_many(session, [(5,), (6,), (5,)])

    assert raised.value.holder == holder.id
    session.commit()
    assert session.query(Job.unique_key).all() == [("k7",)]
    assert len(strict.enqueue_many(session, [(5,), (9,)])) == 2
