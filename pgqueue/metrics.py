"""Prometheus metrics of a worker and its health, over HTTP.

Needs the extra ``metrics``.  A worker without ``--metrics-port`` does not import this module.
"""

import socket
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    make_wsgi_app,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from pgqueue import redaction
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import OWN
from pgqueue.errors import PgQueueError
from pgqueue.events import AttemptEnded
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import AttemptEnd
from pgqueue.repository.health import Health, OpenBatches, QueueDepth, WaitingForOthers
from pgqueue.worker import Worker
from pgqueue.worker.health import WorkerHealth

logger = redaction.logger(__name__)

DEPTHS_EVERY = 15.0
"""Seconds for which the depths of the queues are kept: a scrape more often reads them once."""
DEPTHS_WITHIN = "5000"
"""Milliseconds in which PostgreSQL must answer each statement that counts; without an answer, its
metrics and those of the next ones are left out."""
BUCKETS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400)
"""Seconds; jobs last from milliseconds to hours."""

BY_TASK = ("queue", "task")

MOST_QUEUES = 100
"""Queues with series of their own; each series takes memory here and in Prometheus."""
OTHER = "other"
"""The label of all other queues together."""

MOST_CONNECTIONS = 8
"""Connections at once; a further one ends the oldest."""
READ_WITHIN = 5.0
"""Seconds in which a client must send its request."""


