"""Connections of a worker's own, beside those of the application."""

import asyncio
import gc
import os
import stat
import warnings
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, literal, make_url, select, text
from sqlalchemy.engine.interfaces import CacheStats
from sqlalchemy.ext.asyncio import AsyncSession

from chaos.interleavings.logical_workers import run_together
from pgqueue import PgQueue, Worker
from pgqueue.database.opening import (
    connection_parameters,
    driver_connection,
    own_connection,
    worker_engine,
)

ROUNDS = 20


def test_a_worker_and_its_application_may_connect_first_at_the_same_moment(
    database_url: str,
) -> None:
    for _ in range(ROUNDS):
        engine = create_engine(database_url)
        start = Barrier(2)

        def as_worker() -> None:
            start.wait()
            with own_connection(engine, {}) as connection:
                connection.execute(text("SELECT 1"))

        def as_application() -> None:
            start.wait()
            with engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                connection.execute(text("SELECT 1"))

        run_together(as_worker, as_application)
        engine.dispose()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")
def test_it_does_not_compile_what_another_has_compiled(database_url: str) -> None:
    engine = create_engine(database_url)
    hits = []
    for _ in range(2):
        with own_connection(engine, {}) as connection:
            context: Any = connection.execute(select(literal(1))).context
            hits.append(context.cache_hit)
    engine.dispose()

    assert hits == [CacheStats.CACHE_MISS, CacheStats.CACHE_HIT]


def test_a_forked_child_has_no_socket_of_it_and_the_parent_keeps_its_own(
    engine: Engine,
) -> None:
    with own_connection(engine, {}) as connection:
        driver = driver_connection(connection)
        before = os.fstat(driver.fileno())
        child = os.fork()
        if not child:
            mode = os.fstat(driver.fileno()).st_mode
            driver.close()  # as its garbage collector may
            os._exit(stat.S_ISSOCK(mode))

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.fstat(driver.fileno()) == before
        assert connection.scalar(text("SELECT 1")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")
def test_a_forked_child_has_no_socket_of_it_where_no_more_files_can_be_opened(
    engine: Engine,
) -> None:
    import resource

    with own_connection(engine, {}) as connection:
        number = driver_connection(connection).fileno()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            child = os.fork()
            if not child:
                try:
                    os._exit(stat.S_ISSOCK(os.fstat(number).st_mode))
                except OSError:
                    os._exit(0)  # it is closed
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.scalar(text("SELECT 1")) == 1


def test_the_twin_of_an_engine_on_another_driver_has_a_connection_for_every_slot(
    database_url: str,
) -> None:
    twin = worker_engine(
        create_engine(make_url(database_url).set(drivername="postgresql+psycopg2"))
    )
    with ExitStack() as slots:
        pids = {
            slots.enter_context(twin.connect()).scalar(text("SELECT pg_backend_pid()"))
            for _ in range(20)
        }

    assert len(pids) == 20
    twin.dispose()


def test_no_connection_of_a_twin_engine_is_left_to_the_garbage_collector(
    empty_database_url: str,
) -> None:
    url = make_url(empty_database_url).set(drivername="postgresql+psycopg2")
    queue = PgQueue(create_engine(url, poolclass=NullPool))

    @queue.task
    async def look(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        queue.upgrade()
        asyncio.run(look())
        look.delay()
        Worker(queue, concurrency=1).run_until_empty(timeout=60)
        gc.collect()

    assert [str(one.message) for one in found if "psycopg" in str(one.message)] == []


def test_a_port_that_is_the_usual_one_is_told_although_the_environment_names_another(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(**connection_parameters(engine)) as connection:
        port = connection.info.port
    url = engine.url if engine.url.port else engine.url.update_query_dict({"port": str(port)})
    monkeypatch.setenv("PGPORT", "1")

    with psycopg.connect(**connection_parameters(create_engine(url))) as connection:
        assert connection.info.port == port
