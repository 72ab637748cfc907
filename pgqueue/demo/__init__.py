"""The demo.  Read :mod:`pgqueue.demo.indexer` first: it is the whole application."""

import os
import sys

DEMO_SCHEMA = "pgqueue_demo"


def run(*, url: str | None, workers: int, limit: int, seed: int, keep: bool) -> None:
    """Run the demo in a schema of its own; exit with 1 if a check of its summary fails."""
    if os.environ.get("PGQUEUE_SCHEMA") != DEMO_SCHEMA:
        restart(sys.argv[1:])
    from pgqueue.demo.steps import run_steps

    if not run_steps(url=url, workers=workers, limit=limit, seed=seed, keep=keep):
        sys.exit(1)


def restart(arguments: list[str]) -> None:
    """Start ``pgqueue`` anew in this process: the name of the schema is read once, at import."""
    os.environ["PGQUEUE_SCHEMA"] = DEMO_SCHEMA
    os.execv(sys.executable, [sys.executable, "-m", "pgqueue", *arguments])  # noqa: S606
