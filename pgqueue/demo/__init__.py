"""The demo: real work on real files, and a worker killed in the middle of it.

Begin with :mod:`pgqueue.demo.indexer`: it is the application, and all that one has to write.
The rest is the stage around it.
"""

import os
import sys
from collections.abc import Sequence

SCHEMA_OF_DEMO = "pgqueue_demo"


def run(*, url: str | None, workers: int, limit: int, seed: int, keep: bool) -> None:
    """Perform the demo, in a schema of its own."""
    from pgqueue.models import SCHEMA

    if SCHEMA != SCHEMA_OF_DEMO:
        numbers = [f"--workers={workers}", f"--limit={limit}", f"--seed={seed}"]
        start_over([*numbers, *([f"--url={url}"] if url else []), *(["--keep"] if keep else [])])
    from pgqueue.demo.stage import perform

    perform(url=url, workers=workers, limit=limit, seed=seed, keep=keep)


def start_over(arguments: Sequence[str]) -> None:
    """Become a process whose pgqueue tables lie in the demo's schema.

    The schema's name is read once, at import, and your tables are to stay out of this.
    """
    sys.stdout.flush()
    environment = {**os.environ, "PGQUEUE_SCHEMA": SCHEMA_OF_DEMO}
    command = [sys.executable, "-m", "pgqueue", "demo", *arguments]
    os.execve(sys.executable, command, environment)  # noqa: S606  # no shell is wanted
