"""However a handler ends, its job ends as written, and what it wrote is kept or undone."""

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import ArgumentsError, Cancel, Discard, Job, JobContext, PgQueue, Retry, Snooze, Worker

WRITE = text("INSERT INTO written VALUES (:word)")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (word text)"))
    return PgQueue(engine)


ENDINGS: dict[str, tuple[Callable[[], Any], str, str | None, bool]] = {
    # what the handler says, how its job ends, how its attempt is recorded, are its writes kept
    "returns": (lambda: {"answer": 42}, "succeeded", None, True),
    "returns Cancel": (lambda: Cancel("enough"), "cancelled", "cancelled", True),
    "returns Discard": (lambda: Discard("bad"), "failed", "discarded", True),
    "raises Cancel": (lambda: _raise(Cancel("enough")), "cancelled", "cancelled", False),
    "raises Discard": (lambda: _raise(Discard("bad")), "failed", "discarded", False),
    "raises": (lambda: _raise(ValueError("no")), "failed", "failed", False),
    "raises a group": (
        lambda: _raise(ExceptionGroup("two", [ValueError("a"), KeyError("b")])),
        "failed",
        "failed",
        False,
    ),
    "exits": (lambda: sys.exit(3), "failed", "failed", False),
    "is interrupted": (lambda: _raise(KeyboardInterrupt()), "failed", "failed", False),
    "is cancelled": (lambda: _raise(asyncio.CancelledError()), "failed", "failed", False),
    "recurses": (lambda: _recurse(), "failed", "failed", False),
    "generator exit": (lambda: _raise(GeneratorExit()), "failed", "failed", False),
}


@pytest.mark.parametrize("kind", ["sync", "async", "plain", "plain-async"])
def test_a_job_ends_as_its_handler_says(queue: PgQueue, kind: str) -> None:
    with queue.session() as session:
        jobs = {
            ending: _task(queue, kind, say, name=f"{kind}-{number}").enqueue(session).id
            for number, (ending, (say, *_)) in enumerate(ENDINGS.items())
        }
        neighbour = _neighbour(queue).enqueue(session).id
        session.commit()

    counts = endings(Worker(queue, concurrency=1))

    with queue.session() as session:
        found = {}
        for ending, job in jobs.items():
            ended = session.get_one(Job, job)
            recorded = "SELECT outcome FROM pgqueue.job_attempts WHERE job_id = :job"
            written = "SELECT count(*) FROM written WHERE word = :word"
            found[ending] = (
                ended.outcome,
                session.scalar(text(recorded), {"job": job}),
                bool(session.scalar(text(written), {"word": str(job)})),
            )
            assert ended.attempts == 1
            assert ended.result == ({"answer": 42} if ending == "returns" else None)
        keeps = "plain" not in kind
        assert found == {
            ending: (outcome, recorded, kept and keeps)
            for ending, (_, outcome, recorded, kept) in ENDINGS.items()
        }
        assert session.get_one(Job, neighbour).outcome == "succeeded"
        assert sum(counts.values()) == len(jobs) + 1
        assert queue.check(session) == []


def test_a_snooze_that_would_run_at_once_for_ever_is_refused() -> None:
    for delay in (timedelta(microseconds=-1), timedelta(days=999_999)):
        with pytest.raises(ArgumentsError, match="from zero to 36525 days"):
            raise Snooze(delay)


@pytest.mark.parametrize(
    ("kind", "returned"),
    [("sync", True), ("async", False), ("plain", False), ("plain-async", True)],
)
def test_a_snooze_costs_no_attempt(queue: PgQueue, kind: str, returned: bool) -> None:
    asked: list[int] = []

    def say() -> Any:
        asked.append(1)
        if len(asked) > 2:
            return None
        snooze = Snooze(timedelta(milliseconds=1))
        return snooze if returned else _raise(snooze)

    task = _task(queue, kind, say)
    with queue.session() as session:
        job = task.enqueue(session).id
        session.commit()
    worker = Worker(queue, concurrency=1)

    counts: dict[str, int] = {}
    for _ in range(50):
        for word, count in worker.run_until_empty(timeout=60).items():
            counts[word] = counts.get(word, 0) + count
        if counts.get("succeeded"):
            break

    with queue.session() as session:
        ended = session.get_one(Job, job)
        words = session.scalars(text("SELECT word FROM written")).all()
        assert counts == {"snoozed": 2, "succeeded": 1}
        assert (ended.outcome, ended.attempts, ended.snoozes) == ("succeeded", 1, 2)
        times = 0 if "plain" in kind else 3 if returned else 1
        assert words == [str(job)] * times
        assert queue.check(session) == []


