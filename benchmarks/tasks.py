"""The queue and the tasks that are measured; imported by the workers too."""

import os
import time
from pathlib import Path

from pgqueue import PgQueue

queue = PgQueue(os.environ["BENCHMARK_URL"]) if "BENCHMARK_URL" in os.environ else PgQueue()


@queue.task
def nothing(n: int) -> None:
    """What a queue costs by itself."""


@queue.task
def note_start(path: str, enqueued_at: float) -> None:
    """How long a job waits for an idle worker; one clock for all processes of a machine."""
    waited = time.monotonic() - enqueued_at
    with Path(path).open("a") as file:
        file.write(f"{waited}\n")
