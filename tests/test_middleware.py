"""``queue.middleware``: context managers around each handler, outermost first."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import process_tasks
import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, Rig

from pgqueue import Job, JobContext, PgQueue, Retry, TaskDefinitionError, Worker

KINDS = ("plain", "session", "async", "async_session")
current: ContextVar[str] = ContextVar("current", default="none")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def enqueue(queue: PgQueue, kind: str, seen: list[str], *, fails: bool = False) -> int:
    def act() -> None:
        seen.append(f"handler of {current.get()}")
        if fails:
            raise ValueError("in the handler")

    def plain() -> None:
        act()

    def session(session: Session) -> None:
        act()

    async def on_loop() -> None:
        act()

    async def async_session(session: AsyncSession) -> None:
        act()

    functions = {"plain": plain, "session": session, "async": on_loop}
    function: Any = functions.get(kind, async_session)
    task = queue.task(name=kind, retry=Retry.never())(function)
    job: Job = task.options(meta={"tenant": "acme"}).delay()
    return job.id


def run(queue: PgQueue) -> dict[str, int]:
    return Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)


def last_error(queue: PgQueue) -> str:
    with queue.session() as session:
        return str(session.scalars(select(Job.last_error)).one())


@pytest.mark.parametrize("kind", KINDS)
def test_they_surround_each_handler_in_their_order_and_see_its_job(
    queue: PgQueue, kind: str
) -> None:
    seen: list[str] = []

    @queue.middleware
    def outer(ctx: JobContext) -> Iterator[None]:
        token = current.set(ctx.meta["tenant"])
        seen.append(f"outer {ctx.task}")
        yield
        seen.append("outer ends")
        current.reset(token)

    @queue.middleware
    @contextmanager
    def inner(ctx: JobContext) -> Iterator[None]:
        seen.append(f"inner, {'no' if ctx.session is None else 'a'} session")
        yield
        seen.append("inner ends")

    if kind.startswith("async"):

        @queue.middleware
        async def innermost(ctx: JobContext) -> AsyncIterator[None]:
            seen.append("innermost")
            yield
            seen.append("innermost ends")

    enqueue(queue, kind, seen)

    assert run(queue) == {"succeeded": 1}
    middle = ["handler of acme"]
    if kind.startswith("async"):
        middle = ["innermost", *middle, "innermost ends"]
    inner_begins = f"inner, {'a' if 'session' in kind else 'no'} session"
    assert seen == [f"outer {kind}", inner_begins, *middle, "inner ends", "outer ends"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_middleware_that_suppresses_an_error_does_not_make_the_job_succeed(
    queue: PgQueue, kind: str
) -> None:
    @queue.middleware
    def hush(ctx: JobContext) -> AbstractContextManager[None]:
        return suppress(ValueError)

    enqueue(queue, kind, [], fails=True)

    assert run(queue) == {"failed": 1}
    assert "a middleware has suppressed the error of the handler" in last_error(queue)


def test_an_async_context_manager_around_a_plain_handler_fails_the_attempt_and_says_why(
    queue: PgQueue,
) -> None:
    seen: list[str] = []

    @queue.middleware
    @asynccontextmanager
    async def only_async(ctx: JobContext) -> AsyncIterator[None]:
        yield

    enqueue(queue, "plain", seen)

    assert run(queue) == {"failed": 1}
    assert seen == []
    assert "only_async returned" in last_error(queue)
    assert "this handler is a plain function" in last_error(queue)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_is_no_context_manager_is_refused(queue: PgQueue, kind: str) -> None:
    queue.middleware(lambda ctx: None)  # type: ignore[type-var]

    enqueue(queue, kind, [])

    assert run(queue) == {"failed": 1}
    assert "return a context manager, or let it yield once" in last_error(queue)
    with pytest.raises(TaskDefinitionError, match="yields once"):
        queue.middleware(7)  # type: ignore[type-var]


@pytest.mark.journey
def test_handlers_in_child_processes_are_surrounded_too(database_url: str, tmp_path: Any) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session, session.begin():
            task = process_tasks.surrounded.options(meta={"tenant": "acme"})
            job_id = task.enqueue(session).id
        rig.start(modules=["process_tasks"])
        rig.until_ended(job_id)

        with rig.session() as session:
            assert session.get_one(Job, job_id).result == ["acme"]
