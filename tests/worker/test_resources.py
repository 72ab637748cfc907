"""What workers open once for their handlers: hooks at start and stop, and ``ctx.resource()``."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, endings, running, wait_until

from pgqueue import Job, JobContext, PgQueue, Retry, Worker
from pgqueue.errors import OptionError, PgQueueError, TaskDefinitionError
from pgqueue.testing import run_jobs


class Client:
    """Like one of aiohttp: only ``async with`` is meant."""

    def __enter__(self) -> None:
        raise TypeError("use async with")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> "Client":
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert asyncio.current_task() is self.task


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def errors_of(queue: PgQueue) -> list[str | None]:
    with queue.session() as session:
        return [job.last_error for job in session.query(Job).order_by(Job.id)]


def test_a_resource_is_opened_once_before_the_first_job_and_closed_after_the_last(
    queue: PgQueue,
) -> None:
    seen = list[Any]()

    @queue.resource
    def first() -> Iterator[str]:
        seen.append("open first")
        yield "1"
        seen.append("close first")

    @queue.resource
    @contextmanager
    def second() -> Iterator[str]:
        seen.append("open second")
        yield "2"
        seen.append("close second")

    @queue.task(name="plain")
    def plain(ctx: JobContext) -> None:
        seen.append(ctx.resource(first) + ctx.resource(second))

    @queue.task(name="in_transaction")
    def in_transaction(session: Session, ctx: JobContext) -> None:
        seen.append(ctx.resource(second) + ctx.resource(first))

    plain.delay()
    in_transaction.delay()
    worker = Worker(queue, concurrency=1)

    assert endings(worker) == {"succeeded": 2}
    opened, closed = ["open first", "open second"], ["close second", "close first"]
    assert seen == [*opened, "12", "21", *closed]

    seen.clear()
    endings(worker)
    assert seen == [*opened, *closed]


def test_an_async_resource_lives_in_one_task_of_the_loop_of_the_handlers(queue: PgQueue) -> None:
    seen = list[Any]()
    client: Any = Client  # a type checker sees two context managers in it
    queue.resource(client)

    @queue.resource
    async def pooled() -> AsyncIterator[asyncio.TaskGroup]:
        async with asyncio.TaskGroup() as group:  # refuses to be left in another task
            yield group
        seen.append("closed")

    @queue.task(name="on_loop")
    async def on_loop(ctx: JobContext) -> None:
        assert ctx.resource(client).loop is asyncio.get_running_loop()
        await ctx.resource(pooled).create_task(asyncio.sleep(0))

    @queue.task(name="in_transaction")
    async def in_transaction(session: AsyncSession, ctx: JobContext) -> None:
        assert ctx.resource(client).loop is asyncio.get_running_loop()

    on_loop.delay()
    in_transaction.delay()

    assert endings(Worker(queue)) == {"succeeded": 2}
    assert seen == ["closed"]


def test_it_lives_on_the_loop_of_the_application_that_runs_the_worker(queue: PgQueue) -> None:
    loops = list[Any]()

    @queue.resource
    async def of_application() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield
        loops.append(asyncio.get_running_loop())

    async def main() -> None:
        async with Worker(queue):
            assert loops == [asyncio.get_running_loop()]  # open when the block begins
        assert loops == [asyncio.get_running_loop()] * 2

    asyncio.run(main())


def _refuses() -> Iterator[None]:
    raise ConnectionError("no bank")
    yield


async def _refuses_async() -> AsyncIterator[None]:
    raise ConnectionError("no bank")
    yield


def _exits() -> AbstractContextManager[None]:
    raise SystemExit("no bank")


@pytest.mark.parametrize("refuses", [_refuses, _refuses_async, _exits])
def test_a_worker_whose_resource_cannot_be_opened_starts_no_job(
    queue: PgQueue, refuses: Any
) -> None:
    seen = list[str]()

    @queue.resource
    def before() -> Iterator[None]:
        yield
        seen.append("closed")

    queue.resource(refuses)

    @queue.task(name="task")
    def task() -> None:
        seen.append("ran")

    task.delay()
    words = f"{refuses.__name__} cannot be opened: .*: no bank; the worker starts no job"
    with pytest.raises(PgQueueError, match=words) as refusal:
        endings(Worker(queue))

    assert isinstance(refusal.value.__cause__, (ConnectionError, SystemExit))
    assert seen == ["closed"]
    with queue.session() as session:
        assert queue.workers(session) == []


def test_the_block_of_an_application_raises_the_error_of_a_resource(queue: PgQueue) -> None:
    queue.resource(_refuses)

    async def main() -> None:
        with pytest.raises(PgQueueError, match="no bank"):
            async with Worker(queue):
                pytest.fail("the block has begun")

    asyncio.run(main())


def test_a_worker_can_be_stopped_while_a_resource_is_opened(queue: PgQueue) -> None:
    is_opening, may_open = Event(), Event()

    @queue.resource
    def slow() -> Iterator[None]:
        is_opening.set()
        may_open.wait(PATIENCE)
        yield

    worker = Worker(queue)
    thread = Thread(target=worker.run)
    thread.start()
    assert is_opening.wait(PATIENCE)
    worker.stop()
    thread.join(PATIENCE)

    assert not thread.is_alive()
    assert not may_open.is_set()
    may_open.set()


def test_an_error_at_the_end_of_a_resource_is_logged_and_the_others_are_closed(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    seen = list[str]()

    @queue.resource
    def good() -> Iterator[None]:
        yield
        seen.append("closed")

    @queue.resource
    def bad() -> Iterator[None]:
        yield
        raise ValueError("at the end")

    endings(Worker(queue))

    assert seen == ["closed"]
    [logged] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "bad has failed at its end" in logged.getMessage()


def test_a_resource_is_closed_after_a_handler_that_outlives_the_grace(queue: PgQueue) -> None:
    seen, has_begun, may_end = list[str](), Event(), Event()

    @queue.resource
    def client() -> Iterator[list[str]]:
        yield seen
        seen.append("closed")

    @queue.task(name="long")
    def long(ctx: JobContext) -> None:
        has_begun.set()
        may_end.wait(PATIENCE)
        ctx.resource(client).append("used")

    long.delay()
    worker = Worker(queue, grace=timedelta(0))
    with running(worker):
        assert has_begun.wait(PATIENCE)
    assert seen == []
    may_end.set()

    wait_until(lambda: seen == ["used", "closed"])


def test_a_child_process_opens_a_resource_once_when_a_handler_asks_for_it(queue: PgQueue) -> None:
    parent = os.getpid()

    @queue.resource
    def opened_in() -> Iterator[list[int]]:
        yield [os.getpid(), 0]

    @queue.resource
    def not_asked_for() -> Iterator[None]:
        assert os.getpid() == parent
        yield

    @queue.task(name="in_child", executor="process")
    def in_child(ctx: JobContext) -> list[int]:
        ctx.resource(opened_in)[1] += 1
        return [os.getpid(), *ctx.resource(opened_in)]

    jobs = [in_child.delay().id for _ in range(2)]
    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}

    with queue.session() as session:
        results: list[Any] = [session.get_one(Job, job).result for job in jobs]
    assert [result[2] for result in results] == [1, 2]
    assert all(pid == opener != parent for pid, opener, _ in results)


@pytest.mark.parametrize("kind", ["async", "fails", "unknown"])
def test_a_resource_that_a_child_process_cannot_open_fails_the_attempt(
    queue: PgQueue, kind: str
) -> None:
    parent = os.getpid()
    queue.resource(Client)

    @queue.resource
    def fails() -> Iterator[str]:
        yield "" if os.getpid() == parent else os.environ["NOBODY_HAS_THIS"]

    functions: dict[str, Any] = {"async": Client, "fails": fails, "unknown": _refuses}

    @queue.task(name="in_child", executor="process", retry=Retry.never())
    def in_child(ctx: JobContext) -> None:
        ctx.resource(functions[kind])

    in_child.delay()
    assert endings(Worker(queue)) == {"failed": 1}

    words = {
        "async": "Client cannot be opened: .*no event loop; make it a plain function, or omit",
        "fails": "fails cannot be opened: KeyError: 'NOBODY_HAS_THIS'",
        "unknown": "_refuses is not open here: workers open those that",
    }
    [error] = errors_of(queue)
    assert error is not None
    assert re.search(words[kind], error)


def test_a_value_is_provided_where_nothing_is_opened(queue: PgQueue, engine: Engine) -> None:
    seen = list[str]()

    @queue.resource
    def opened() -> Iterator[str]:
        pytest.fail("it was opened")
        yield ""

    @queue.task(name="task")
    def task(ctx: JobContext) -> None:
        seen.append(ctx.resource(opened))

    with queue.provide(opened, "to a call"):
        task()
    with queue.provide(opened, "to a claim"), queue.session() as session:
        task.enqueue(session)
        with queue.claim(session) as claimed:
            assert claimed is not None
            claimed.run()
    with engine.connect() as connection, queue.bound_to(connection), queue.session() as session:
        task.enqueue(session)
        with queue.provide(opened, "to a test"):
            run_jobs(session, queue=queue)
    task.delay()
    with queue.provide(opened, "to a worker"):
        endings(Worker(queue))

    assert seen == ["to a call", "to a claim", "to a test", "to a worker"]
    with pytest.raises(
        PgQueueError, match=r"task: the resource .*opened is not open here.*provide"
    ):
        task()


def test_what_is_no_resource_is_refused(queue: PgQueue) -> None:
    async def returns() -> None: ...

    def takes_one(name: str) -> Iterator[None]:
        yield

    refused: dict[Any, str] = {
        returns: "yields once",
        3: "yields once",
        takes_one: "takes_one: workers call it without arguments.*'name'",
    }
    for function, words in refused.items():
        with pytest.raises(TaskDefinitionError, match=words):
            queue.resource(function)
    with (
        pytest.raises(OptionError, match=r"_refuses is no resource of this queue"),
        queue.provide(_refuses, None),
    ):
        pass

    @queue.resource  # type: ignore[type-var]  # wrong on purpose
    def returns_text() -> str:
        return "client"

    with pytest.raises(PgQueueError, match=r"returns_text cannot be opened: .*it returned str"):
        endings(Worker(queue))
