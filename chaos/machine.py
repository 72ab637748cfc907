"""The machine itself: whether it stood still while a scenario counted seconds."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from threading import Event, Thread

EVERY = 0.5
REMEMBERED = 120
"""Looks: the last minute."""


class Machine:
    """A thread that wakes twice a second and writes one byte to the disk.

    Bounds of time are the scenarios' own; this only tells, when one is missed, whether everything
    else on the machine waited as well.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "machine"
        self._looks: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._stopping = Event()
        self._thread = Thread(target=self._work, name="machine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def __str__(self) -> str:
        late, write = map(max, zip(*self._looks or [(0.0, 0.0)], strict=True))
        return (
            f"the machine, in its last {EVERY * len(self._looks):g} s: a thread woke up to"
            f" {late:.2f} s late, a byte took up to {write:.2f} s to reach the disk"
        )

    def _work(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            while True:
                slept_at = time.monotonic()
                if self._stopping.wait(EVERY):
                    return
                woken_at = time.monotonic()
                file.write(b".")
                os.fsync(file.fileno())
                written_at = time.monotonic()
                self._looks.append((woken_at - slept_at - EVERY, written_at - woken_at))