class AttemptMetrics:
    """Counts the ended attempts of a worker: a callback of ``queue.on_attempt_end``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, labelnames=BY_TASK, buckets=BUCKETS, registry=registry)
        called = "Attempts whose handler was called; counted when they end."
        self.started = counter("pgqueue_attempts_started", called, BY_TASK)
        ended = "Attempts by their committed outcome."
        self.ended = counter("pgqueue_attempts_ended", ended, (*BY_TASK, "outcome"))
        rescued = "Attempts of other workers that this worker recorded as crashed."
        self.rescued = counter("pgqueue_attempts_rescued", rescued, BY_TASK)
        waited = "From the time a job was due to the start of its handler."
        self.wait = histogram("pgqueue_attempt_wait_seconds", waited)
        self.run = histogram("pgqueue_attempt_run_seconds", "How long handlers ran.")
        self._queues: set[str] = set()

    def __call__(self, event: AttemptEnded) -> None:
        by_task = (self._label_of(event.queue), event.task)
        self.ended.labels(*by_task, event.outcome.value).inc()
        if event.ran is not None:
            self.started.labels(*by_task).inc()
            self.run.labels(*by_task).observe(event.ran.total_seconds())
        elif event.end is AttemptEnd.CRASHED:
            self.rescued.labels(*by_task).inc()
        if event.waited is not None:
            self.wait.labels(*by_task).observe(event.waited.total_seconds())

    def _label_of(self, queue: str) -> str:
        """Name the first queues that had attempts here; several threads may add a few more."""
        is_new = queue not in self._queues and queue != OTHER
        if is_new and len(self._queues) < MOST_QUEUES:
            self._queues.add(queue)
        return queue if queue in self._queues else OTHER


class WorkerCollector(Collector):
    """Reads the state of the worker, the depths of the queues and what is open at each scrape."""

    def __init__(self, worker: Worker, queue: PgQueue) -> None:
        self._worker = worker
        # Now: the threads of the server have no application context of a framework.
        self._engine = queue.engine
        self._counts: list[Metric] = []
        self._read_at = float("-inf")
        self._reading = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return ()  # or the registry would collect, and query, at registration

    def collect(self) -> Iterator[Metric]:
        if (health := self._worker.health()) is not None:
            for name, words, value in (
                ("pgqueue_slots", "Slots of this worker.", health.slots),
                ("pgqueue_slots_busy", "Slots that run a handler.", health.busy),
                (
                    "pgqueue_heartbeat_age_seconds",
                    "Since the last heartbeat.",
                    health.heartbeat_age,
                ),
                ("pgqueue_claim_age_seconds", "Since the last look for jobs.", health.claim_age),
                ("pgqueue_attempts_stale", "Attempts whose lease had passed on.", health.stale),
            ):
                yield GaugeMetricFamily(name, words, value=value)
        yield from self._current_counts()

    def _current_counts(self) -> list[Metric]:
        """What the database counts, read at most once in some seconds; without what cannot be
        read."""
        with self._reading:
            if time.monotonic() - self._read_at >= DEPTHS_EVERY:
                settings = {**OWN, "statement_timeout": DEPTHS_WITHIN}
                self._counts = []
                try:
                    with own_connection(self._engine, settings, purpose="metrics") as connection:
                        health = Health(connection)
                        # The cheapest first: a count that takes too long hides those after it.
                        self._counts += _of_batches(health.open_batches())
                        self._counts += _of_waits(health.waiting_for_others())
                        self._counts += _of_queues(largest(health.depths()))
                except (SQLAlchemyError, PgQueueError) as error:
                    logger.warning("the waiting jobs could not be counted: %s", error)
                self._read_at = time.monotonic()
            return self._counts


def largest(depths: Iterable[QueueDepth]) -> list[QueueDepth]:
    """Return the queues in which the most jobs wait, and the others as one."""
    depths, sizes = list(depths), Counts[str]()
    for depth in depths:
        sizes[depth.queue] += depth.waiting
    sizes.pop(OTHER, None)
    own = {queue for queue, _ in sizes.most_common(MOST_QUEUES)}
    rest: dict[str | None, QueueDepth] = {}
    for depth in depths:
        if depth.queue not in own:
            _, limit, waiting, due, oldest = rest.get(depth.limit, depth._replace(waiting=0, due=0))
            ages = [age for age in (oldest, depth.oldest_due) if age is not None]
            total = (waiting + depth.waiting, due + depth.due, max(ages, default=None))
            rest[limit] = QueueDepth(OTHER, limit, *total)
    return [*(depth for depth in depths if depth.queue in own), *rest.values()]


def _of_batches(found: Iterable[OpenBatches]) -> Iterable[Metric]:
    words = "Batches and workflows that have not ended."
    number = GaugeMetricFamily("pgqueue_batches_open", words, labels=["kind"])
    words = "How long ago the oldest batch or workflow that has not ended was created."
    age = GaugeMetricFamily("pgqueue_oldest_batch_seconds", words, labels=["kind"])
    by_kind = {each.is_workflow: each for each in found}
    for is_workflow, kind in ((False, "batch"), (True, "workflow")):
        each = by_kind.get(is_workflow, OpenBatches(is_workflow, 0, timedelta(0)))
        number.add_metric([kind], each.batches)
        age.add_metric([kind], each.oldest.total_seconds())
    return number, age


def _of_waits(waiting: WaitingForOthers) -> Iterable[Metric]:
    for name, words, value in (
        ("jobs", "Jobs that wait for other jobs.", waiting.jobs),
        ("signals", "Jobs that wait for a signal.", waiting.signals),
    ):
        yield GaugeMetricFamily(f"pgqueue_jobs_waiting_for_{name}", words, value=value)


def _of_queues(depths: Iterable[QueueDepth]) -> Iterable[Metric]:
    waiting = _by("pgqueue_jobs_waiting", "Jobs that wait for a worker, due or not.")
    due = _by("pgqueue_jobs_due", "Jobs that are due and have not started.")
    age = _by("pgqueue_oldest_due_seconds", "How long the oldest due job, blocked or not, is due.")
    blocked = _by("pgqueue_jobs_blocked", "Jobs that wait for room in a limit.", "limit")
    oldest = "How long the oldest job that waits for room in a limit has been due."
    blocked_age = _by("pgqueue_oldest_blocked_seconds", oldest, "limit")
    ages: dict[str, float] = {}
    for depth in depths:
        seconds = depth.oldest_due.total_seconds() if depth.oldest_due else 0.0
        ages[depth.queue] = max(seconds, ages.get(depth.queue, 0.0))
        if depth.limit is None:
            waiting.add_metric([depth.queue], depth.waiting)
            due.add_metric([depth.queue], depth.due)
        else:
            blocked.add_metric([depth.queue, depth.limit], depth.waiting)
            blocked_age.add_metric([depth.queue, depth.limit], seconds)
    for queue, seconds in ages.items():
        age.add_metric([queue], seconds)
    return waiting, due, age, blocked, blocked_age


@contextmanager
def serving(
    worker: Worker,
    queue: PgQueue,
    *,
    port: int,
    host: str = "127.0.0.1",
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[int]:
    """Serve ``/metrics`` and ``/healthz`` of a worker while the block runs.

    Enter it before the worker runs.

    Args:
        worker: The worker.
        queue: Its queue.
        port: The port; 0 lets the system choose.
        host: The address to listen on, "" for all.
        registry: What Prometheus' library has registered there is served too.

    Returns:
        The block, which gets the port.

    Raises:
        OSError: The port is taken.

    Example:
        >>> worker = Worker(queue)
        >>> with serving(worker, queue, port=0) as port:
        ...     counts = worker.run_until_empty(timeout=60)
    """
    attempts, state = AttemptMetrics(registry), WorkerCollector(worker, queue)
    queue.on_attempt_end(attempts)
    registry.register(state)
    application = _application(worker, make_wsgi_app(registry))
    with make_server(host, port, application, _Server, _Handler) as server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            registry.unregister(state)


def _application(worker: Worker, metrics: Callable[..., Any]) -> Callable[..., Any]:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start_response)
            case "/healthz":
                status, text = _answer(worker.health())
            case _:
                status, text = "404 Not Found", "See /metrics and /healthz."
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return application


def _answer(health: WorkerHealth | None) -> tuple[str, str]:
    if health is None:
        return "503 Service Unavailable", "The worker has not started."
    if health.problems:
        return "503 Service Unavailable", "; ".join(health.problems)
    return "200 OK", f"live: {health.busy} of {health.slots} slots are busy"


def _by(name: str, words: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, labels=["queue", *more])


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, and has a bounded number of both.

    A client that sends nothing must take neither threads nor file descriptors from the worker, nor
    keep Prometheus out.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self._open: list[Any] = []
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with suppress(IndexError, OSError):  # it has just ended
                self._open[0].shutdown(socket.SHUT_RDWR)
            self._room.acquire()
        self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._open.remove(request)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("metrics: a connection has failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = READ_WITHIN

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""
