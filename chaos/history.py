"""The history: every worker writes what it does to a file of its own, which survives its death."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START, END = "start", "end"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history."""

    worker: str
    pid: int
    at: float
    """Seconds of the machine's monotonic clock, which is the same for all processes."""
    word: str
    job: int
    attempt: int
    details: dict[str, Any]


class Pen:
    """Writes the history of one worker.  Each line is one write to a file opened for appending."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._worker = worker
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(directory / f"{worker}.history", flags, 0o666)

    def write(self, word: str, *, job: int, attempt: int, **details: Any) -> None:
        line = [self._worker, os.getpid(), time.monotonic(), word, job, attempt, details]
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read(directory: Path) -> list[Event]:
    """Every event of every worker, in the order of time.

    Of a line that is being written a reader may see the first part; it is read the next time.
    """
    events = []
    for file in directory.glob("*.history"):
        *lines, _unfinished = file.read_bytes().split(b"\n")
        events += [Event(*json.loads(line)) for line in lines]
    return sorted(events, key=lambda event: event.at)
