"""A Session that is closed with an enqueue neither committed nor rolled back says so."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgqueue import Job, PgQueue

queue = PgQueue()


@queue.task(name="mail.send")
def send(number: int) -> None: ...


def by_enqueue(session: Session) -> str:
    return f"job {send.enqueue(session, 1).id} of task mail.send is lost"


def by_flush(session: Session) -> str:
    job = send.job(1)
    session.add(job)
    session.flush()
    return f"job {job.id} of task mail.send is lost"


def without_flush(session: Session) -> str:
    session.add(send.job(1))
    return "a job of task mail.send is lost"


def by_many(session: Session) -> str:
    send.enqueue_many(session, [(1,), (2,)])
    return "a job of task mail.send is lost"


def by_all(session: Session) -> str:
    queue.enqueue_all(session, [send.job(1), send.job(2)])
    send.enqueue(session, 3)
    return "a job of task mail.send and 1 more enqueues are lost"


WAYS = [by_enqueue, by_flush, without_flush, by_many, by_all]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_closed_session_names_the_job_that_it_loses(
    engine: Engine, caplog: pytest.LogCaptureFixture, way: Callable[[Session], str]
) -> None:
    with Session(engine) as session:
        said = way(session)

    assert said in caplog.text


def test_a_removed_session_names_the_job_that_it_loses(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    send.enqueue(sessions, 1)
    sessions.commit()
    job = send.enqueue(sessions, 2)
    job_id = job.id
    sessions.remove()

    assert f"job {job_id} of task mail.send is lost" in caplog.text


def test_an_async_session_names_the_job_that_it_loses(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async def lose() -> None:
        own = create_async_engine(engine.url)
        async with AsyncSession(own) as session:
            await send.enqueue_async(session, 1)
        await own.dispose()

    asyncio.run(lose())

    assert "of task mail.send is lost" in caplog.text


def committed(session: Session) -> None:
    send.enqueue(session, 1)
    with session.begin_nested():
        send.enqueue(session, 2)
    session.add(send.job(3))  # written by the flush of the commit
    session.commit()


def rolled_back(session: Session) -> None:
    send.enqueue(session, 1)
    session.add(send.job(3))
    session.rollback()


def failed(session: Session) -> None:
    send.enqueue(session, 1)
    raise LookupError


def held(session: Session) -> None:
    send.options(unique_key="k").enqueue(session, 1)
    session.commit()
    assert not send.options(unique_key="k").enqueue(session, 1).is_new


@pytest.mark.parametrize("use", [committed, rolled_back, failed, held])
def test_nothing_is_said_of_a_session_whose_end_was_meant(
    engine: Engine, caplog: pytest.LogCaptureFixture, use: Callable[[Session], Any]
) -> None:
    caplog.set_level(logging.WARNING, "pgqueue")
    try:
        with Session(engine) as session:
            use(session)
    except LookupError:
        pass

    assert caplog.text == ""


def test_nothing_is_said_of_a_session_in_the_transaction_of_a_connection(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection, Session(connection) as session:
        send.enqueue(session, 1)

    assert caplog.text == ""


def by_name(session: Session) -> int:
    return queue.enqueue_by_name(session, "mail.send", {"number": 1}, queue="mail")


@pytest.mark.parametrize("enqueue", [lambda session: send.enqueue(session, 1), by_name])
def test_nothing_is_said_of_a_session_in_autocommit_whose_jobs_are_stored(
    engine: Engine, caplog: pytest.LogCaptureFixture, enqueue: Callable[[Session], Any]
) -> None:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        enqueue(session)

    with Session(engine) as session:
        assert session.query(Job).count() == 1
    assert caplog.text == ""


def test_a_job_of_a_savepoint_that_is_released_is_lost_too(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with Session(engine) as session, session.begin_nested():
        job_id = send.enqueue(session, 1).id

    assert f"job {job_id} of task mail.send is lost" in caplog.text
