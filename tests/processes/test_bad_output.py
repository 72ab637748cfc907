"""What a handler may do wrong: its own job ends with a reason, its neighbour runs, and the tables
hold one row for each job and nothing else."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from worker_rig import MODES

from pgqueue import Job, JobAttempt, PgQueue, Retry, Worker


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def nested_groups(depth: int) -> BaseException:
    error: Exception = ValueError("the innermost")
    for _ in range(depth):
        error = ExceptionGroup("one more", [error])
    return error


def recurse() -> None:
    recurse()


async def never_awaited() -> None: ...


def circular() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def fail_with(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


RETURNED: dict[str, Callable[[], Any]] = {
    "NaN": lambda: float("nan"),
    "infinity": lambda: [float("-inf")],
    "not JSON": lambda: object(),
    "an open generator": lambda: (n for n in range(3)),
    "circular": circular,
    "64 MB": lambda: "x" * 64_000_000,
    "an integer of 5,000 digits": lambda: 10**5000,
}
MENDED = {"a\0b": "a\ufffdb", "\ud800": "\ufffd"}
RAISED: dict[str, tuple[Callable[[], Any], str]] = {
    "message of 50 MB": (fail_with(ValueError("x" * 50_000_000)), "ValueError"),
    "message with NUL and half a surrogate": (fail_with(ValueError("a\0\ud800")), "ValueError"),
    "no message": (fail_with(Unprintable()), "Unprintable"),
    "SystemExit": (fail_with(SystemExit(3)), "SystemExit"),
    "KeyboardInterrupt": (fail_with(KeyboardInterrupt()), "KeyboardInterrupt"),
    "GeneratorExit": (fail_with(GeneratorExit()), "GeneratorExit"),
    "CancelledError": (fail_with(asyncio.CancelledError()), "CancelledError"),
    "StopIteration": (fail_with(StopIteration()), "StopIteration"),
    "a bare BaseException": (fail_with(BaseException("bare")), "BaseException"),
    "groups 1,000 deep": (fail_with(nested_groups(1000)), "ExceptionGroup"),
    "endless recursion": (recurse, "RecursionError"),
    "a coroutine returned": (never_awaited, "TaskDefinitionError"),
}


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def run_beside_a_neighbour(queue: PgQueue, mode: str, misbehave: Callable[[], Any]) -> Job:
    """Run a job that does wrong and one that does not; returns the first."""

    @queue.task(name="misbehave", retry=Retry.constant(timedelta(0)), max_attempts=2)
    def wrong() -> Any:
        return misbehave()

    @queue.task(name="behave")
    def right(session: Session) -> int:
        return int(session.scalar(text("SELECT 7")) or 0)

    with queue.session() as session:
        jobs = [wrong.enqueue(session).id, right.enqueue(session).id]
        session.commit()
        Worker(queue, mode=mode, concurrency=2).run_until_empty(timeout=60)
        job, neighbour = (session.get_one(Job, id, populate_existing=True) for id in jobs)
        assert (neighbour.outcome, neighbour.result) == ("succeeded", 7)
        assert queue.check(session) == []
        counts = [
            session.scalar(text(f"SELECT count(*) FROM pgqueue.{table}"))
            for table in ("jobs", "message_queue", "leases")
        ]
        assert counts == [2, 0, 0]
        return job


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED.keys())
def test_a_result_that_cannot_be_kept_takes_nothing_from_the_success(
    queue: PgQueue, mode: str, returned: Callable[[], Any]
) -> None:
    job = run_beside_a_neighbour(queue, mode, returned)

    assert (job.outcome, job.attempts) == ("succeeded", 1)
    assert "unserialisable_result" in job.result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("returned", "kept"), MENDED.items(), ids=["NUL", "half a surrogate"])
def test_a_character_that_cannot_be_stored_is_replaced_in_a_result(
    queue: PgQueue, mode: str, returned: str, kept: str
) -> None:
    job = run_beside_a_neighbour(queue, mode, lambda: returned)

    assert (job.outcome, job.result) == ("succeeded", kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fails", "named"), RAISED.values(), ids=RAISED.keys())
def test_whatever_is_raised_costs_an_attempt_and_is_told(
    queue: PgQueue, mode: str, fails: Callable[[], Any], named: str
) -> None:
    job = run_beside_a_neighbour(queue, mode, fails)

    assert (job.outcome, job.attempts) == ("failed", 2)
    with queue.session() as session:
        attempts = session.query(JobAttempt).filter_by(job_id=job.id).all()
    assert [attempt.outcome for attempt in attempts] == ["failed", "failed"]
    for attempt in attempts:
        assert named in str(attempt.error_type)
        assert len(attempt.error or "") + len(attempt.traceback or "") < 100_000
