"""A worker inside a process that lives on: what it leaves behind when it is done."""

import asyncio
import gc
import threading
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import MODES

from pgqueue import Job, JobStatus, PgQueue
from pgqueue.worker import Worker

PATIENCE = 60.0


def threads_of_workers() -> list[Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pgqueue")]


@pytest.mark.parametrize("mode", MODES)
def test_no_thread_is_left_once_a_handler_that_outlived_its_grace_has_ended(
    engine: Engine, mode: str
) -> None:
    queue = PgQueue(engine)
    started, may_end = Event(), Event()

    @queue.task
    def outlive_the_grace() -> None:
        started.set()
        may_end.wait(PATIENCE)

    worker = Worker(queue, mode=mode, concurrency=1, grace=timedelta(0))
    outside = Thread(target=worker.run)
    outside.start()
    with queue.session() as session:
        job = outlive_the_grace.enqueue(session)
        session.commit()
        assert started.wait(PATIENCE)

        worker.stop()
        outside.join(PATIENCE)
        assert "pgqueue-heartbeat" in {thread.name for thread in threads_of_workers()}
        may_end.set()

        for thread in threads_of_workers():
            thread.join(PATIENCE)
        assert threads_of_workers() == []
        session.refresh(job)
        assert job.status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("mode", MODES)
def test_an_encoding_of_the_engine_without_a_character_keeps_no_job_from_its_handler(
    database_url: str, engine: Engine, mode: str
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
    Worker(queue, mode=mode, concurrency=1).run_until_empty(timeout=PATIENCE)

    assert seen == ["plain", "\u20ac 5", "\u65e5\u672c"]


@pytest.mark.parametrize("mode", MODES)
def test_an_async_handler_connects_as_the_engine_of_the_application_does(
    database_url: str, mode: str
) -> None:
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
        Worker(queue, mode=mode).run_until_empty(timeout=PATIENCE)
        assert session.get_one(Job, job_id).result.startswith(arguments["application_name"])
        assert asyncio.run(who_am_i()) == arguments["application_name"]
    engine.dispose()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_server_soon_notices_when_the_host_of_a_transactional_handler_vanishes(
    engine: Engine, mode: str, is_async: bool
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
    worker = Worker(queue, mode=mode, concurrency=1)
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
    ("pool", "mode", "warns"),
    [
        ({"pool_size": 2, "max_overflow": 1}, "lease", True),
        ({"pool_size": 2, "max_overflow": 2}, "lease", False),
        ({"pool_size": 2, "max_overflow": -1}, "lease", False),
        ({"pool_size": 0}, "lease", False),
        ({"poolclass": NullPool}, "lease", False),
        ({"pool_size": 2, "max_overflow": 1}, "transaction", False),
    ],
)
def test_a_worker_warns_of_a_pool_smaller_than_its_slots(
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    pool: dict[str, Any],
    mode: str,
    warns: bool,
) -> None:
    engine = create_engine(database_url, **pool)
    queue = PgQueue(engine)

    @queue.task(name="tests.pay")
    def pay(session: Session) -> None: ...

    Worker(queue, mode=mode, concurrency=4).run_until_empty(timeout=PATIENCE)
    engine.dispose()

    said = "opens 3 connections at most, and 4 handlers run at once: one of tests.pay may wait"
    assert (said in caplog.text) == warns


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_ends_leaves_no_stamp_of_an_ended_job(engine: Engine, mode: str) -> None:
    """It may be the last of all for a long time, and the stamp its own."""
    queue = PgQueue(engine)

    @queue.task
    def leave_stamp(session: Session) -> None:
        with engine.begin() as other:
            other.execute(
                text(
                    "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id, held)"
                    " SELECT j.id, 1, 1, w.id, true FROM pgqueue.jobs j, pgqueue.workers w"
                    " WHERE j.outcome = 'succeeded'"
                )
            )

    with queue.session() as session:
        ended = leave_stamp.enqueue(session)
        ended.outcome, ended.attempts, ended.finished_at = "succeeded", 1, datetime.now(UTC)
        leave_stamp.enqueue(session)
        session.commit()

    Worker(queue, mode=mode, concurrency=1).run_until_empty(timeout=PATIENCE)

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pgqueue.leases")) == 0
        assert connection.scalar(text("SELECT count(*) FROM pgqueue.workers")) == 0
