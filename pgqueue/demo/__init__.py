"""The demo.  Begin with :mod:`pgqueue.demo.indexer`, which is the application."""

import os
import sys

DEMO_SCHEMA = "pgqueue_demo"


def run(*, url: str | None, workers: int, limit: int, seed: int, keep: bool) -> None:
    """Run the demo in a separate schema.  Exit with 1 if a check of its summary fails."""
    if os.environ.get("PGQUEUE_SCHEMA") != DEMO_SCHEMA:
        restart(sys.argv[1:])
    from pgqueue.demo.steps import run_steps

    if not run_steps(url=url, workers=workers, limit=limit, seed=seed, keep=keep):
        sys.exit(1)


def restart(arguments: list[str]) -> None:
    """Restart ``pgqueue`` in this process: it reads the name of the schema once, at import."""
    os.environ["PGQUEUE_SCHEMA"] = DEMO_SCHEMA
    os.execv(sys.executable, [sys.executable, "-m", "pgqueue", *arguments])  # noqa: S606
