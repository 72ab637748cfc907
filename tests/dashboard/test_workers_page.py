"""The page of workers: how each lives, what its slots run, and how it is made quiet."""

import uuid
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import stored
from pgqueue import Lease, PgQueue
from pgqueue.tables import OperatorAction, WorkerProcess


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    queue.task(name="send", queue="mail")(lambda: None)
    queue.task(name="bill", queue="secret-tenant")(lambda: None)
    return queue


def start_worker(
    engine: Engine, *queues: str, host: str = "web3", silence: int = 0, slots: int = 2
) -> uuid.UUID:
    worker_id = uuid.uuid4()
    with Session(engine) as session, session.begin():
        session.add(
            WorkerProcess(
                id=worker_id,
                hostname=host,
                pid=77,
                backend_pid=1,
                slots=slots,
                queues=list(queues),
                version="v7",
            )
        )
        session.flush()
        session.execute(
            text(
                "UPDATE pgqueue.workers SET heartbeat_at = now() - :silence, attempts_ended = 12345"
                " WHERE id = :id"
            ),
            {"id": worker_id, "silence": timedelta(seconds=silence)},
        )
    return worker_id


def claim(engine: Engine, worker_id: uuid.UUID, job_id: int) -> None:
    with Session(engine) as session, session.begin():
        session.execute(text("DELETE FROM pgqueue.message_queue"))
        session.add(Lease(target_id=job_id, message_id=job_id, attempt=3, worker_id=worker_id))


def test_an_operator_reads_what_each_worker_does(queue: PgQueue, engine: Engine) -> None:
    worker_id = start_worker(engine, "mail", "ma*")
    claim(engine, worker_id, queue.tasks["send"].delay().id)

    words = Visitor(queue).text("/workers")

    assert "web3:77" in words
    assert "alive" in words
    assert "mail, ma*" in words
    assert "#1 send, attempt 3 free 1 of 2 in use" in words
    assert "12,345" in words
    assert "version v7" in words
    assert "Quiet" in words


@pytest.mark.parametrize(("silence", "word"), [(0, "alive"), (10, "late"), (90, "silent")])
def test_the_heartbeat_is_told_in_words(
    queue: PgQueue, engine: Engine, silence: int, word: str
) -> None:
    start_worker(engine, "mail", silence=silence)

    assert f"{word} heartbeat" in Visitor(queue).text("/workers")


def test_a_worker_is_made_quiet_and_resumed(queue: PgQueue, engine: Engine) -> None:
    worker_id = start_worker(engine, "mail")
    visitor = Visitor(queue)

    done = visitor.post("/workers/quiet", {"worker": str(worker_id), "back": "/workers"})
    words = visitor.text(done.location)

    assert "the worker claims no more jobs" in words
    assert "quiet heartbeat" in words
    [action] = stored(engine, OperatorAction)
    assert (action.action, action.target) == ("quiet", {"worker": str(worker_id)})

    done = visitor.post("/workers/unquiet", {"worker": str(worker_id), "back": "/workers"})
    words = visitor.text(done.location)

    assert "the worker claims jobs again" in words
    assert "alive heartbeat" in words
    assert [one.action for one in stored(engine, OperatorAction)] == ["quiet", "unquiet"]


@pytest.mark.parametrize(("worker", "status"), [("no-id", 400), (str(uuid.UUID(int=7)), 404)])
def test_a_worker_that_is_gone_is_said_to_be(
    queue: PgQueue, engine: Engine, worker: str, status: int
) -> None:
    assert Visitor(queue).post("/workers/quiet", {"worker": worker}).status_code == status
    assert Visitor(queue).post("/workers/unquiet", {"worker": worker}).status_code == status
    assert stored(engine, OperatorAction) == []


def test_a_user_of_some_queues_sees_their_workers_and_no_other_job(
    queue: PgQueue, engine: Engine
) -> None:
    start_worker(engine, "secret-tenant", host="hidden")
    start_worker(engine, "mail", "secret-tenant", host="both")
    shared = start_worker(engine, "*", host="shared")
    claim(engine, shared, queue.tasks["bill"].delay().id)
    visitor = Visitor(queue, queues={"mail"})

    words = visitor.text("/workers")

    assert "shared:77" in words
    assert "a job that you may not see" in words
    assert "both:77" in words
    assert "secret-tenant" not in words
    assert not {"hidden", "bill", "Quiet"} & set(words.split())
    assert visitor.post("/workers/quiet", {"worker": str(shared)}).status_code == 403


def test_without_a_worker_the_page_says_how_to_start_one(queue: PgQueue) -> None:
    words = Visitor(queue).text("/workers")

    assert "No worker lives." in words
    assert "pgqueue --app shop.jobs:queue worker" in words
