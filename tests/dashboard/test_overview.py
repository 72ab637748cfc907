"""The first page: what needs attention, with its remedy, and the figures."""

import re
import time
import uuid
from html import escape, unescape

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from visitor import SECRET, Visitor, words_of

from chaos.interleavings.logical_workers import committed, execute
from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.task_minutes import ENDED, TaskMinutes
from pgqueue.tables import WorkerProcess


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    queue.task(name="send", queue="mail")(lambda: None)
    queue.task(name="bill", queue="secret-tenant")(lambda: None)
    return queue


@pytest.fixture
def served(queue: PgQueue, engine: Engine) -> PgQueue:
    """With a live worker of all queues."""
    with Session(engine) as session, session.begin():
        row = WorkerProcess(
            id=uuid.uuid4(), hostname="h", pid=1, backend_pid=1, slots=4, queues=["*"]
        )
        session.add(row)
    return queue


def fail(engine: Engine, queue: PgQueue, *, at: float | None = None) -> None:
    """One job of send is failed, with an error of a group."""
    job_id = queue.tasks["send"].delay().id
    execute(engine, "DELETE FROM pgqueue.message_queue")
    execute(
        engine,
        "UPDATE pgqueue.jobs SET outcome = 'failed', finished_at = clock_timestamp()",
    )
    execute(
        engine,
        "INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at, fingerprint)"
        " SELECT id, outcome, queue, task, finished_at, 5 FROM pgqueue.jobs",
    )
    group = {"fingerprint": 5, "task": "send", "error_type": "ConnectionError", "place": ""}
    group |= {"attempts": 10, "at": at or time.time(), "job_id": job_id, "message": "HTTP 503"}
    committed(engine, lambda connection: ErrorGroups(connection).add([group], version="a1b2c3"))


def count(engine: Engine) -> None:
    committed(engine, lambda connection: QueueMinutes(connection).count())


def test_where_nothing_is_wrong_all_is_well(served: PgQueue, engine: Engine) -> None:
    served.tasks["send"].delay()
    count(engine)

    words = Visitor(served).text("/")

    assert "All well last looked now" in words
    assert "Slots in use 0 of 4 1 worker" in words
    assert "mail 1 0 0 0" in words


def test_a_worker_that_is_silent_is_counted_nowhere(served: PgQueue, engine: Engine) -> None:
    """Only another worker declares it dead, and none lives."""
    served.tasks["send"].delay()
    count(engine)
    fail(engine, served)
    served.tasks["send"].delay()
    execute(engine, "UPDATE pgqueue.workers SET heartbeat_at = now() - interval '32 minutes'")
    old = "counted_at - interval '33 minutes', at = at - interval '33 minutes'"
    execute(engine, f"UPDATE pgqueue.queue_minutes SET counted_at = {old}")

    words = Visitor(served).text("/")

    first = words.partition("Needs attention")[2]
    assert first.strip().startswith("workers no worker lives; the last was silent 32 min")
    assert "due in mail" in first
    assert "Slots in use 0 of 0 no worker lives" in words
    assert "These numbers are old: no worker has counted the jobs since" in words
    row = words[words.index("Empty in Workers") :]
    assert "none" in row.partition("secret-tenant")[0]
    assert "no live worker serves" not in words, "said once, for all queues"


def test_failures_need_somebody_with_their_deploy(served: PgQueue, engine: Engine) -> None:
    fail(engine, served)

    words = Visitor(served).text("/")

    assert "1 job of send failed since" in words
    assert "after deploy a1b2c3: ConnectionError: HTTP 503 Look" in words
    assert "All well" not in words


def test_failures_of_yesterday_and_muted_ones_need_nobody(served: PgQueue, engine: Engine) -> None:
    fail(engine, served)
    execute(engine, "UPDATE pgqueue.error_groups SET muted_until = now() + interval '1 hour'")
    assert "All well" in Visitor(served).text("/")

    execute(
        engine,
        "UPDATE pgqueue.error_groups SET muted_until = NULL, last_at = now() - interval '1 day',"
        " first_at = now() - interval '1 day'",
    )
    assert "All well" in Visitor(served).text("/")


