"""The worker as a process: from its command line to its exit code."""

import os
import threading
from datetime import timedelta
from typing import Any

import click

from pgqueue import redaction
from pgqueue.job_queue import PgQueue
from pgqueue.worker import Worker

logger = redaction.logger(__name__)

PATIENCE = 15.0
"""Seconds for the last outcomes to be written when handlers do not end."""


def work(
    queue: PgQueue,
    *,
    queues: tuple[str, ...],
    grace: timedelta,
    poll_interval: timedelta,
    until_empty: bool,
    **options: Any,
) -> None:
    """Run a worker to its end, and have the process end with it."""
    if not queue.tasks:
        raise click.ClickException(
            "The app registers no tasks: have the module of --app import those that define them"
        )
    names = [name.strip() for listed in queues for name in listed.split(",") if name.strip()]
    if queues and not names:
        raise click.UsageError("--queues names no queue")
    worker = Worker(queue, names or None, grace=grace, poll_interval=poll_interval, **options)
    logger.info("worker %d starts: %d tasks", os.getpid(), len(queue.tasks))
    code = 1
    try:
        _run(worker, until_empty=until_empty)
        code = 0
    finally:
        _end_for_certain(code)


def _run(worker: Worker, *, until_empty: bool) -> None:
    if not until_empty:
        worker.run()
        logger.info("worker %d has stopped", os.getpid())
        return
    counts = worker.run_until_empty()
    ended = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number)
    click.echo(ended or "nothing to do")


def _end_for_certain(code: int) -> None:
    """End the process even if a handler's thread does not.

    What such a thread runs is given back at interpreter exit, which would otherwise wait for
    every thread a handler has started.
    """
    last_resort = threading.Timer(PATIENCE, os._exit, args=(code,))
    last_resort.daemon = True
    last_resort.start()
