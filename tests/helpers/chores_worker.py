"""What a worker process of these tests runs.

With ``"by_command"`` it ends as the command line has it end, with an exit code that tells of
handlers that were interrupted.  What is under ``"set"`` replaces constants of pgqueue, named
``module:NAME``, before it starts.
"""

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from worker_tasks import queue

from pgqueue import Worker
from pgqueue.cli.working import work

SPANS = ("poll_interval", "grace", "age_after")


def run(environment: Mapping[str, str], log: Path, options: dict[str, Any]) -> None:
    """Run a worker in this forked process, and end it as Python ends one it has started."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        _work(options)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing leaves out
        atexit._run_exitfuncs()  # what an interpreter does at its end


def _work(options: dict[str, Any]) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s"
    )
    queue.bind(os.environ["CHAOS_URL"])
    for module in options.pop("modules", ()):
        importlib.import_module(module)  # tasks besides those of worker_tasks
    for place, value in options.pop("set", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, value)
    for place, seconds in options.pop("set_spans", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, timedelta(seconds=seconds))
    if pool_size := options.pop("pool_size", None):
        queue.bind(create_engine(os.environ["CHAOS_URL"], pool_size=pool_size, max_overflow=0))
    queue.notify = options.pop("notify", True)
    for name in SPANS:
        if name in options:
            options[name] = timedelta(seconds=options[name])
    if options.pop("by_command", False):
        work(queue, queues=(), until_empty=False, **options)
    else:
        Worker(queue, **options).run()
