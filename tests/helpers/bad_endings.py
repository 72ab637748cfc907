"""What a handler may return or raise that no table can hold as it is."""

import asyncio
from collections.abc import Callable
from typing import Any


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
