"""``pgqueue worker``: the worker process, from its command line to its exit code."""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Unpack, get_args

import click
from click.core import ParameterSource

from pgqueue import redaction
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.nodes import chosen_nodes, nodes_option
from pgqueue.cli.options import LONGEST_AGE, Seconds, on_app
from pgqueue.cli.worker_processes import (
    ProcessGroup,
    end_with_parent,
    is_under_parent,
    place_under_parent,
)
from pgqueue.errors import OptionError
from pgqueue.job_queue import PgQueue
from pgqueue.models import DEFAULT_QUEUE
from pgqueue.nodes import Node
from pgqueue.options import OPTIONS_OF_WORKER, OptionsOfWorker, WorkerOptions
from pgqueue.worker import Worker
from pgqueue.worker.worker import report_signals, stop_signals

logger = redaction.logger(__name__)

NODE = "PGQUEUE_NODE"
"""In the environment of a worker that ``--nodes`` starts: the URL of its node."""

INTERRUPTED = 3
"""The exit code of a worker if some handlers have not ended within the grace period."""
FOR_THREADS = 0.5
"""Seconds for which threads that handlers have started may delay the end of the process."""
FOR_EXIT = 15.0
"""Seconds for what the application does at Python's exit."""


Queues = Sequence[str] | Mapping[str, int] | None


def as_queues(_ctx: click.Context, _parameter: click.Parameter, queues: tuple[str, ...]) -> Queues:
    """The callback of --queues: the names of A,B, or the weights of A=3,B=1."""
    names = [name.strip() for listed in queues for name in listed.split(",") if name.strip()]
    if queues and not names:
        raise click.UsageError("--queues names no queue")
    if not any("=" in name for name in names):
        return names or None
    weights: dict[str, int] = {}
    for item in names:
        name, _, weight = (part.strip() for part in item.partition("="))
        if not weight.isascii() or not weight.isdigit():
            raise click.UsageError(
                f"--queues {item}: give each queue a weight, or none, e.g. mail=3,reports=1"
            )
        if name in weights:
            raise click.UsageError(f"--queues names {name} twice; give it one weight")
        weights[name] = int(weight)
    return weights


def options_of_worker(command: Any) -> Any:
    """Give the command the options of a worker, which are checked where they are declared."""
    for each in reversed(OPTIONS_OF_WORKER):
        if each.name == "queues":
            continue
        flag = "--" + each.name.replace("_", "-")
        default, kinds = each.default, get_args(each.type) or (each.type,)
        help = each.metadata["help"].replace("`", "")
        if bool in kinds:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        type = {bool: bool, int: int, timedelta: Seconds(most=LONGEST_AGE)}.get(kinds[0])
        command = click.option(
            flag,
            type=type or click.Choice(get_args(kinds[0])),
            default=default.total_seconds() if isinstance(default, timedelta) else default,
            show_default=each.metadata["by_default"] or True,
            help=help[0].upper() + help[1:] + ".",
        )(command)
    return command


def as_formatter(
    _ctx: click.Context, _parameter: click.Parameter, log_format: str
) -> logging.Formatter:
    """The callback of --log-format."""
    if log_format == "text":
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        from pgqueue.cli.json_lines import JsonLines
    except ImportError as error:
        raise click.ClickException(
            "--log-format json needs python-json-logger: pip install 'sqlalchemy-pgqueue[json]'"
        ) from error
    return JsonLines()


