"""Workers that serve queues by a pattern: no task names them."""

from datetime import timedelta
from threading import Event
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from worker_rig import running

from chaos.workers import PATIENCE
from pgqueue import JobContext, Limit, OptionError, PgQueue, Worker
from pgqueue.repository.health import Health
from pgqueue.tables import WorkerProcess


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def test_a_worker_runs_the_jobs_of_all_queues_that_its_pattern_fits(queue: PgQueue) -> None:
    seen = []

    @queue.task
    def note(context: JobContext, then: str | None = None) -> None:
        seen.append(context.queue)
        if then is not None:
            note.options(queue=then).delay()

    note.options(queue="tenant_1").delay("tenant_3")
    note.options(queue="tenant_2").delay("other")
    note.options(queue="other").delay()
    assert Worker(queue, ["tenant_*"]).run_until_empty(timeout=60)["succeeded"] == 3
    assert sorted(seen) == ["tenant_1", "tenant_2", "tenant_3"]

    assert Worker(queue, ["default", "*"]).run_until_empty(timeout=60)["succeeded"] == 2
    assert seen[3:] == ["other", "other"]


def test_a_running_worker_finds_new_queues(queue: PgQueue) -> None:
    ran = {name: Event() for name in ("one", "two", "limited")}

    @queue.task
    def note(name: str) -> None:
        ran[name].set()

    @queue.task(limit=Limit(1))
    def limited(name: str) -> None:
        ran[name].set()

    with running(Worker(queue, ["*"])):
        for name in ran:
            task = limited if name == "limited" else note
            task.options(queue=name).delay(name)
            assert ran[name].wait(PATIENCE)


def test_jobs_that_follow_each_other_in_new_queues_wait_for_no_poll(queue: PgQueue) -> None:
    ran = {f"{kind}_{turn}": Event() for turn in range(10) for kind in ("first", "next")}

    @queue.task
    def note(name: str) -> None:
        ran[name].set()

    with running(Worker(queue, ["*"], poll_interval=timedelta(hours=1))):
        for name, done in ran.items():
            note.options(queue=name).delay(name)
            if name.startswith("next"):
                assert done.wait(PATIENCE), name


def test_the_jobs_of_a_test_run_by_a_pattern(engine: Engine) -> None:
    with engine.connect() as connection:
        queue = PgQueue(connection)
        note = queue.task(name="note")(lambda: None)
        for name in ("tenant_1", "other"):
            note.options(queue=name).delay()

        assert Worker(queue, ["tenant_*"]).run_until_empty()["succeeded"] == 1
        assert Worker(queue, ["*"]).run_until_empty()["succeeded"] == 1


def test_the_doctor_knows_what_a_pattern_serves(queue: PgQueue, session: Session) -> None:
    @queue.task
    def note() -> None: ...

    for name in ("tenant_1", "tenants", "named"):
        note.options(queue=name).delay()
    process = {"hostname": "h", "pid": 1, "backend_pid": 1, "slots": 1}
    session.add(WorkerProcess(id=uuid4(), queues=["tenant_*", "named"], **process))
    session.flush()
    assert [one.name for one in Health(session).unserved_queues()] == ["tenants"]

    session.add(WorkerProcess(id=uuid4(), queues=["*"], **process))
    session.flush()
    assert Health(session).unserved_queues() == []


@pytest.mark.parametrize("queues", [["*a"], ["a*b"], ["**"], ["a b*"], {"a*": 1}])
def test_other_patterns_are_refused(queue: PgQueue, queues: list[str]) -> None:
    with pytest.raises(OptionError, match="queue "):
        Worker(queue, queues)
