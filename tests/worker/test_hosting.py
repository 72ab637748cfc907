"""``async with Worker(queue)``: a worker inside of an asyncio application."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from datetime import timedelta
from threading import Event, current_thread
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from worker_rig import PATIENCE

from pgqueue import Job, PgQueue, Worker
from pgqueue.errors import OptionError, SchemaMissing, TooManyStuck


def job_of(queue: PgQueue, job_id: int) -> Job:
    with queue.session() as session:
        return session.get_one(Job, job_id)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE):
            await main()

    asyncio.run(bounded())


def test_async_handlers_run_on_the_loop_of_the_application(engine: Engine) -> None:
    queue, loops, threads = PgQueue(engine), list[Any](), list[str]()

    @queue.task(name="on_loop")
    async def on_loop() -> None:
        loops.append(asyncio.get_running_loop())

    @queue.task(name="in_transaction")
    async def in_transaction(session: AsyncSession) -> None:
        loops.append(asyncio.get_running_loop())
        await session.connection()

    @queue.task(name="plain")
    def plain() -> None:
        threads.append(current_thread().name)

    jobs = [task.delay().id for task in (on_loop, in_transaction, plain)]

    async def main() -> None:
        async with Worker(queue, concurrency=2) as worker:
            await until(lambda: all(job_of(queue, job).outcome for job in jobs))
            health = worker.health()
            assert health is not None
            assert health.problems == []
        assert set(loops) == {asyncio.get_running_loop()}

    run(main)

    assert [job_of(queue, job).outcome for job in jobs] == ["succeeded"] * 3
    assert threads == ["pgqueue-slot"]


def test_the_end_of_the_block_waits_for_handlers_within_the_grace(engine: Engine) -> None:
    queue, has_begun, may_end = PgQueue(engine), Event(), Event()

    @queue.task(name="long")
    async def long() -> None:
        has_begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.005)

    job = long.delay().id

    async def main() -> None:
        async with Worker(queue, concurrency=1, grace=timedelta(seconds=PATIENCE)):
            await until(has_begun.is_set)
            asyncio.get_running_loop().call_later(0.05, may_end.set)

    run(main)

    assert job_of(queue, job).outcome == "succeeded"


def test_a_cancel_at_the_end_of_the_block_ends_the_grace_period(engine: Engine) -> None:
    queue, has_begun, is_ending = PgQueue(engine), Event(), Event()

    @queue.task(name="endless")
    async def endless() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    job = endless.delay().id

    async def serve() -> None:
        async with Worker(queue, concurrency=1, grace=timedelta(hours=1)):
            await until(has_begun.is_set)
            is_ending.set()

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await until(is_ending.is_set)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(main)

    ended = job_of(queue, job)
    assert (ended.outcome, ended.attempts, ended.interruptions) == (None, 0, 1)


def test_workers_of_one_process_have_slots_of_their_own(engine: Engine) -> None:
    """Jobs that fill the slots of one queue do not delay those of another."""
    queue, may_end, began = PgQueue(engine), Event(), list[int]()

    @queue.task(name="build", queue="reports")
    def build(number: int) -> None:
        began.append(number)
        may_end.wait(PATIENCE)

    @queue.task(name="send", queue="mail")
    def send() -> None: ...

    reports = [build.delay(number).id for number in range(5)]
    mails = [send.delay().id for _ in range(5)]

    async def main() -> None:
        slow = Worker(queue, ["reports"], concurrency=2)
        async with Worker(queue, ["mail"], concurrency=1), slow:
            await until(lambda: len(began) == 2)
            await until(lambda: all(job_of(queue, job).outcome for job in mails))
            assert len(began) == 2
            may_end.set()
            await until(lambda: all(job_of(queue, job).outcome for job in reports))

    run(main)


def test_an_error_in_the_block_leaves_it_after_the_worker_has_ended(engine: Engine) -> None:
    queue = PgQueue(engine)

    async def main() -> None:
        worker = Worker(queue)
        with pytest.raises(ZeroDivisionError):
            async with worker:
                1 / 0
        async with worker:  # the same worker may run again
            pass

    run(main)


def test_missing_tables_are_refused_before_the_block(empty_engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(SchemaMissing):
            async with Worker(PgQueue(empty_engine)):
                pytest.fail("the block has begun")

    run(main)


def test_the_block_begins_although_the_database_is_away() -> None:
    has_begun = False

    async def main() -> None:
        nonlocal has_begun
        async with Worker(PgQueue("postgresql://nobody@127.0.0.1:1/nothing")):
            has_begun = True

    run(main)

    assert has_begun


def test_a_worker_that_fails_cancels_the_block_which_raises_its_error(engine: Engine) -> None:
    queue, may_end = PgQueue(engine), Event()

    @queue.task(name="stuck", timeout=timedelta(milliseconds=50), max_attempts=1)
    def stuck() -> None:
        may_end.wait(PATIENCE)

    stuck.delay()

    @queue.task(name="quick")
    def quick() -> None: ...

    async def main() -> None:
        worker = Worker(queue, concurrency=1, grace=timedelta(0))
        with pytest.raises(TooManyStuck):
            async with worker:
                await asyncio.Event().wait()
        host = asyncio.current_task()
        assert host is not None
        assert host.cancelling() == 0
        may_end.set()
        job = (await quick.delay_async()).id
        async with worker:  # the same worker may run again
            await until(lambda: job_of(queue, job).outcome)

    try:
        run(main)
    finally:
        may_end.set()


def test_the_worker_handles_no_signals_there(engine: Engine) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)

    async def main() -> None:
        before = [signal.getsignal(number) for number in numbers]
        async with Worker(PgQueue(engine)):
            assert [signal.getsignal(number) for number in numbers] == before

    run(main)


def test_a_worker_runs_in_one_block_at_a_time(engine: Engine) -> None:
    async def main() -> None:
        worker = Worker(PgQueue(engine))
        async with worker:
            with pytest.raises(OptionError, match="runs already"):
                async with worker:
                    pass

    run(main)


def test_a_queue_on_a_connection_is_refused(connection: Connection) -> None:
    async def main() -> None:
        with pytest.raises(OptionError, match="bound to a Connection"):
            async with Worker(PgQueue(connection)):
                pass

    run(main)
