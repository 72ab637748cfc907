"""The pages of batches: progress, failed jobs, the callback, and cancelling."""

import re
from html import unescape

import pytest
from sqlalchemy import Engine
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import execute
from pgqueue import PgQueue
from pgqueue.worker import Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)

    @queue.task(name="send", max_attempts=1)
    def send(number: int) -> None:
        if number == 1:
            raise ValueError("no such host")

    queue.task(name="report")(lambda batch_id: None)
    return queue


def batch(queue: PgQueue) -> int:
    report = queue.tasks["report"]
    with (
        queue.session() as session,
        session.begin(),
        queue.batch(session, "import", on_failure=report) as made,
    ):
        queue.tasks["send"].enqueue_many(session, [(n,) for n in range(3)])
        return made.id


def test_a_batch_shows_its_progress_its_failed_jobs_and_its_callback(queue: PgQueue) -> None:
    id, visitor = batch(queue), Visitor(queue)
    open_batch = visitor.text(f"/batches/{id}")
    [href] = re.findall('<a href="([^"]+)">Unfinished', visitor.get(f"/batches/{id}").text)
    unfinished = len(re.findall('href="/jobs/[0-9]+"', visitor.get(unescape(href)).text))
    Worker(queue).run_until_empty(timeout=60)

    listed, ended = visitor.text("/batches"), visitor.text(f"/batches/{id}")

    assert "open" in open_batch
    assert "Unfinished 3" in open_batch
    assert unfinished == 3
    assert "import" in listed
    assert "3 of 3" in listed
    assert "meter full" not in visitor.get("/batches").text, "it is no warning that a batch ends"
    assert "no such host" in ended
    assert "Failed 1" in ended
    assert re.search(r"Callback job \d+", ended)


def test_an_open_batch_is_shown_as_a_worker_has_counted_it(queue: PgQueue, engine: Engine) -> None:
    id, visitor = batch(queue), Visitor(queue)
    counted = '{"total": 900, "ended": 7, "failed": 5, "cancelled": 0}'
    execute(engine, "UPDATE pgqueue.batches SET counted = CAST(:counted AS jsonb)", counted=counted)

    assert "7 of 900" in visitor.text("/batches")
    assert "Failed 5" in visitor.text(f"/batches/{id}")


def test_its_jobs_are_cancelled_after_a_preview(queue: PgQueue) -> None:
    id = batch(queue)
    queue.tasks["send"].delay(9)
    visitor = Visitor(queue)

    [address] = re.findall(
        'href="(/actions/preview[^"]*action=cancel[^"]*)"', visitor.get(f"/batches/{id}").text
    )

    assert "Cancel 3 jobs?" in visitor.text(unescape(address))
    assert "Cancel its jobs" not in Visitor(queue, {"view"}).text(f"/batches/{id}")


def test_a_workflow_is_drawn_with_the_requeue_of_its_first_failure(queue: PgQueue) -> None:
    send = queue.tasks["send"]
    with (
        queue.session() as session,
        session.begin(),
        queue.workflow(session, "letters") as flow,
    ):
        first = flow.add(send.job(1))
        letters = flow.add_many(send, [(2,), (3,)], after=first)
        flow.add(send.job(4), after=letters, when="ended")
        id, failing = flow.id, first.id
    Worker(queue).run_until_empty(timeout=60)
    visitor = Visitor(queue)

    html = visitor.get(f"/batches/{id}").text

    assert "2 cancelled" in html
    assert html.partition('class="graph"')[2].partition("</svg>")[0].count("<path d=") == 2
    assert "(when ended)" in html
    assert f"Job {failing} , send , has failed first: no such host" in visitor.text(
        f"/batches/{id}"
    )
    assert "Requeue it and the 2 skipped" in html
    visitor.post(f"/jobs/{failing}/requeue")
    assert "has failed first" not in visitor.text(f"/batches/{id}")
    assert "Requeue it" not in Visitor(queue, {"view"}).text(f"/batches/{id}")
