"""Results and errors that no table could hold as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, note, queue
from chaos.scenario import Size, scenario
from pgqueue import JobContext
from pgqueue.outcomes import ErrorReport

SECRET = "hunter2-in-a-local-variable"
LARGEST_ERROR = 64 * 1024
LARGEST_RESULT = 1024 * 1024
MEBIBYTE = 1024 * 1024


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Lying(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def groups(levels: int) -> BaseException:
    error: BaseException = ValueError("innermost")
    for level in range(levels):
        error = BaseExceptionGroup(f"level {level}", [error])
    return error


def raise_(error: BaseException) -> None:
    raise error


def with_a_secret() -> None:
    password = SECRET
    raise RuntimeError(f"a password of {len(password)} characters")


def from_deep_within(levels: int = 500) -> None:
    if levels:
        from_deep_within(levels - 1)
    raise RuntimeError("at the bottom")


def generator() -> Iterator[int]:
    yield 1


RESULTS: dict[str, Callable[[], Any]] = {
    "77 NUL": lambda: "a\0b",
    "77 NaN": lambda: {"value": float("nan")},
    "77 infinity": lambda: [float("inf")],
    "77 half a pair": lambda: "\ud800",
    "77 half a pair as a key": lambda: {"\udfff\0": 1},
    "78 more than a result may be": lambda: "x" * (16 * MEBIBYTE),
    "78 many": lambda: list(range(400_000)),
    "79 an object": lambda: object(),
    "79 a class": lambda: Untellable,
    "79 bytes": lambda: b"\0\xff",
    "79 too many digits": lambda: 10**5000,
    "79 deep": lambda: deep(5000),
    "79 endless": endless,
    "79 keys that are no text": lambda: {1: 2, None: 3, (): 4},
    "79 a time": lambda: datetime(2026, 1, 1),
}
"""What a handler returns; its job has succeeded."""

ERRORS: dict[str, Callable[[], Any]] = {
    "79 a generator": generator,
    "80 huge": lambda: raise_(RuntimeError("x" * (16 * MEBIBYTE))),
    "80 NUL": lambda: raise_(RuntimeError("a\0b")),
    "80 half a pair": lambda: raise_(RuntimeError("\ud800 and \udfff")),
    "80 a secret": with_a_secret,
    "81 untellable": lambda: raise_(Untellable()),
    "81 no text": lambda: raise_(Lying()),
    "81 leaves": lambda: raise_(Exiting()),
    "82 SystemExit": lambda: raise_(SystemExit(3)),
    "82 KeyboardInterrupt": lambda: raise_(KeyboardInterrupt()),
    "82 GeneratorExit": lambda: raise_(GeneratorExit()),
    "82 CancelledError": lambda: raise_(asyncio.CancelledError()),
    "82 StopIteration": lambda: next(iter(())),
    "82 its own": lambda: raise_(type("Own", (BaseException,), {})()),
    "82 a name with NUL": lambda: raise_(type("O\ud800wn", (Exception,), {})()),
    "83 groups in groups": lambda: raise_(groups(1000)),
    "84 recursion": lambda: from_deep_within(10**9),
    "84 many frames": from_deep_within,
    "85 a coroutine": lambda: asyncio.sleep(0),
}
"""What a handler raises, by the numbers of the bad inputs; its job fails, with words."""


@queue.task(retry=AT_ONCE, max_attempts=1)
def give_back(ctx: JobContext, name: str) -> Any:
    note(START, ctx)
    return RESULTS[name]()


@queue.task(retry=AT_ONCE, max_attempts=1)
def go_wrong(ctx: JobContext, name: str) -> Any:
    note(START, ctx)
    return ERRORS[name]()


@mutation
def errors_are_stored_as_they_are(patch: Patch) -> None:
    """An error's words are stored without a limit, and with characters that no text can hold."""
    from pgqueue.handler import outcome

    def as_it_is(error: BaseException) -> ErrorReport:
        return ErrorReport(type(error).__name__, str(error), repr(error))

    patch.set(outcome, "report", as_it_is)


@mutation
def results_are_stored_as_they_are(patch: Patch) -> None:
    """A result is handed to the settle without a look."""
    from pgqueue.handler import outcome

    patch.set(outcome, "storable_result", lambda result: result)


@scenario(
    promises="P6",
    research="T31",
    full=Size(jobs=200, workers=2, faults=5),
    short=Size(jobs=20, workers=1, faults=1),
    mutated={
        "errors_are_stored_as_they_are": "F1|not within|has ended|stored",
        "results_are_stored_as_they_are": "F1|not within|has ended|stored",
    },
)
def results_and_errors_of_every_kind(environment: Environment, size: Size) -> None:
    """Results and errors too large or too odd to store: each attempt's end is recorded, bounded."""
    good: list[int] = []
    bad: list[int] = []
    good += environment.enqueue(give_back, [(name,) for name in RESULTS] * size.faults)
    bad += environment.enqueue(go_wrong, [(name,) for name in ERRORS] * size.faults)
    good += environment.enqueue(give_back, [("79 a time",)] * size.jobs)
    workers = environment.workers(2 * size.workers, concurrency=2)
    _until_ended(environment, workers.members)
    _are_bounded(environment)
    workers.stop()
    environment.check(succeeded=len(good), failed=len(bad))


def _until_ended(environment: Environment, members: list[Any]) -> None:
    def is_over() -> bool:
        alive = all(member.is_running for member in members)
        environment.expect(alive, "what a handler returned or raised has ended a worker")
        return environment.unfinished() == 0

    environment.until(is_over, seconds=30, what="all jobs end")


def _are_bounded(environment: Environment) -> None:
    largest = """
        SELECT max(octet_length(concat(error_type, error, traceback))),
               count(*) FILTER (WHERE concat(error, traceback) LIKE :secret),
               count(*) FILTER (WHERE error IS NULL)
        FROM pgqueue.job_attempts
    """
    size, secrets, silent = environment.rows(largest, secret=f"%{SECRET}%")[0]
    environment.expect(size <= LARGEST_ERROR, f"an error of {size} bytes was stored")
    environment.expect(secrets == 0, "a local variable was stored")
    environment.expect(silent == 0, f"{silent} errors were stored without words")
    result = environment.scalar("SELECT max(octet_length(result::text)) FROM pgqueue.jobs")
    environment.expect(result <= 2 * LARGEST_RESULT, f"a result of {result} bytes was stored")
