"""A worker inside a process that lives on: what it leaves behind when it is done."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, promised, wait_until

from pgqueue import Job, JobStatus, PgQueue
from pgqueue.worker import Worker
from pgqueue.worker.upkeep import Upkeep


def threads_of_workers(*, besides: Iterable[Thread]) -> list[Thread]:
    """Those of another test's worker may still end."""
    others = set(besides)
    found = [thread for thread in threading.enumerate() if thread not in others]
    return [thread for thread in found if thread.name.startswith("pgqueue")]


def test_no_thread_is_left_once_a_handler_that_outlived_its_grace_has_ended(engine: Engine) -> None:
    queue = PgQueue(engine)
    started, may_end, before = Event(), Event(), threading.enumerate()

    @queue.task
    def outlive_the_grace() -> None:
        started.set()
        may_end.wait(PATIENCE)

    worker = Worker(queue, concurrency=1, grace=timedelta(0))
    outside = Thread(target=worker.run)
    outside.start()
    with queue.session() as session:
        job = outlive_the_grace.enqueue(session)
        session.commit()
        assert started.wait(PATIENCE)

        worker.stop()
        outside.join(PATIENCE)
        assert "pgqueue-heartbeat" in {thread.name for thread in threads_of_workers(besides=before)}
        may_end.set()

        for thread in threads_of_workers(besides=before):
            thread.join(PATIENCE)
        assert threads_of_workers(besides=before) == []
        session.refresh(job)
        assert job.status is JobStatus.SUCCEEDED


def test_a_worker_whose_thread_cannot_begin_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_upkeep: Upkeep) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Upkeep, "start", fail)
    before = threading.enumerate()

    with pytest.raises(RuntimeError, match="no memory"):
        Worker(PgQueue(engine)).run()

    for thread in threads_of_workers(besides=before):
        thread.join(PATIENCE)
    assert threads_of_workers(besides=before) == []


def test_an_encoding_of_the_engine_without_a_character_keeps_no_job_from_its_handler(
    database_url: str, engine: Engine
) -> None:
    queue = PgQueue(create_engine(database_url, connect_args={"client_encoding": "latin1"}))
    seen = []

    @queue.task
    def show(word: str) -> None:
        seen.append(word)

    with Session(engine) as session:
        for word in ("plain", "\u20ac 5", "\u65e5\u672c"):
            show.enqueue(session, word)
        session.commit()
    Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)

    assert seen == ["plain", "\u20ac 5", "\u65e5\u672c"]


def test_an_async_handler_connects_as_the_engine_of_the_application_does(database_url: str) -> None:
    """Its URL may lack what connect_args or a token from somewhere add."""
    url = make_url(database_url)
    arguments = {"dbname": url.database, "application_name": "known by connect_args alone"}
    engine = create_engine(url.set(database="postgres"), connect_args=arguments)
    queue = PgQueue(engine)

    @queue.task
    async def who_am_i(session: AsyncSession) -> str:
        return str(await session.scalar(text("SHOW application_name")))

    with queue.session() as session:
        job_id = who_am_i.enqueue(session).id
        session.commit()
        Worker(queue).run_until_empty(timeout=PATIENCE)
        assert session.get_one(Job, job_id).result == arguments["application_name"]
        assert asyncio.run(who_am_i()) == arguments["application_name"]
    engine.dispose()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_server_soon_notices_when_the_host_of_a_transactional_handler_vanishes(
    engine: Engine, is_async: bool
) -> None:
    """A partition shows the rest, with root's help: chaos/scenarios/partitions.py."""
    queue = PgQueue(engine)
    backend = text("SELECT pg_backend_pid()")
    interval = text("SHOW client_connection_check_interval")
    found: set[tuple[int | None, str | None]] = set()

    @queue.task
    def look(session: Session) -> None:
        found.add((session.scalar(backend), session.scalar(interval)))

    @queue.task
    async def look_async(session: AsyncSession) -> None:
        found.add((await session.scalar(backend), await session.scalar(interval)))

    task = look_async if is_async else look
    for _ in range(2):
        task.delay()
    worker = Worker(queue, concurrency=1)
    assert worker.run_until_empty(timeout=PATIENCE)["succeeded"] == 2

    assert [shown for _, shown in found] == ["1s"], "one connection, used again"


def test_the_collector_spares_what_was_there_before_while_jobs_run_and_no_longer(
    engine: Engine,
) -> None:
    queue = PgQueue(engine)
    worker = Worker(queue)
    spared: list[int] = []

    @queue.task
    def look_and_stop() -> None:
        spared.append(gc.get_freeze_count())
        worker.stop()

    look_and_stop.delay()
    before = gc.get_freeze_count()
    worker.run()

    assert spared[0] > before + 10_000
    assert gc.get_freeze_count() <= before


