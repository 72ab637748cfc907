"""OpenTelemetry: spans for enqueues and attempts, in one trace.

    from pgqueue.tracing import instrument

    instrument(queue)

The names are those of the semantic conventions for messaging:
https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pgqueue.tracing needs OpenTelemetry: pip install 'sqlalchemy-pgqueue[tracing]'",
        name="opentelemetry",
    ) from error

from pgqueue.context import JobContext
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import Cancel, Snooze, Suspended
from pgqueue.tasks import Task

__all__ = ["instrument"]

CARRIER = "trace"
"""The key in a job's meta of the context that the global propagator has written."""


def instrument(queue: PgQueue, *, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Make a producer span for each enqueue of a queue, and a consumer span for each attempt.

    Call it once, in the module that defines the queue, before other middleware is registered.  The
    context of the enqueue travels in the job's ``meta``, as the global propagator writes it.  The
    consumer span is a child of the producer span and has a link to it.  Without a tracer provider,
    the global one is used.
    """
    spans = Spans(queue, trace.get_tracer("pgqueue", tracer_provider=tracer_provider))
    queue.on_enqueue(spans.send)
    queue.middleware(spans.process)


class Spans:
    """The spans of one queue."""

    def __init__(self, queue: PgQueue, tracer: trace.Tracer) -> None:
        self._queue = queue
        self._tracer = tracer

    def send(self, task: Task[..., Any]) -> dict[str, Any]:
        """Make the producer span of an enqueue; returns its context for the job's meta."""
        queue = task.settings.queue
        about = _attributes(task.name, queue, "enqueue", "send")
        carrier: dict[str, str] = {}
        with self._tracer.start_as_current_span(
            f"enqueue {queue}", kind=trace.SpanKind.PRODUCER, attributes=about
        ):
            propagate.inject(carrier)
        return {CARRIER: carrier} if carrier else {}

    @contextmanager
    def process(self, ctx: JobContext) -> Iterator[None]:
        """Surround an attempt with its consumer span."""
        parent = propagate.extract(_carrier(ctx.meta.get(CARRIER)))
        sent = trace.get_current_span(parent).get_span_context()
        about = _attributes(ctx.task, ctx.queue, "run", "process")
        about |= {"messaging.message.id": str(ctx.job_id), "pgqueue.attempt": ctx.attempt}
        with self._tracer.start_as_current_span(
            f"run {ctx.queue}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes=about,
            links=[trace.Link(sent)] if sent.is_valid else [],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except (Suspended, Cancel, Snooze):
                raise  # these are no errors
            except BaseException as error:
                if isinstance(error, CancelledError) and ctx.is_cancelled():
                    raise  # the handler was stopped
                has_secrets = bool(self._queue.find(ctx.task).settings.secret_args)
                _note_error(span, error, in_full=not has_secrets)
                raise


def _attributes(task: str, queue: str, operation: str, kind: str) -> dict[str, Any]:
    return {
        "messaging.system": "pgqueue",
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "pgqueue.task": task,
    }


def _carrier(stored: Any) -> dict[str, str]:
    """Keep what a propagator can read: a row may be written by hand."""
    found = stored if isinstance(stored, dict) else {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _note_error(span: trace.Span, error: BaseException, *, in_full: bool) -> None:
    """Set the status of a span; with message and traceback unless they may quote a secret."""
    name = type(error).__qualname__
    span.set_attribute("error.type", name)
    span.set_status(trace.StatusCode.ERROR, f"{name}: {error}" if in_full else name)
    if in_full:
        span.record_exception(error)
