"""What a worker calls of the application may raise anything: only its own job pays for it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import AttemptEnded, Job, JobContext, PgQueue, Retry, Worker
from pgqueue.context import Around

ERRORS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
Break = Callable[[], None]


class Surrounded(PgQueue):
    """Its contexts around jobs raise for the job ``bad``."""

    breaks: tuple[str, Break] = ("", lambda: None)

    def around_jobs(self) -> Around:
        return self._around

    @contextmanager
    def _around(self, ctx: JobContext) -> Iterator[None]:
        where, raise_error = self.breaks
        if ctx.task == "bad" and where == "enter":
            raise_error()
        yield
        if ctx.task == "bad" and where == "leave":
            raise_error()


def in_handler(queue: Surrounded, raise_error: Break) -> None:
    queue.task(name="bad", retry=Retry.never())(raise_error)


def in_async_handler(queue: Surrounded, raise_error: Break) -> None:
    @queue.task(name="bad", retry=Retry.never())
    async def bad() -> None:
        raise_error()


def in_str(queue: Surrounded, raise_error: Break) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise_error()
            return ""

    @queue.task(name="bad", retry=Retry.never())
    def bad() -> None:
        raise Broken


def in_retry(queue: Surrounded, raise_error: Break) -> None:
    def decide(_attempt: int, _error: BaseException) -> float:
        raise_error()
        return 0.0

    @queue.task(name="bad", retry=Retry(decide))
    def bad() -> None:
        raise LookupError


def in_middleware(queue: Surrounded, raise_error: Break) -> None:
    @queue.middleware
    @contextmanager
    def around(ctx: JobContext) -> Iterator[None]:
        if ctx.task == "bad":
            raise_error()
        yield

    queue.task(name="bad", retry=Retry.never())(lambda: None)


def at_entry(queue: Surrounded, raise_error: Break) -> None:
    queue.breaks = ("enter", raise_error)
    queue.task(name="bad", retry=Retry.never())(lambda: None)


def at_exit(queue: Surrounded, raise_error: Break) -> None:
    queue.breaks = ("leave", raise_error)
    queue.task(name="bad", retry=Retry.never())(lambda: None)


def in_finish(queue: Surrounded, raise_error: Break) -> None:
    @queue.task(name="bad", retry=Retry.never())
    def bad(ctx: JobContext) -> None:
        with ctx.finish():
            raise_error()


PLACES = (
    in_handler,
    in_async_handler,
    in_str,
    in_retry,
    in_middleware,
    at_entry,
    at_exit,
    in_finish,
)


@pytest.mark.parametrize("place", PLACES)
def test_the_job_fails_and_the_next_one_runs(
    engine: Engine, place: Callable[[Surrounded, Break], None]
) -> None:
    errors = iter(ERRORS)

    def raise_error() -> None:
        raise next(errors)("of the application")

    queue = Surrounded(engine)
    place(queue, raise_error)
    good = queue.task(name="good")(lambda: None)
    for _ in ERRORS:
        queue.tasks["bad"].delay()
        good.delay()

    # The default delay is a random part of a second: a second attempt may start in this run.
    first: Counter[str] = Counter()
    queue.on_attempt_end(lambda ended: first.update([ended.outcome] * (ended.attempt == 1)))
    endings(Worker(queue, concurrency=1))
    assert first == {"retried" if place is in_retry else "failed": 4, "succeeded": 4}
    assert next(errors, None) is None


def test_a_callback_costs_no_job(engine: Engine) -> None:
    queue = PgQueue(engine)
    seen: list[int] = []
    good = queue.task(name="good")(lambda: None)
    for _ in ERRORS:
        good.delay()

    @queue.on_attempt_end
    def count(ended: AttemptEnded) -> None:
        seen.append(ended.job_id)
        raise ERRORS[len(seen) - 1]("of the application")

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 4}
    with queue.session() as session:
        assert seen == list(session.scalars(select(Job.id).order_by(Job.id)))


WHO: ContextVar[str] = ContextVar("who", default="nobody")


@pytest.mark.parametrize("kind", ["plain", "session", "async"])
def test_a_context_variable_that_one_job_sets_is_not_set_in_the_next(
    engine: Engine, kind: str
) -> None:
    queue = PgQueue(engine)
    seen: list[str] = []
    told: list[str] = []

    def note() -> None:
        seen.append(WHO.get())
        WHO.set("an earlier job")

    @queue.task(name="session")
    def with_session(session: Session) -> None:
        note()

    @queue.task(name="async")
    async def on_loop() -> None:
        note()

    @queue.on_attempt_end
    def tell(_: AttemptEnded) -> None:
        told.append(WHO.get())
        WHO.set("an earlier callback")

    queue.task(name="plain")(note)
    for _ in range(3):
        queue.tasks[kind].delay()

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 3}
    assert seen == told == ["nobody"] * 3
