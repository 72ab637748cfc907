"""Put before a command that runs a module: ``python -m chaos.wrong_clock FILE python -m MODULE``.
The wall clock is then wrong by as many seconds as the file says at the moment, and ``+0 x2`` has
it run at twice the speed.

The clock that measures durations stays right, as on a machine whose time somebody has set.  It
has to come before everything that imports ``datetime``, and so does as little as possible.
"""

import datetime
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    _self, offset, _python, _m, module, *arguments = sys.argv
    put_wrong(offset_of(Path(offset)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def offset_of(file: Path) -> Callable[[], float]:
    began = time.monotonic()

    def offset() -> float:
        seconds, *speed = file.read_text().split()
        gained = sum(float(times.removeprefix("x")) - 1 for times in speed)
        return float(seconds) + gained * (time.monotonic() - began)

    return offset


def put_wrong(offset: Callable[[], float]) -> None:
    """Replace what tells the time in Python."""
    right = time.time
    right_ns = time.time_ns
    real = datetime.datetime

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class WrongDatetime(real, metaclass=Meta):  # type: ignore[valid-type, misc]  # a class it is
        __slots__ = ()  # of the size that modules in C expect

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    time.time = lambda: right() + offset()
    time.time_ns = lambda: right_ns() + int(offset() * 1_000_000_000)
    datetime.datetime = WrongDatetime  # type: ignore[misc]  # what this module is for


if __name__ == "__main__":
    main()