def test_a_sync_task_that_returns_a_coroutine_fails_with_the_remedy(queue: PgQueue) -> None:
    async def forgotten() -> None: ...

    @queue.task(retry=Retry.never())
    def forgetful() -> Any:
        return forgotten()

    with queue.session() as session:
        job = forgetful.enqueue(session).id
        session.commit()

    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    with queue.session() as session:
        ended = session.get_one(Job, job)
        assert ended.outcome == "failed"
        assert "async def" in str(ended.last_error)
        assert queue.check(session) == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_follow_up_jobs_and_writes_are_kept_or_undone_together(queue: PgQueue, kind: str) -> None:
    follow = _neighbour(queue)

    if kind == "sync":

        @queue.task(retry=Retry.never())
        def parent(session: Session, fails: bool) -> None:
            follow.enqueue(session)
            session.add(follow.job())
            session.execute(WRITE, {"word": "mine"})
            if fails:
                raise ValueError("after all")

        task: Any = parent
    else:

        @queue.task(retry=Retry.never())
        async def async_parent(session: AsyncSession, fails: bool) -> None:
            await follow.enqueue_async(session)
            session.add(follow.job())
            await session.execute(WRITE, {"word": "mine"})
            if fails:
                raise ValueError("after all")

        task = async_parent
    with queue.session() as session:
        task.enqueue_many(session, [(False,), (True,), (False,), (True,)])
        session.commit()

    counts = Worker(queue, concurrency=2).run_until_empty(timeout=60)

    with queue.session() as session:
        # What is enqueued while it runs is waited for, too.
        assert counts == {"succeeded": 2 + 4, "failed": 2}
        assert session.scalars(text("SELECT word FROM written")).all() == ["mine"] * 2
        assert queue.check(session) == []


def test_async_handlers_run_side_by_side(queue: PgQueue) -> None:
    together = asyncio.Event()
    here: list[int] = []

    @queue.task(retry=Retry.never(), timeout=timedelta(seconds=60))
    async def meet() -> None:
        here.append(1)
        if len(here) == 5:
            together.set()
        await together.wait()

    with queue.session() as session:
        meet.enqueue_many(session, [()] * 5)
        session.commit()

    counts = Worker(queue, concurrency=5).run_until_empty(timeout=60)

    with queue.session() as session:
        assert counts == {"succeeded": 5}
        assert queue.check(session) == []


def _raise(error: BaseException) -> Any:
    raise error


def _recurse() -> Any:
    return _recurse()


def _neighbour(queue: PgQueue) -> Any:
    @queue.task(name="neighbour")
    def neighbour() -> None: ...

    return neighbour


def _task(queue: PgQueue, kind: str, say: Callable[[], Any], *, name: str = "task") -> Any:
    """A task that writes its id if it has a session, and then ends as it is told."""
    never = Retry.never()

    if kind == "sync":

        @queue.task(name=name, retry=never)
        def writing(session: Session, ctx: JobContext) -> Any:
            session.execute(WRITE, {"word": str(ctx.job_id)})
            return say()

        return writing
    if kind == "async":

        @queue.task(name=name, retry=never)
        async def async_writing(session: AsyncSession, ctx: JobContext) -> Any:
            await session.execute(WRITE, {"word": str(ctx.job_id)})
            return say()

        return async_writing
    if kind == "plain":

        @queue.task(name=name, retry=never)
        def plain() -> Any:
            return say()

        return plain

    @queue.task(name=name, retry=never)
    async def async_plain() -> Any:
        return say()

    return async_plain


def test_a_retry_gets_the_arguments_as_they_were_enqueued(queue: PgQueue) -> None:
    seen: list[list[int]] = []

    @queue.task(retry=Retry.constant(timedelta(0)), max_attempts=2)
    def spoil(numbers: list[int]) -> None:
        seen.append(list(numbers))
        numbers.clear()
        raise ValueError("after it has changed its argument")

    with queue.session() as session:
        spoil.enqueue(session, [1, 2])
        session.commit()

    Worker(queue).run_until_empty(timeout=60)

    assert seen == [[1, 2], [1, 2]]
