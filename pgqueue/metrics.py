"""Prometheus metrics of a worker and its health, over HTTP.

Needs the extra ``metrics``.  A worker without ``--metrics-port`` does not import this module.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from pgqueue.connections.opening import own_connection
from pgqueue.connections.settings import OWN
from pgqueue.events import AttemptEnded
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import AttemptEnd
from pgqueue.repository import Health
from pgqueue.repository.health import QueueDepth
from pgqueue.worker import Worker
from pgqueue.worker.health import WorkerHealth

logger = redaction.logger(__name__)

DEPTHS_EVERY = 15.0
"""Seconds for which the depths of the queues are kept: a scrape more often reads them once."""
DEPTHS_WITHIN = "5000"
"""Milliseconds in which PostgreSQL must count the waiting jobs, or their metrics are left out."""
BUCKETS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400)
"""Seconds; jobs last from milliseconds to hours."""

BY_TASK = ("queue", "task")


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

    def __call__(self, event: AttemptEnded) -> None:
        by_task = (event.queue, event.task)
        self.ended.labels(*by_task, event.outcome.value).inc()
        if event.ran is not None:
            self.started.labels(*by_task).inc()
            self.run.labels(*by_task).observe(event.ran.total_seconds())
        elif event.end is AttemptEnd.CRASHED:
            self.rescued.labels(*by_task).inc()
        if event.waited is not None:
            self.wait.labels(*by_task).observe(event.waited.total_seconds())


class WorkerCollector(Collector):
    """Reads the state of the worker and the depths of the queues at each scrape."""

    def __init__(self, worker: Worker, queue: PgQueue) -> None:
        self._worker = worker
        # Now: the threads of the server have no application context of a framework.
        self._engine = queue.engine
        self._depths: list[QueueDepth] = []
        self._read_at = float("-inf")
        self._reading = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return ()  # or the registry would collect, and query, at registration

    def collect(self) -> Iterator[Metric]:
        if (health := self._worker.health()) is not None:
            yield from _gauges_of(health)
        waiting = _by_queue("pgqueue_jobs_waiting", "Jobs that wait, due or not.")
        due = _by_queue("pgqueue_jobs_due", "Jobs that are due and have not started.")
        age = _by_queue("pgqueue_oldest_due_seconds", "How long the oldest due job has been due.")
        for depth in self._current_depths():
            waiting.add_metric([depth.queue], depth.waiting)
            due.add_metric([depth.queue], depth.due)
            oldest = depth.oldest_due
            age.add_metric([depth.queue], oldest.total_seconds() if oldest else 0.0)
        yield from (waiting, due, age)

    def _current_depths(self) -> list[QueueDepth]:
        with self._reading:
            if time.monotonic() - self._read_at >= DEPTHS_EVERY:
                self._depths = self._read_depths()
                self._read_at = time.monotonic()
            return self._depths

    def _read_depths(self) -> list[QueueDepth]:
        settings = {**OWN, "statement_timeout": DEPTHS_WITHIN}
        try:
            with own_connection(self._engine, settings, purpose="metrics") as connection:
                return Health(connection).depths()
        except SQLAlchemyError as error:
            logger.warning("the waiting jobs could not be counted: %s", error)
            return []


@contextmanager
def serving(
    worker: Worker,
    queue: PgQueue,
    *,
    port: int,
    host: str = "",
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[int]:
    """Serve ``/metrics`` and ``/healthz`` of a worker while the block runs; gives the port.

    ``port`` 0 lets the system choose.  Enter it before the worker runs.  Raises OSError if the port
    is taken.
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


def _gauges_of(health: WorkerHealth) -> Iterator[Metric]:
    for name, words, value in (
        ("pgqueue_slots", "Slots of this worker.", health.slots),
        ("pgqueue_slots_busy", "Slots that run a handler.", health.busy),
        ("pgqueue_heartbeat_age_seconds", "Since the last heartbeat.", health.heartbeat_age),
        ("pgqueue_claim_age_seconds", "Since the last look for jobs.", health.claim_age),
        ("pgqueue_attempts_stale", "Attempts whose lease had passed on.", health.stale),
    ):
        yield GaugeMetricFamily(name, words, value=value)


def _by_queue(name: str, words: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, labels=["queue"])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""
