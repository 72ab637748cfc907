"""What a worker process runs, forked from a process that has imported it all.

Its options are those of a Worker, with spans in seconds, and what is popped from them below.
``set`` replaces constants of pgqueue, named ``module:NAME``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from chaos import mutations
from chaos.sample_tasks import queue
from pgqueue import Worker
from pgqueue.cli.working import work
from pgqueue.database import keepalive, settings
from pgqueue.worker import liveness, settler
from pgqueue.worker.claiming import crash_isolation

CLONE_NEWNET = 0x40000000
"""Of Linux's sched.h; os.setns came with Python 3.12."""
SPANS = (("poll_interval", 1), ("grace", 30))
NETWORKS = (
    keepalive.NETWORK,
    settings.CLAIMING,
    settler.SETTLING,
    settings.BEATING,
    settings.UPKEEP,
    settings.TIMERS,
    settings.JANITOR,
)


def run(environment: Mapping[str, str], log: Path, options: dict[str, Any]) -> None:
    """Run a worker as the command line does, and end this process as Python ends one."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        _work(options)
    except KeyboardInterrupt:  # before the worker heeds signals; multiprocessing would say 1
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing leaves out
        atexit._run_exitfuncs()  # what an interpreter does at its end


def _work(options: dict[str, Any]) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s"
    )
    if (host := options.pop("host", None)) is not None:
        _move_to(host)
    bugs = mutations.load()  # and with them the tasks of the scenarios
    if bug := os.environ.get("CHAOS_PLANT"):
        bugs[bug](mutations.Patch())
    for name in options.pop("modules", ()):
        importlib.import_module(name)
    for place, value in options.pop("set", {}).items():
        module, _, name = place.partition(":")
        setattr(importlib.import_module(module), name, value)
    if (grace := options.pop("slow_grace", None)) is not None:
        liveness.SLOW_GRACE = timedelta(seconds=grace)
    if (grace := options.pop("fast_grace", None)) is not None:
        liveness.FAST_GRACE = timedelta(seconds=grace)
    if (seconds := options.pop("alone_for", None)) is not None:
        crash_isolation.ALONE_FOR = seconds
    for network in NETWORKS:  # milliseconds and seconds, as they would be sent to the server
        network.update(options.get("network", {}))
    options.pop("network", None)
    queue.notify = options.pop("notify", True)
    # Every slot may need a connection; the default pool has 15.
    engine = options.pop("engine", {"max_overflow": 100})
    queue.bind(create_engine(os.environ["CHAOS_URL"], **engine))
    spans: dict[str, Any] = {
        name: timedelta(seconds=options.pop(name, default)) for name, default in SPANS
    }
    queues = options.pop("queues", ())
    if options.pop("by_command", True):
        work(queue, queues=queues, until_empty=False, **spans, **options)
    else:
        Worker(queue, queues or None, **spans, **options).run()


def _move_to(host: str) -> None:
    """Into the network namespace of a far host, as ``ip netns exec`` does it."""
    with open(f"/var/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {host}")


def main() -> None:
    """The same in a process started by itself, for what is decided at the start of a process:
    ``python -m chaos.worker LOG OPTIONS``, the options as JSON."""
    import json

    run({}, Path(sys.argv[1]), json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
