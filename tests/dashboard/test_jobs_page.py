"""The page of jobs: tabs, filters, pages, CSV, and what a user may see of them."""

import csv
import re
from datetime import timedelta
from html import unescape
from io import StringIO

import pytest
from sqlalchemy import Engine, text
from visitor import SECRET, Visitor

from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS
from pgqueue.repository import pages
from pgqueue.worker import Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    queue.task(name="send", queue="mail", secret_args=["token"])(lambda order_id, token="": None)
    queue.task(name="bill", queue="secret-tenant")(lambda order_id: None)

    @queue.task(name="fail", max_attempts=1)
    def fail(words: str) -> None:
        raise ValueError(words)

    return queue


def run(queue: PgQueue) -> None:
    Worker(queue).run_until_empty(timeout=60)


def test_the_tabs_show_jobs_by_status(queue: PgQueue) -> None:
    queue.tasks["fail"].delay("no such host")
    run(queue)
    queue.tasks["send"].delay(7)
    queue.tasks["bill"].options(delay=timedelta(hours=1)).delay(8)
    visitor = Visitor(queue)

    failed = visitor.text("/jobs?q=status:failed")
    due = visitor.text("/jobs?q=status:due")
    scheduled = visitor.text("/jobs?q=status:scheduled")

    assert "no such host" in failed
    assert "Failed 1" in failed
    assert "order_id=7" in due
    assert "order_id=8" not in due
    assert "order_id=8" in scheduled
    assert "in 1.0 h" in scheduled or "in 60 min" in scheduled, "when it is due"


def test_a_line_and_the_form_select(queue: PgQueue) -> None:
    for order_id in (41, 42):
        queue.tasks["send"].options(tags=["vip"]).delay(order_id)
    visitor = Visitor(queue)

    by_line = visitor.text("/jobs?q=tag:vip+arg.order_id:42")
    response = visitor.get("/jobs?q=tag:vip&word=arg.NAME&value=order_id:42")

    assert "order_id=42" in by_line
    assert "order_id=41" not in by_line
    assert "order_id=41" not in response.text
    assert 'value="tag:vip arg.order_id:42"' in response.text


def test_a_number_goes_to_the_job(queue: PgQueue) -> None:
    job = queue.tasks["send"].delay(7)

    assert Visitor(queue).get(f"/jobs?q={job.id}").location == f"/jobs/{job.id}"


@pytest.mark.parametrize("line", ["colour:red", "task:%22open", "created:soon", "x" * 900])
def test_a_line_that_is_not_understood_is_said_and_kept(queue: PgQueue, line: str) -> None:
    response = Visitor(queue).get(f"/jobs?q={line}")

    assert response.status_code == 400
    assert "its words are" in response.text
    assert 'aria-current="page">All' not in response.text, "no list is shown"
    assert "In a shell" not in response.text


def test_pages_follow_each_other(queue: PgQueue) -> None:
    with queue.session() as session, session.begin():
        ids = queue.tasks["send"].enqueue_many(session, [(n,) for n in range(30)])
    visitor = Visitor(queue)

    first = visitor.get("/jobs").text
    older = visitor.get(f"/jobs?before={ids[5]}").text

    assert f"before={ids[5]}" in first
    assert [id for id in ids if f'/jobs/{id}"' in first] == ids[5:]
    assert [id for id in ids if f'/jobs/{id}"' in older] == ids[:5]
    assert Visitor(queue).get("/jobs?before=x").status_code == 400


def test_a_task_that_the_application_does_not_have_is_said(queue: PgQueue) -> None:
    words = Visitor(queue).text("/jobs?q=task:sned")

    assert "This application has no task sned. Is the name misspelt?" in words


def test_a_search_that_stops_says_how_far_it_has_come(
    queue: PgQueue, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO pgqueue.jobs (task, outcome, finished_at, created_at)"
                " SELECT 'old', 'succeeded', now(), '2026-11-22 14:10:00Z'"
                " FROM generate_series(1, 3000)"
            )
        )
    monkeypatch.setattr(pages, "PATIENCE", timedelta(0))

    words = Visitor(queue).text("/jobs?q=tag:vip")

    assert "None back to 2026-11-22 14:10:00 UTC; search on" in words


def test_secrets_are_masked_and_not_searched(queue: PgQueue) -> None:
    queue.tasks["send"].delay(7, "hunter2hunter2")
    with queue.session() as session, session.begin():
        other = PgQueue(queue.engine)
        other.task(name="unknown")(lambda word: None).enqueue(session, "of another application")
    visitor = Visitor(queue)

    for address in ("/jobs", "/jobs.csv"):
        shown = visitor.get(address).text
        assert "hunter2" not in shown
        assert "of another" not in shown
        assert "token=" in shown
    assert visitor.get("/jobs?q=arg.token:hunter2hunter2").status_code == 403
    assert "unknown" not in visitor.text('/jobs?q=arg.word:"of another application"')


def test_arguments_need_a_right(queue: PgQueue) -> None:
    queue.tasks["send"].delay(4711)
    visitor = Visitor(queue, RIGHTS - {"view_arguments"})

    for address in ("/jobs", "/jobs.csv"):
        assert "4711" not in visitor.get(address).text
    for address in ("/jobs?q=arg.order_id:4711", "/jobs.csv?q=arg.order_id:4711"):
        assert visitor.get(address).status_code == 403


def test_a_spreadsheet_takes_no_cell_for_a_formula(queue: PgQueue) -> None:
    for words in ("=1+1", "+1", "-1", "@x", "\t=1", "\n=1", "\uff1d1", 'plain, "quoted"'):
        queue.tasks["fail"].delay(words)
    run(queue)

    response = Visitor(queue).get("/jobs.csv?q=status:failed")
    errors = [line["last_error"] for line in csv.DictReader(StringIO(response.text, newline=""))]

    formulas = ["=1+1", "+1", "-1", "@x", "\t=1", "\n=1", "\uff1d1"]
    assert errors[::-1] == [*(f"'{formula}" for formula in formulas), 'plain, "quoted"']


def test_selected_jobs_and_all_that_match_are_changed(queue: PgQueue, engine: Engine) -> None:
    first, second = (queue.tasks["send"].delay(n) for n in (1, 2))
    visitor = Visitor(queue)

    words = visitor.text("/jobs?q=status:due")
    visitor.post("/actions/cancel", {"action": "cancel", "id": str(first.id), "back": "/jobs"})
    address = re.findall('href="(/actions/preview[^"]*)"', visitor.get("/jobs?q=status:due").text)

    assert "Cancel selected" in words
    assert "Requeue selected" not in words
    assert "Cancel 1 job?" in visitor.text(unescape(address[0]))
    assert "Cancel selected" not in Visitor(queue, {"view"}).text("/jobs?q=status:due")
    assert second.id > first.id
