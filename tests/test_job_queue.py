"""What a queue may be bound to, and how it names it."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from pgqueue import ArgumentsError, Job, PgQueue, Worker

URL = "postgresql+psycopg://app:hunter2@db/shop"


def made() -> Engine:
    return create_engine(URL)


ASYNC: dict[str, Callable[[], Any]] = {
    "AsyncEngine": lambda: create_async_engine(URL),
    "its sync_engine": lambda: create_async_engine(URL).sync_engine,
    "async_sessionmaker": lambda: async_sessionmaker(create_async_engine(URL)),
    "sessionmaker(class_=AsyncSession)": lambda: sessionmaker(  # type: ignore[call-overload]  # as written of old
        create_async_engine(URL),
        class_=AsyncSession,
    ),
    "sessionmaker of a sync_engine": lambda: sessionmaker(create_async_engine(URL).sync_engine),
}


@pytest.mark.parametrize("make", ASYNC.values(), ids=ASYNC)
def test_an_async_engine_is_refused_and_told_what_to_give(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentsError, match=r"postgresql\+psycopg.*enqueue_async"):
        PgQueue(make())
    with pytest.raises(ArgumentsError, match="async engine"):
        PgQueue().bind(make())


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
def test_the_url_of_an_async_driver_means_psycopg(driver: str) -> None:
    queue = PgQueue(f"postgresql+{driver}://app:hunter2@db/shop")

    assert queue.engine.url == made().url


def test_a_queue_with_the_url_of_an_async_driver_works(database_url: str) -> None:
    url = make_url(database_url).set(drivername="postgresql+asyncpg")
    queue = PgQueue(url.render_as_string(hide_password=False))

    @queue.task
    def quick() -> None: ...

    quick.delay()

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    queue.engine.dispose()


@pytest.mark.parametrize(
    ("sessions", "shown"),
    [
        (lambda: sessionmaker(made()), "postgresql+psycopg://app:***@db/shop"),
        (lambda: sessionmaker(), "without an engine"),
        (lambda: sessionmaker(binds={Job: made()}), "without an engine"),
    ],
    ids=["engine", "none", "binds"],
)
def test_its_repr_names_the_database_of_a_sessionmaker_or_says_that_there_is_none(
    sessions: Callable[[], Any], shown: str
) -> None:
    assert repr(PgQueue(sessions())) == f"<PgQueue {shown}>"


def test_its_repr_names_the_database_of_a_sessionmaker_on_a_connection(engine: Engine) -> None:
    with engine.connect() as connection:
        named = repr(PgQueue(sessionmaker(connection)))

    assert named == repr(PgQueue(engine))
