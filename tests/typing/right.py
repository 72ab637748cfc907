"""Right uses of tasks: mypy --strict accepts each of them and knows what it gives."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, assert_type, reveal_type
from uuid import UUID, uuid4

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from pgqueue import (
    AttemptEnded,
    AttemptOutcome,
    Job,
    JobContext,
    JobState,
    Keep,
    Limit,
    PgQueue,
    Retry,
    Secret,
    Task,
    Unique,
    Worker,
)

queue = PgQueue()


@queue.task
def plain(number: int, *, word: str = "") -> str:
    return word * number


@queue.task
def with_session(session: Session, number: int) -> str:
    return str(number)


@queue.task
def with_context(ctx: JobContext, number: int) -> str:
    return str(number)


@queue.task
def with_session_and_context(session: Session, ctx: JobContext, number: int) -> str:
    return str(number)


@queue.task
def with_context_and_session(ctx: JobContext, session: Session, number: int) -> str:
    return str(number)


@queue.schedule("0 3 * * *", timezone="Europe/Berlin", catch_up=3, overlap="wait", priority=1)
@queue.schedule(every=timedelta(minutes=5), name="often", args=(1,), tags=["eu"])
@queue.task
def on_schedule(session: Session, number: int = 0) -> str:
    return str(number)


@queue.task
async def on_the_loop(number: int) -> str:
    return str(number)


@queue.task
async def with_async_session(session: AsyncSession, ctx: JobContext, number: int) -> str:
    return str(number)


@queue.task
async def with_context_and_async_session(
    ctx: JobContext, session: AsyncSession, number: int
) -> str:
    return str(number)


@queue.task(
    name="mail.welcome",
    aliases=["mail.hello"],
    renamed={"count": "number"},
    queue="mail",
    priority=0,
    max_attempts=3,
    max_interruptions=5,
    max_unreadable=timedelta(hours=1),
    timeout=timedelta(seconds=30),
    retry=Retry.never().for_at_most(timedelta(hours=1)),
    expires_in=timedelta(hours=2),
    unique_key=lambda number: f"welcome:{number}",
    secret_args=("number",),
    results="required",
    keep=Keep(succeeded=timedelta(0), failed=None),
    transactional=True,
)
def with_options(session: Session, number: int) -> str:
    return str(number)


@queue.task(
    unique=Unique(
        by=("number",), until="started", on_conflict="replace", at_most=timedelta(hours=1)
    )
)
def with_unique(number: int) -> str:
    return str(number)


@queue.task
def with_a_secret(token: Secret[str]) -> str:
    return assert_type(token, str)


@queue.task(on_failed=plain)
def with_follow_up(number: int) -> str:
    return str(number)


@queue.task(executor="process", memory_limit=2**29, limit=(Limit(2, by="number"), Limit(9)))
def in_a_process(ctx: JobContext, number: int) -> str:
    return str(number)


@queue.task()
def with_nothing(session: Session) -> None: ...


# What the queue fills in is gone from the signature; what is left keeps its names.
reveal_type(plain)  # N: Task[[number: int, *, word: str =], str]
reveal_type(with_session)  # N: Task[[number: int], str]
reveal_type(with_context)  # N: Task[[number: int], str]
reveal_type(with_session_and_context)  # N: Task[[number: int], str]
reveal_type(with_context_and_session)  # N: Task[[number: int], str]
reveal_type(on_the_loop)  # N: Task[[number: int], Coroutine[Any, Any, str]]
reveal_type(with_async_session)  # N: Task[[number: int], Coroutine[Any, Any, str]]
reveal_type(with_context_and_async_session)  # N: Task[[number: int], Coroutine[Any, Any, str]]
reveal_type(with_options)  # N: Task[[number: int], str]
reveal_type(in_a_process)  # N: Task[[number: int], str]
reveal_type(with_nothing)  # N: Task[[], None]
reveal_type(with_options.options(delay=timedelta(hours=1)))  # N: Task[[number: int], str]


def calls(session: Session, scoped: "scoped_session[Session]") -> None:
    assert_type(plain(1, word="x"), str)
    assert_type(on_schedule(1), str)
    assert_type(with_session(1), str)
    assert_type(with_session.run(session, 1), str)
    assert_type(plain.enqueue(session, 1, word="x"), Job)
    assert_type(with_session.enqueue(session, 1), Job)
    assert_type(with_session.enqueue(scoped, number=1), Job)
    assert_type(with_async_session.enqueue(session, 1), Job)
    assert_type(with_session.job(1), Job)
    assert_type(with_session.delay(number=1), Job)
    assert_type(with_session.enqueue_many(session, [(1,), {"number": 2}]), list[int])
    assert_type(with_session.options(meta={"a": [1]}, tags=["b"]).delay(1), Job)
    assert_type(
        with_options.options(priority=0, unique_key="k", on_duplicate="raise").enqueue(session, 1),
        Job,
    )
    assert_type(with_unique.options(unique=None).enqueue(session, 1), Job)
    assert_type(with_options.options(unique=Unique(key="k"), expires_in=None).delay(1), Job)
    assert_type(plain.options(timeout=timedelta(seconds=30)).delay(1, word="x"), Job)


async def calls_of_async_code(
    session: AsyncSession, scoped: async_scoped_session[AsyncSession]
) -> None:
    assert_type(await with_session.enqueue_async(session, 1), Job)
    assert_type(await with_session.delay_async(number=1), Job)
    assert_type(await queue.wait_async(7, timeout=timedelta(seconds=5)), JobState)
    async with Worker(queue) as worker:
        assert_type(worker, Worker)
    assert_type(await with_async_session.enqueue_async(scoped, number=1), Job)
    assert_type(await plain.enqueue_many_async(session, [(1,)]), list[int])
    assert_type(await with_async_session(1), str)
    assert_type(await on_the_loop(1), str)
    assert_type(await with_async_session.run(session, 1), str)


@queue.middleware
def surround(ctx: JobContext) -> Iterator[None]:
    yield


@queue.middleware
async def surround_async(ctx: JobContext) -> AsyncIterator[None]:
    yield


@queue.middleware
def surround_in_a_span(ctx: JobContext) -> AbstractContextManager[None]:
    return nullcontext()


@queue.resource
def open_client() -> Iterator[UUID]:
    yield uuid4()


@queue.resource
async def open_async_client() -> AsyncIterator[UUID]:
    yield uuid4()


@queue.resource
def open_manager() -> AbstractContextManager[UUID]:
    return nullcontext(uuid4())


def what_a_worker_has_opened(ctx: JobContext) -> None:
    assert_type(ctx.resource(open_client), UUID)
    assert_type(ctx.resource(open_async_client), UUID)
    assert_type(ctx.resource(open_manager), UUID)
    with queue.provide(open_client, uuid4()):
        pass


@queue.on_enqueue
def note(task: Task[..., Any]) -> dict[str, Any]:
    return {"task": task.name}


@queue.on_attempt_end
def tell(event: AttemptEnded) -> None:
    assert_type(event.outcome, AttemptOutcome)


def what_an_operator_does(session: Session) -> None:
    queue.run_now(session, 7)
    queue.change(session, 7, priority=1, delay=timedelta(hours=1), queue="mail", args={"n": 1})
    queue.requeue(session, 7, args={"n": 1})
    if queue.quiet(session, uuid4()):
        print("quiet")
    if queue.cancel(session, 7) or queue.requeue(session, job_id=7):
        print(queue.check(session))
