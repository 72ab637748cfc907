"""The command ``procrastinate``: a worker, deferring, and the tables."""

import argparse
import importlib
import logging
import os
import sys
from datetime import datetime
from typing import Any

from .app import App
from .exceptions import AlreadyEnqueued, TaskNotFound

logger = logging.getLogger("procrastinate.cli")


def application(path: str) -> App:
    """Return the application at a path with dots."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, App):
        raise argparse.ArgumentTypeError(f"{path} is no App")
    return found


def queues(names: str) -> list[str] | None:
    """Return the names; without any, all queues are served."""
    return [name.strip() for name in names.split(",") if name.strip()] or None


def parser() -> argparse.ArgumentParser:
    """Return the parser.  An option that is not given is left out of the namespace."""
    own = argparse.ArgumentParser("procrastinate", argument_default=argparse.SUPPRESS)
    own.add_argument("-a", "--app", default=os.environ.get("PROCRASTINATE_APP"))
    verbose = int(os.environ.get("PROCRASTINATE_VERBOSE", 0))
    own.add_argument("-v", "--verbose", action="count", default=verbose)
    commands = own.add_subparsers(dest="command", required=True)

    worker = commands.add_parser("worker", argument_default=argparse.SUPPRESS)
    worker.add_argument("-n", "--name")
    worker.add_argument("-q", "--queues", type=queues)
    worker.add_argument("-c", "--concurrency", type=int)
    worker.add_argument("-p", "--fetch-job-polling-interval", type=float)
    worker.add_argument("--shutdown-graceful-timeout", type=float)
    worker.add_argument("--one-shot", dest="wait", action="store_false")

    defer = commands.add_parser("defer", argument_default=argparse.SUPPRESS)
    defer.add_argument("task")
    defer.add_argument("kwargs", nargs="?", default="{}")
    defer.add_argument("--queue")
    defer.add_argument("--lock")
    defer.add_argument("--queueing-lock")
    defer.add_argument("--priority", type=int)
    defer.add_argument("-i", "--ignore-already-enqueued", action="store_true", default=False)
    defer.add_argument(
        "--unknown", action="store_true", default=is_set("PROCRASTINATE_DEFER_UNKNOWN")
    )
    time = defer.add_mutually_exclusive_group()
    time.add_argument("--at", dest="schedule_at", type=datetime.fromisoformat)
    time.add_argument("--in", dest="schedule_in", type=lambda seconds: {"seconds": int(seconds)})

    schema = commands.add_parser("schema")
    schema.add_argument("--apply", action="store_true", required=True)
    return own


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower()[:1] in ("1", "y", "t")


def defer(app: App, *, task: str, kwargs: str, unknown: bool, ignore: bool, **options: Any) -> int:
    """Defer one job; returns the exit code."""
    try:
        deferrer = app.configure_task(task, allow_unknown=unknown, **options)
        id = deferrer.defer(**app.connector.loads(kwargs))
    except (AlreadyEnqueued, TaskNotFound) as error:
        print(error, file=sys.stderr)
        return 0 if ignore and isinstance(error, AlreadyEnqueued) else 1
    print(f"job {id} of {task}", file=sys.stderr)
    return 0


def main() -> int:
    """Run one command; returns the exit code."""
    given = vars(parser().parse_args())
    level = logging.DEBUG if given.pop("verbose") else logging.INFO
    logging.basicConfig(level=level, format=logging.BASIC_FORMAT)
    logger.debug("Log level set to %s", logging.getLevelName(level))
    sys.path.insert(0, os.getcwd())
    path, command = given.pop("app"), given.pop("command")
    if path is None:
        print("name the application: --app, or PROCRASTINATE_APP", file=sys.stderr)
        return 2
    app = application(path)
    match command:
        case "worker":
            app.run_worker(**given)
        case "defer":
            return defer(app, ignore=given.pop("ignore_already_enqueued"), **given)
        case "schema":
            app.queue.upgrade()
    return 0
