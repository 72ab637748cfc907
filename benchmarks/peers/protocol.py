"""What an adapter fills in, so that every queue is measured in the same way.

Standard library only: it is imported in the environments of other queues.  An adapter file ends
with ``main(TheClass)`` and is started in two roles: ``serve`` answers commands, JSON lines on its
standard input and output; ``work`` is a worker that runs until SIGTERM.  Times are CLOCK_MONOTONIC,
which is one clock for all processes of a machine.
"""

import json
import mmap
import os
import struct
import sys
import time
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

START = struct.Struct("=dQ")


class Starts:
    """For each job when its handler was first called, and how often: a mapped file that the
    handlers of all processes write."""

    def __init__(self, path: str | Path, jobs: int | None = None) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if jobs else 0)
        file = os.open(path, flags)
        if jobs:
            os.ftruncate(file, jobs * START.size)
        self.jobs = jobs or os.fstat(file).st_size // START.size
        self._map = mmap.mmap(file, self.jobs * START.size)
        os.close(file)

    def add(self, number: int) -> None:
        first, times = self.of(number)
        START.pack_into(
            self._map, number * START.size, first if times else time.monotonic(), times + 1
        )

    def of(self, number: int) -> tuple[float, int]:
        first, times = START.unpack_from(self._map, number * START.size)
        return first, times


_starts: Starts | None = None


def note_start(number: int) -> None:
    """What the handler of every queue does: no more than this."""
    global _starts
    if _starts is None:
        _starts = Starts(os.environ["BENCHMARK_STARTS"])
    _starts.add(number)


def option(name: str, default: Any) -> Any:
    return json.loads(os.environ.get("BENCHMARK_OPTIONS") or "{}").get(name, default)


def url() -> str:
    return os.environ["BENCHMARK_URL"]


def wait_for_the_others() -> None:
    """Called by a worker when its imports are done: all workers begin at the same moment."""
    directory = Path(os.environ["BENCHMARK_BARRIER"])
    (directory / f"ready-{os.getpid()}").touch()
    while not (directory / "go").exists():
        time.sleep(0.002)


class NotOffered(Exception):
    """A case asks for what this adapter does not do."""

    def __init__(self, adapter: "Adapter", method: str) -> None:
        super().__init__(
            f"{type(adapter).__name__} has no {method}(): write it, or leave the queue out of"
            " the case."
        )


class Adapter(ABC):
    """One queue.  What is counted is counted in the database, not by the library.

    An adapter may leave out what no case asks of it: to enqueue one, to enqueue many, to work.
    """

    @abstractmethod
    def setup(self) -> None:
        """Make the tables, in an empty database."""

    @abstractmethod
    def empty(self) -> None:
        """Leave no job."""

    def connect(self) -> None:  # noqa: B027 - some have nothing to do
        """Get ready to enqueue."""

    def enqueue(self, number: int) -> Any:
        """One job, committed when this returns."""
        raise NotOffered(self, "enqueue")

    def enqueue_bulk(self, first: int, jobs: int) -> None:
        """Many jobs, by the fastest call there is."""
        raise NotOffered(self, "enqueue_bulk")

    @abstractmethod
    def left(self) -> int:
        """How many jobs are not finished."""

    def work(self) -> None:
        """Run jobs until SIGTERM."""
        raise NotOffered(self, "work")

    def enqueue_each(self, first: int, jobs: int, gap: float) -> dict[str, Any]:
        """One by one, the calls ``gap`` seconds apart; when each of them returned."""
        returned = []
        began = time.monotonic()
        for number in range(first, first + jobs):
            self.enqueue(number)
            returned.append(time.monotonic())
            if gap:
                time.sleep(gap)
        return {"began": began, "returned": returned}

    # --- the commands

    def do_setup(self) -> None:
        self.setup()
        self.connect()

    def do_empty(self) -> None:
        self.empty()

    def do_left(self) -> int:
        return self.left()

    def do_each(self, first: int, jobs: int, gap: float) -> dict[str, Any]:
        return self.enqueue_each(first, jobs, gap)

    def do_bulk(self, first: int, jobs: int) -> float:
        began = time.monotonic()
        self.enqueue_bulk(first, jobs)
        return time.monotonic() - began


def main(adapter_class: type[Adapter]) -> None:
    adapter = adapter_class()
    if sys.argv[1:] == ["work"]:
        adapter.work()
        return
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"done": getattr(adapter, f"do_{command.pop('do')}")(**command)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Tables:
    """Plain SQL by psycopg beside the queue's own calls, for looking and for emptying."""

    def sql(self, statement: str, *parameters: Any) -> Any:
        import psycopg

        if not hasattr(self, "_looking"):
            self._looking = psycopg.connect(url(), autocommit=True)
        cursor = self._looking.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else None


class AsyncClient(Adapter):
    """Its calls that enqueue are coroutines: they run on one event loop."""

    def run(self, coroutine: Any) -> Any:
        import asyncio

        if not hasattr(self, "_loop"):
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def enqueue_each(self, first: int, jobs: int, gap: float) -> dict[str, Any]:
        import asyncio

        async def each() -> dict[str, Any]:
            returned = []
            began = time.monotonic()
            for number in range(first, first + jobs):
                await self.enqueue(number)
                returned.append(time.monotonic())
                if gap:
                    await asyncio.sleep(gap)
            return {"began": began, "returned": returned}

        found: dict[str, Any] = self.run(each())
        return found
