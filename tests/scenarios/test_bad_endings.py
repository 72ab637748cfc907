"""Whatever a handler does wrong, its job ends with a reason, and the one beside it succeeds."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from chaos.workers import PATIENCE
from pgqueue import Job, JobAttempt, JobContext, JobStatus, PgQueue, Retry, Worker

pytestmark = pytest.mark.journey

AT_ONCE = Retry.constant(timedelta(0))
SOON = timedelta(seconds=0.3)
LARGEST_ERROR = 100_000
LONGEST_WAIT = 60
UNKEPT = "unserialisable_result"
"""What stands in place of a result that cannot be kept."""
SECRET = "hunter2-in-a-local-variable"
RELEASED = Event()
"""Set when all else has ended: what never returns must not outlive the tests."""


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
    "a generator returned": (lambda: (n for n in range(3)), "TaskDefinitionError"),
}


@dataclass(frozen=True, eq=False)
class Ending:
    """What a handler does wrong, and what is recorded of it.

    ``said`` matches the error of each attempt that went wrong, ``hidden`` no word of it, and
    ``logged`` a line of the log.  A job without an outcome waits.
    """

    name: str
    handler: Callable[..., Any]
    outcome: str | None = "failed"
    attempts: int = 1
    said: str = ""
    result: Any = None
    hidden: str = ""
    logged: str = ""
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def raised(name: str) -> Ending:
    """What is raised, twice, for it is tried again."""
    fail, said = RAISED[name]
    options = {"retry": AT_ONCE, "max_attempts": 2}
    return Ending(name, lambda: fail(), attempts=2, said=said, options=options)


def answered(name: str, answer: Any) -> Ending:
    """A retry function that is of no use: the job waits as if it had none."""

    def delay(attempt: int, error: BaseException) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Ending(
        f"a retry function gives {name}",
        fail_with(ValueError("try again")),
        outcome=None,
        said="ValueError",
        logged="its retry function",
        options={"retry": Retry(delay)},
    )


def raise_beside_a_secret() -> None:
    password = SECRET
    raise RuntimeError(f"a password of {len(password)} characters")


def change_arguments(ctx: JobContext, words: list[str]) -> list[str]:
    words.append("changed")
    if ctx.attempt == 1:
        raise ValueError("once more")
    return words


async def return_at_once() -> int:
    return 7


def never_return() -> None:
    RELEASED.wait(PATIENCE)


def never_return_though_cancelled(session: Session, ctx: JobContext) -> None:
    with Session(session.get_bind().engine) as own, own.begin():
        PgQueue().cancel(own, ctx.job_id)
    RELEASED.wait(PATIENCE)


STUCK = {"timeout": SOON, "max_attempts": 1}
ENDINGS = (
    answered("-1", -1),
    answered("NaN", math.nan),
    answered("None", None),
    answered("an error", ZeroDivisionError()),
    *(Ending(f"result {name}", RETURNED[name], "succeeded", result=UNKEPT) for name in RETURNED),
    *(
        Ending(f"result {text!a}", lambda text=text: text, "succeeded", result=MENDED[text])
        for text in MENDED
    ),
    *map(raised, RAISED),
    Ending(
        "secret in a variable",
        raise_beside_a_secret,
        said="a password of",
        hidden=SECRET,
        options={"max_attempts": 1},
    ),
    Ending("async and never waits", return_at_once, "succeeded", result=7),
    Ending(
        "changes its arguments",
        change_arguments,
        "succeeded",
        attempts=2,
        said="once more",
        result=["fine", "changed"],
        args=(["fine"],),
        options={"retry": AT_ONCE},
    ),
    Ending("never returns", never_return, said="TimeoutError", options=STUCK),
    Ending(
        "never returns though cancelled",
        never_return_though_cancelled,
        "cancelled",
        said="TimeoutError",
        options=STUCK,
    ),
)


def test_whatever_a_handler_does_wrong_its_job_ends_with_a_reason(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgqueue")
    queue = PgQueue(engine)
    good = queue.task(name="good")(lambda: None)
    ids: dict[Ending, int] = {}
    with queue.session() as session, session.begin():
        for number, case in enumerate(ENDINGS):
            task: Any = queue.task(name=f"ending.{number}", **case.options)(case.handler)
            ids[case] = task.enqueue(session, *case.args).id
            good.enqueue(session)

    try:
        Worker(queue, concurrency=8, grace=timedelta(0)).run_until_empty(timeout=60)
    finally:
        RELEASED.set()
        for thread in threading.enumerate():
            if thread.name.startswith("pgqueue"):
                thread.join(60)

    with queue.session() as session:
        outcomes = session.scalars(select(Job.outcome).where(Job.task == "good")).all()
        assert outcomes == ["succeeded"] * len(ENDINGS)
        for number, (case, job_id) in enumerate(ids.items()):
            lines = [line for line in caplog.messages if f"ending.{number}:" in line]
            assert case.logged in "\n".join(lines), case.name
            ended_with_a_reason(session, case, job_id)
        assert queue.check(session) == []


def ended_with_a_reason(session: Session, case: Ending, job_id: int) -> None:
    job = session.get_one(Job, job_id)
    attempts = session.scalars(select(JobAttempt).where(JobAttempt.job_id == job_id)).all()

    assert job.outcome == case.outcome, case.name
    if case.outcome is None:
        assert job.status is JobStatus.PENDING
        wait = func.extract("epoch", Job.run_at - func.clock_timestamp())
        assert session.scalars(select(wait).where(Job.id == job_id)).one() < LONGEST_WAIT
    else:
        assert job.attempts == case.attempts, case.name
    if case.result is UNKEPT:
        assert UNKEPT in job.result
    else:
        assert job.result == case.result
    for attempt in attempts:
        told = f"{attempt.error_type}: {attempt.error}\n{attempt.traceback}"
        assert case.said in told
        assert not case.hidden or case.hidden not in told
        assert len(told) < LARGEST_ERROR
    assert bool(attempts) == bool(case.said), case.name