@pytest.mark.parametrize(
    ("pool", "warns"),
    [
        ({"pool_size": 2, "max_overflow": 1}, True),
        ({"pool_size": 2, "max_overflow": 2}, False),
        ({"pool_size": 2, "max_overflow": -1}, False),
        ({"pool_size": 0}, False),
        ({"poolclass": NullPool}, False),
    ],
)
def test_a_worker_warns_of_a_pool_smaller_than_its_slots(
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    pool: dict[str, Any],
    warns: bool,
) -> None:
    engine = create_engine(database_url, **pool)
    queue = PgQueue(engine)

    @queue.task(name="tests.pay")
    def pay(session: Session) -> None: ...

    Worker(queue, concurrency=4).run_until_empty(timeout=PATIENCE)
    engine.dispose()

    said = "opens 3 connections at most, and 4 handlers run at once: one of tests.pay may wait"
    assert (said in caplog.text) == warns


def test_a_timeout_that_finds_no_connection_is_carried_out_when_there_is_one(
    database_url: str, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"clerk_{make_url(database_url).database}"
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE stock AS SELECT 1 AS amount"))
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        for schema in ("pgqueue", "public"):
            connection.execute(text(f"GRANT ALL ON SCHEMA {schema} TO {role}"))
            connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}"))
    clerk = create_engine(make_url(database_url).set(username=role))
    queue = PgQueue(clerk)
    has_locked, may_end = Event(), Event()

    @queue.task(timeout=timedelta(seconds=1), max_attempts=1)
    def take_from_stock(session: Session) -> None:
        session.execute(text("UPDATE stock SET amount = 0"))
        has_locked.set()
        may_end.wait(PATIENCE)

    worker = Worker(queue, concurrency=2, grace=timedelta(0))
    runs = Thread(target=worker.run)
    runs.start()
    try:
        with Session(engine) as session:
            job_id = take_from_stock.enqueue(session).id
            session.commit()
        assert has_locked.wait(PATIENCE)
        with engine.begin() as connection:
            connection.execute(text(f"ALTER ROLE {role} CONNECTION LIMIT 0"))
        _until(lambda: "not ended from outside" in caplog.text)
        with engine.begin() as connection:
            connection.execute(text(f"ALTER ROLE {role} CONNECTION LIMIT -1"))

        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(text("UPDATE stock SET amount = 2"))  # its lock is gone
        ends = text("SELECT outcome FROM pgqueue.job_attempts WHERE job_id = :id")
        with engine.connect() as connection:
            _until(lambda: connection.scalars(ends, {"id": job_id}).all() == ["timeout"])
            left = connection.scalar(text("SELECT count(*) FROM pgqueue.leases"))
        assert left == 0
    finally:
        may_end.set()
        worker.stop()
        runs.join(PATIENCE)
        clerk.dispose()
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


@pytest.mark.timed
@pytest.mark.parametrize("table", ["jobs", "leases", "message_queue", "workers"])
def test_a_stop_waits_for_no_lock_on_a_table(database_url: str, engine: Engine, table: str) -> None:
    queue = PgQueue(create_engine(database_url))
    worker = Worker(queue, concurrency=2, grace=timedelta(seconds=1))
    runs = Thread(target=worker.run)
    runs.start()
    asked = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = :table ::regclass")
    with engine.connect() as connection, engine.begin() as locked:
        registered = text("SELECT count(*) FROM pgqueue.workers")
        _until(lambda: connection.scalar(registered) == 1)
        connection.commit()
        locked.execute(text(f"LOCK TABLE pgqueue.{table} IN ACCESS EXCLUSIVE MODE"))
        _until(lambda: connection.scalar(asked, {"table": f"pgqueue.{table}"}) > 0)

        worker.stop()
        began = time.monotonic()
        runs.join(PATIENCE)

        assert not runs.is_alive()
        assert time.monotonic() - began < promised(8)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_has_sent_its_settles_before_its_first_job(engine: Engine) -> None:
    """To build and to plan them takes longer than a short handler runs."""
    worker = Worker(PgQueue(engine))
    outside = Thread(target=worker.run)
    outside.start()
    last_queries = text("SELECT query FROM pg_stat_activity WHERE datname = current_database()")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_until(lambda: any("AS verdicts(" in each for each in connection.scalars(last_queries)))
    worker.stop()
    outside.join(PATIENCE)
    assert not outside.is_alive()
