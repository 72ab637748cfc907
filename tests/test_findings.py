"""What the dashboard tells at a glance, without counting jobs."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import execute
from pgqueue import PgQueue
from pgqueue.models import WorkerProcess
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.views.findings import at_a_glance


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="send", queue="mail")(lambda: None)
    return queue


def start_worker(engine: Engine, *queues: str, silent_for: int = 0) -> None:
    with Session(engine) as session, session.begin():
        row = WorkerProcess(
            id=uuid4(), hostname="h", pid=1, backend_pid=1, slots=1, queues=list(queues)
        )
        session.add(row)
        session.flush()
        session.execute(
            text(
                "UPDATE pgqueue.workers SET heartbeat_at = now() - :silence * interval '1 s'"
                " WHERE id = :id"
            ),
            {"silence": silent_for, "id": row.id},
        )


def glance(queue: PgQueue, session: Session) -> Sequence[str]:
    minutes, workers = QueueMinutes(session), queue.workers(session)
    found = at_a_glance(
        queue, session, count=minutes.latest(), first=minutes.first_due(), workers=workers
    )
    return [f"{one.subject}: {one.detail}" for one in found]


@pytest.mark.parametrize("served", ["mail", "ma*", "*"])
def test_with_a_live_worker_all_is_well(queue: PgQueue, engine: Engine, served: str) -> None:
    queue.tasks["send"].delay()
    start_worker(engine, served)

    with queue.session() as session:
        session.execute(text("SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = 2000"))
        assert glance(queue, session) == []


def test_a_queue_with_due_jobs_that_nobody_serves_is_named_once(
    queue: PgQueue, engine: Engine
) -> None:
    for priority in (1, 5, 5):
        queue.tasks["send"].options(priority=priority).delay()
    queue.tasks["send"].options(queue="later", delay=timedelta(hours=1)).delay()
    start_worker(engine, "mail", silent_for=90)
    start_worker(engine, "other", silent_for=0)
    with engine.begin() as connection:
        QueueMinutes(connection).count()

    with queue.session() as session:
        [finding] = glance(queue, session)

    assert finding.startswith(
        "workers: no live worker serves queue mail, where 3 jobs are due (since"
    )


def test_a_task_that_the_application_does_not_know_is_named(queue: PgQueue, engine: Engine) -> None:
    start_worker(engine, "*")
    queue.tasks["send"].delay()
    execute(engine, "UPDATE pgqueue.message_queue SET task = 'gone'")

    with queue.session() as session:
        [finding] = glance(queue, session)

    assert finding.startswith(
        "unknown task: this application has no task gone, of which jobs in queue"
    )