def test_a_queue_without_a_worker_needs_somebody(queue: PgQueue, engine: Engine) -> None:
    queue.tasks["send"].delay()
    count(engine)

    assert "no worker lives, and nothing runs that is due in mail" in Visitor(queue).text("/")

    with Session(engine) as session, session.begin():
        process = {"hostname": "h", "pid": 1, "backend_pid": 1, "slots": 4}
        session.add(WorkerProcess(id=uuid.uuid4(), queues=["other"], **process))
    words = Visitor(queue).text("/")
    assert "no live worker serves queue mail, where 1 job is due" in words
    assert "no worker lives" not in words


def test_what_is_paused_is_resumed_where_it_is_told(served: PgQueue, engine: Engine) -> None:
    served.tasks["send"].delay()
    with served.session() as session, session.begin():
        served.pause(session, "mail")
        served.pause(session, "secret-tenant")  # without jobs: needs nobody
        served.pause_task(session, "bill")
    count(engine)

    visitor = Visitor(served)
    words = visitor.text("/")
    poor = Visitor(served, rights=RIGHTS - {"pause"}).text("/")
    visitor.post("/queues/resume", {"queue": "mail"})
    visitor.post("/tasks/resume", {"task": "bill"})

    assert "queue mail is paused since" in words
    assert "; 1 job waits Resume" in words
    assert "queue secret-tenant is" not in words
    assert "task bill is paused since" in words
    assert "1 job waits Resume" not in poor
    assert "All well" in visitor.text("/")


def test_what_needs_somebody_leads_to_where_it_is_mended(served: PgQueue, engine: Engine) -> None:
    """A task that the application does not know, and a paused schedule, which no job shows."""
    job_id = served.tasks["send"].delay().id
    for table in ("jobs", "message_queue"):
        execute(engine, f"UPDATE pgqueue.{table} SET task = 'gone.task'")
    execute(
        engine,
        "INSERT INTO pgqueue.schedules (name, task, cron, paused_at)"
        " VALUES ('nightly', 'send', '0 3 * * *', now())",
    )
    visitor = Visitor(served)

    page = visitor.get("/").text
    of_job = visitor.get(f"/jobs/{job_id}").text
    visitor.post("/schedules/resume", {"schedule": "nightly"})

    [jobs] = {unescape(href) for href in re.findall('href="(/jobs[?]q=task[^"]*)"', page)}
    assert "gone.task" in visitor.text(jobs)
    assert f'href="{escape(jobs)}"' in of_job
    assert "schedule nightly is paused since" in words_of(page)
    assert "nightly" not in visitor.text("/")


def test_the_figures_are_those_of_the_last_hour(served: PgQueue, engine: Engine) -> None:
    now = int(time.time() // 60)
    rows = [
        {**dict.fromkeys(ENDED, 0), "ran": [], "waited": [], "task": "send", **numbers}
        for numbers in (
            {"minute": now - 2, "succeeded": 150, "failed": 7, "ran": [0, 4], "waited": [8]},
            {"minute": now - 90, "succeeded": 100, "failed": 1000},
        )
    ]
    committed(engine, lambda connection: TaskMinutes(connection).add(rows))

    words = Visitor(served).text("/")

    assert "Done in an hour 150 +50 % to the hour before" in words
    assert "Failures in an hour 7" in words
    assert "send 157 7" in words


def test_a_user_of_some_queues_reads_of_the_failures_in_them(
    queue: PgQueue, engine: Engine
) -> None:
    fail(engine, queue)

    words = Visitor(queue, queues={"mail"}).text("/")

    assert "1 job of send failed since" in words
    assert "ConnectionError" in words
    assert "HTTP 503" not in words  # perhaps the message of a job in another queue


def test_a_new_database_has_an_overview(engine: Engine) -> None:
    words = Visitor(PgQueue(engine, secret=SECRET)).text("/")

    assert "No worker lives: jobs run as soon as one is started" in words
    assert "No queue has jobs." in words
