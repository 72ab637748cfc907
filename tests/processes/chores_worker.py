"""One worker process: ``python chores_worker.py '{"mode": "lease", ...}'``.

What is under ``"set"`` replaces constants of pgqueue, named ``module:NAME``, before it starts.
"""

import importlib
import json
import logging
import os
import sys
from datetime import timedelta

from chores import queue
from sqlalchemy import create_engine

from pgqueue import Worker

SPANS = ("poll_interval", "grace")


def main(text: str) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s"
    )
    options = json.loads(text)
    for place, value in options.pop("set", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, value)
    for place, seconds in options.pop("set_spans", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, timedelta(seconds=seconds))
    if pool_size := options.pop("pool_size", None):
        queue.bind(create_engine(os.environ["CHORES_URL"], pool_size=pool_size, max_overflow=0))
    queue.notify = options.pop("notify", True)
    for name in SPANS:
        if name in options:
            options[name] = timedelta(seconds=options[name])
    Worker(queue, **options).run()


if __name__ == "__main__":
    main(sys.argv[1])
