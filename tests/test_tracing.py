"""OpenTelemetry: an enqueue and the attempts of its job are spans of one trace."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import Engine
from worker_rig import PATIENCE

from pgqueue import Cancel, JobContext, PgQueue, Retry, Secret, Worker
from pgqueue.tracing import instrument


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def queue(engine: Engine, provider: TracerProvider) -> PgQueue:
    queue = PgQueue(engine)
    instrument(queue, tracer_provider=provider)
    return queue


def spans_of(exporter: InMemorySpanExporter, kind: SpanKind) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is kind]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_job_runs_in_the_trace_of_its_enqueue(
    queue: PgQueue,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    is_async: bool,
) -> None:
    seen: list[Any] = []

    def look(ctx: JobContext) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    async def look_async(ctx: JobContext) -> None:
        look(ctx)

    function: Any = look_async if is_async else look
    task = queue.task(name="look", queue="eyes")(function)
    with provider.get_tracer("test").start_as_current_span("request") as request:
        job_id = task.delay().id

    Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)

    [sent], [run] = spans_of(exporter, SpanKind.PRODUCER), spans_of(exporter, SpanKind.CONSUMER)
    assert sent.parent == request.get_span_context()
    assert sent.context is not None
    assert run.context is not None
    assert run.parent is not None
    assert (run.context.trace_id, run.parent.span_id) == (
        sent.context.trace_id,
        sent.context.span_id,
    )
    assert [link.context.span_id for link in run.links] == [sent.context.span_id]
    assert seen == [run.context.span_id]
    assert (sent.name, run.name) == ("enqueue eyes", "run eyes")
    assert dict(run.attributes or {}) == {
        "messaging.system": "pgqueue",
        "messaging.destination.name": "eyes",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.message.id": str(job_id),
        "pgqueue.task": "look",
        "pgqueue.attempt": 1,
    }


def test_an_error_is_in_the_span_unless_it_may_quote_a_secret(
    queue: PgQueue, exporter: InMemorySpanExporter
) -> None:
    @queue.task(name="fail", retry=Retry.never())
    def fail(word: str) -> None:
        raise ValueError(word)

    @queue.task(name="pay", retry=Retry.never())
    def pay(card: Secret[str]) -> None:
        raise ValueError(card)

    @queue.task(name="cancel")
    def cancel() -> None:
        raise Cancel("not needed")

    for task, arguments in ((fail, ("open",)), (pay, ("4000-1111",)), (cancel, ())):
        task.delay(*arguments)

    Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)

    spans = {
        (span.attributes or {})["pgqueue.task"]: span
        for span in spans_of(exporter, SpanKind.CONSUMER)
    }
    assert spans["fail"].status.description == "ValueError: open"
    assert [event.name for event in spans["fail"].events] == ["exception"]
    assert spans["pay"].status.status_code is StatusCode.ERROR
    assert "4000-1111" not in spans["pay"].to_json()
    assert spans["cancel"].status.status_code is StatusCode.UNSET


def test_a_job_that_was_enqueued_without_tracing_has_a_trace_of_its_own(
    engine: Engine, queue: PgQueue, exporter: InMemorySpanExporter
) -> None:
    untraced = PgQueue(engine).task(name="any")(lambda: None)
    for damaged in ("text", {"traceparent": 7}, {"traceparent": "00-zz"}):
        untraced.options(meta={"trace": damaged}).delay()
    queue.task(name="any")(lambda: None)

    assert Worker(queue).run_until_empty(timeout=PATIENCE)["succeeded"] == 3

    runs = spans_of(exporter, SpanKind.CONSUMER)
    assert [(run.parent, run.links) for run in runs] == [(None, ())] * 3