@click.command()
@click.option(
    "--queues",
    multiple=True,
    metavar="A,B",
    callback=as_queues,
    help="Queues to serve, also as A*; those of tasks by default.  With weights: A=3,B=1.",
)
@options_of_worker
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    callback=as_formatter,
    show_default=True,
    help="How log lines are written; json needs the extra json.",
)
@click.option("--until-empty", is_flag=True, help="Stop when no job is due or running.")
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Worker processes, of each node with --nodes; one that dies is replaced.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve /metrics for Prometheus and /healthz; with --processes, on as many ports.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where --metrics-port listens; 0.0.0.0 for other hosts.",
)
@nodes_option
@on_app
def worker(
    given: CliState,
    /,
    queues: Queues,
    processes: int,
    nodes: str | None,
    until_empty: bool,
    log_format: logging.Formatter,
    metrics_port: int | None,
    metrics_host: str,
    **options: Unpack[WorkerOptions],
) -> None:
    """Run jobs until SIGTERM or Ctrl-C; a second signal ends the grace period.

    After the signal, starts no more jobs and lets the running ones finish.  Logs to stderr.

    \b
    Example:  pgqueue --app shop.jobs:queue worker --queues mail,default --concurrency 20
    """
    lines = _log_to_stderr(log_format)
    if given.replaced_handler is not None:
        of_app, handler = given.replaced_handler
        of_app.removeHandler(handler)  # or each line of the application is written twice
    if given.is_verbose:
        logging.getLogger("pgqueue").setLevel(logging.DEBUG)
    # A wrong command line is refused before the application is loaded, and before workers start.
    if given.queue is None:
        given.named_application()
    try:
        OptionsOfWorker.checked(queues or [DEFAULT_QUEUE], options)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    if is_under_parent():
        end_with_parent()
    else:
        places: list[dict[str, str]] = [{}] * processes
        if nodes is not None:
            given.queue = given.application()  # once: it may be a function that makes the queue
            chosen = chosen_nodes(given.queue, nodes)
            urls = [node.url.render_as_string(hide_password=False) for node in chosen]
            places = [{NODE: url} for url in urls] * processes
        if len(places) > 1:
            may_end = until_empty or options.get("max_idle") is not None
            sys.exit(ProcessGroup(places, until_empty=may_end).run())
        os.environ.update(places[0])
    queue = given.application()
    if (url := os.environ.pop(NODE, None)) is not None:
        click.get_current_context().with_resource(queue.bound_to(url))
        logger.info("worker %d works on node %s", os.getpid(), Node(queue.engine.url).name)
    source = click.get_current_context().get_parameter_source("log_format")
    if source is ParameterSource.COMMANDLINE and lines not in logging.getLogger().handlers:
        logger.warning(
            "--log-format has no effect, because the application has root handlers of its own: "
            "give them a formatter, such as pythonjsonlogger.json.JsonFormatter"
        )
    work(
        queue,
        queues=queues,
        until_empty=until_empty,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        **options,
    )


def _log_to_stderr(formatter: logging.Formatter) -> logging.Handler:
    """Give the root logger a handler, unless the application has done it."""
    lines, root = logging.StreamHandler(), logging.getLogger()
    lines.setFormatter(formatter)
    # Libraries add NullHandlers, which write nothing.
    if all(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(lines)
        root.setLevel(logging.INFO)
    return lines


def work(
    queue: PgQueue,
    *,
    queues: Queues,
    until_empty: bool,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    **options: Unpack[WorkerOptions],
) -> None:
    """Run a worker to its end, then end the process."""
    if not queue.tasks:
        raise click.ClickException(
            "The app registers no tasks, so a worker has nothing to run: import the modules that "
            "define tasks in the module of --app"
        )
    worker = Worker(queue, queues or None, **options)
    logger.info("worker %d starts; number of tasks: %d", os.getpid(), len(queue.tasks))
    code = 1
    try:
        with ExitStack() as stack:
            if metrics_port is not None:
                port = metrics_port + place_under_parent()
                _serve_metrics(stack, worker, queue, metrics_host, port)
            _run(worker, until_empty=until_empty)
        code = 0
    finally:
        was_interrupted = worker.interrupt()
        code = code or (INTERRUPTED if was_interrupted else 0)
        _end_for_certain(code)
    if code:
        sys.exit(code)


def _serve_metrics(stack: ExitStack, worker: Worker, queue: PgQueue, host: str, port: int) -> None:
    try:
        from pgqueue.metrics import serving
    except ImportError as error:
        raise click.ClickException(
            "--metrics-port needs prometheus-client: pip install 'sqlalchemy-pgqueue[metrics]'"
        ) from error
    try:
        stack.enter_context(serving(worker, queue, port=port, host=host))
    except (OSError, OverflowError) as error:
        raise click.ClickException(
            f"Port {port} cannot be used for metrics: {error}; give another "
            "--metrics-port or --metrics-host"
        ) from error
    logger.info("worker %d serves /metrics and /healthz on port %d", os.getpid(), port)


def _run(worker: Worker, *, until_empty: bool) -> None:
    counts: dict[str, int] | None = None
    try:
        if until_empty:
            counts = worker.run_until_empty()
        else:
            worker.run()
    finally:  # a further signal must not end the process before its last attempts are settled
        for number in [*stop_signals(), *report_signals()]:
            signal.signal(number, signal.SIG_IGN)
    if counts is None:
        logger.info("worker %d has stopped", os.getpid())
        return
    ended = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number)
    click.echo(ended or "nothing to do")


def _end_for_certain(code: int) -> None:
    """End the process even if Python waits for a thread that a handler has started.

    All attempts are settled by then.
    """
    threads_have_ended = threading.Event()
    atexit.register(threads_have_ended.set)  # called when Python has waited for them

    def end() -> None:
        if threads_have_ended.wait(FOR_THREADS):
            time.sleep(FOR_EXIT)
        logger.warning(
            "worker %d exits although threads that handlers have started still run", os.getpid()
        )
        os._exit(code)

    threading.Thread(target=end, name="pgqueue-end", daemon=True).start()


COMMANDS = (worker,)
