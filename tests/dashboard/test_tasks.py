"""The pages of tasks: how often each ran, failed and waited, and how one is paused."""

import re
import time
from html import escape, unescape
from typing import Any

import pytest
from sqlalchemy import Engine
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import committed, execute, stored
from pgqueue import PgQueue
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.task_minutes import ENDED, TaskMinutes
from pgqueue.tables import OperatorAction, PausedTask


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    queue.task(name="send")(lambda: None)
    queue.task(name="idle")(lambda: None)
    return queue


def ran(engine: Engine, task: str, **numbers: Any) -> None:
    row = {**dict.fromkeys(ENDED, 0), "ran": [], "waited": [], **numbers}
    row |= {"minute": int(time.time() // 60), "task": task}
    committed(engine, lambda connection: TaskMinutes(connection).add([row]))


def fail(engine: Engine, task: str, error: str) -> None:
    group = {
        "fingerprint": 1,
        "task": task,
        "error_type": error,
        "place": "",
        "attempts": 3,
        "at": time.time(),
        "job_id": 7,
        "message": "HTTP 503",
    }
    committed(engine, lambda connection: ErrorGroups(connection).add([group], version="v1"))


def test_the_tasks_are_told_with_the_busiest_first(queue: PgQueue, engine: Engine) -> None:
    ran(engine, "brief", succeeded=90, ran=[90])
    ran(engine, "send", succeeded=5, failed=2, retried=1, ran=[0] * 10 + [8], waited=[4])

    words = Visitor(queue).text("/tasks")

    # 8 runs of about 0.77 s use nearly all of the time.
    assert words.index("send 8 2 1") < words.index("brief") < words.index("idle 0 0 0")
    assert "6.1 s 99 %" in words
    assert "not in this application" in words


def test_one_task_shows_its_durations_deploys_and_errors(queue: PgQueue, engine: Engine) -> None:
    ran(engine, "send", succeeded=5, failed=2, ran=[0, 0, 4, 3], waited=[0, 0, 7])
    fail(engine, "send", "ConnectionError")
    committed(engine, lambda connection: ErrorGroups(connection).note_deploy("", "a1b2c3"))

    words = Visitor(queue).text("/tasks/send?span=day")

    assert "Attempts 7 in the last day Failed 2 for good" in words
    assert "2 ms 4 ms 4 of 7 7 of 7" in words
    assert "4 ms 8 ms 3 of 7" in words
    assert "a1b2c3" in words
    assert "ConnectionError: HTTP 503" in words


def test_a_task_is_paused_and_resumed_and_both_are_logged(queue: PgQueue, engine: Engine) -> None:
    visitor = Visitor(queue)

    done = visitor.post("/tasks/pause", {"task": "send", "back": "/tasks/send"})
    words = visitor.text(done.location)
    visitor.post("/tasks/resume", {"task": "send"})

    assert "paused task send" in words
    assert "workers skip its jobs" in words
    assert "Resume" in words
    assert stored(engine, PausedTask) == []
    assert [one.action for one in stored(engine, OperatorAction)] == ["pause_task", "resume_task"]


@pytest.mark.parametrize("scope", [{"queues": {"mail"}}, {"tags": {"vip"}}])
def test_a_user_of_some_jobs_sees_no_statistics_of_all(
    queue: PgQueue, engine: Engine, scope: Any
) -> None:
    ran(engine, "bill", succeeded=4711)
    visitor = Visitor(queue, **scope)

    words = visitor.text("/tasks")

    assert "counted by task" in words
    assert "bill" not in words
    assert visitor.get("/tasks/bill").status_code == 403
    assert visitor.post("/tasks/pause", {"task": "bill"}).status_code == 403


def test_a_task_that_nobody_knows_is_not_found(queue: PgQueue) -> None:
    visitor = Visitor(queue)

    assert visitor.get("/tasks/unknown").status_code == 404
    assert visitor.get("/tasks?span=year").status_code == 400
    assert "No attempt was measured" in visitor.text("/tasks/idle")


def test_without_tasks_the_page_says_what_makes_one(engine: Engine) -> None:
    assert "No task has run." in Visitor(PgQueue(engine, secret=SECRET)).text("/tasks")


def test_a_task_of_any_name_has_its_pages(queue: PgQueue) -> None:
    visitor = Visitor(queue)
    for name in ("/x", ".", "..", "a/enqueue", "a~b", "a%2Fb", "50%", "ä?#", "pause"):
        queue.tasks.clear()
        queue.task(name=name)(lambda: None)
        href = re.search(r'href="(/tasks/[^"]+)"', visitor.get("/tasks").text)
        assert href is not None, name
        address = unescape(href[1])

        assert f"<h1>{escape(name)}</h1>" in visitor.get(address).text
        assert f"<h1>Enqueue {escape(name)}</h1>" in visitor.get(f"{address}/enqueue").text


def test_many_tasks_have_an_end(queue: PgQueue, engine: Engine) -> None:
    more = (
        "INSERT INTO pgqueue.paused_tasks (task) SELECT 'task-' || n FROM generate_series(1, 600) n"
    )
    execute(engine, more)
    visitor = Visitor(queue)

    assert "102 more tasks have used less time" in visitor.text("/tasks")
    words = visitor.text("/")
    assert words.count("is paused since") == 10
    assert "more tasks are paused, too" in words
