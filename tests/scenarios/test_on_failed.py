"""``on_failed``: a job that fails for good enqueues another, in the commit that records it."""

import json
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from worker_rig import PATIENCE

from chaos.interleavings.logical_workers import TASK, logical_workers, rescue, worker_settings
from pgqueue import (
    Cancel,
    Discard,
    Job,
    JobContext,
    PgQueue,
    Retry,
    TaskDefinitionError,
    Worker,
)
from pgqueue.outcomes import ErrorReport, Failed
from pgqueue.repository.follow_ups import ON_FAILED
from pgqueue.repository.settle import Attempts

AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.fixture
def told(queue: PgQueue) -> list[int]:
    return []


@pytest.fixture
def tell(queue: PgQueue, told: list[int]) -> Any:
    @queue.task(name="tell", queue="alerts", priority=2, max_attempts=3)
    def tell(job_id: int) -> None:
        told.append(job_id)

    return tell


def end_by(how: str) -> Any:
    match how:
        case "raise":
            raise ValueError("in the handler")
        case "discard":
            raise Discard("no use")
        case "cancel":
            return Cancel("not needed")
    return None


def test_it_runs_for_each_way_to_fail_for_good_and_for_no_other(
    queue: PgQueue, told: list[int], tell: Any
) -> None:
    stop = Event()

    @queue.task(name="any", max_attempts=2, retry=AT_ONCE, on_failed=tell)
    def end(session: Session, how: str) -> Any:
        return end_by(how)

    @queue.task(name="stumble", retry=AT_ONCE, on_failed=tell)
    def stumble(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            raise ValueError("the first time")

    @queue.task(name="sleep", max_attempts=1, timeout=timedelta(seconds=0.3), on_failed=tell)
    def oversleep(ctx: JobContext) -> None:
        while not ctx.is_cancelled():
            stop.wait(0.01)

    failing = [end.delay("raise").id, end.delay("discard").id, oversleep.delay().id]
    for task, arguments in ((end, ("cancel",)), (end, ("return",)), (stumble, ())):
        task.delay(*arguments)

    for _ in range(2):  # a timeout may be settled when the first run has seen the last job
        Worker(queue, concurrency=3).run_until_empty(timeout=PATIENCE)

    assert sorted(told) == failing


@pytest.mark.parametrize("enqueue", ["delay", "add", "many"])
def test_it_has_the_options_of_its_task_and_the_meta_of_the_failed_job(
    queue: PgQueue, tell: Any, enqueue: str
) -> None:
    @queue.task(name="fail", retry=Retry.never(), on_failed=tell.options(priority=1))
    def fail() -> None:
        raise ValueError("in the handler")

    failing = fail.options(meta={"tenant": "acme"})
    with queue.session() as session, session.begin():
        match enqueue:
            case "delay":
                failing.delay()
            case "add":
                session.add(failing.job())
            case "many":
                failing.enqueue_many(session, [()])

    Worker(queue, ["default"]).run_until_empty(timeout=PATIENCE)

    with queue.session() as session:
        failed_id = session.scalars(select(Job.id).where(Job.task == "fail")).one()
        job = session.scalars(select(Job).where(Job.task == "tell")).one()
        assert (job.queue, job.priority, job.max_attempts) == ("alerts", 1, 3)
        assert (job.args, job.meta) == ({"job_id": failed_id}, {"tenant": "acme"})
        assert queue.check(session) == []


def test_a_rescuer_that_does_not_know_the_task_enqueues_it_too(
    queue: PgQueue, database_url: str, engine: Engine, told: list[int], tell: Any
) -> None:
    task = queue.task(name=TASK, max_attempts=1, on_failed=tell)(lambda: None)
    job_id = task.delay().id
    workers = worker_settings(database_url)
    with logical_workers(workers, 1) as [dead]:
        dead.claim()
        with engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
        assert rescue(engine) == {job_id: "failed"}
    workers.dispose()

    Worker(queue, ["alerts"]).run_until_empty(timeout=PATIENCE)

    assert told == [job_id]


def test_it_is_there_exactly_if_the_failure_is(
    queue: PgQueue, database_url: str, engine: Engine, tell: Any
) -> None:
    queue.task(name=TASK, on_failed=tell)(lambda: None).delay()
    workers = worker_settings(database_url)
    failed = Failed(ErrorReport("ValueError", "planned", ""))
    tells = text("SELECT count(*) FROM pgqueue.jobs WHERE task = 'tell'")
    with logical_workers(workers, 1) as [worker]:
        [claimed] = worker.claim()
        with engine.connect() as connection, connection.begin() as transaction:
            assert Attempts(connection, worker.id).settle([(claimed, failed)])
            assert connection.scalar(tells) == 1
            transaction.rollback()
        with engine.begin() as connection:
            assert connection.scalar(tells) == 0
            assert Attempts(connection, worker.id).settle([(claimed, failed)])
            assert Attempts(connection, worker.id).settle([(claimed, failed)]) == {}
            assert connection.scalar(tells) == 1
    workers.dispose()


GOOD = {"task": "tell", "argument": "job_id", "queue": "alerts", "priority": 2, "max_attempts": 3}
DAMAGED: list[Any] = [
    7,
    [ON_FAILED],
    {ON_FAILED: 7},
    {ON_FAILED: {}},
    {ON_FAILED: {**GOOD, "queue": "x" * 5000}},
    {ON_FAILED: {**GOOD, "task": "two words"}},
    {ON_FAILED: {**GOOD, "argument": None}},
    {ON_FAILED: {**GOOD, "priority": "urgent"}},
    {ON_FAILED: {**GOOD, "priority": 99}},
    {ON_FAILED: {**GOOD, "max_attempts": 10**9}},
]


def test_a_damaged_description_keeps_no_failure_from_being_recorded(
    queue: PgQueue, engine: Engine, tell: Any
) -> None:
    @queue.task(name="fail", retry=Retry.never())
    def fail() -> None:
        raise ValueError("in the handler")

    for meta in DAMAGED:
        job_id = fail.delay().id
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE pgqueue.jobs SET meta = CAST(:meta AS jsonb) WHERE id = :id"),
                {"meta": json.dumps(meta), "id": job_id},
            )

    counts = Worker(queue, ["default"]).run_until_empty(timeout=PATIENCE)

    assert counts["failed"] == len(DAMAGED)
    with queue.session() as session:
        jobs = session.execute(select(Job.priority, Job.max_attempts).where(Job.task == "tell"))
        assert sorted(tuple(job) for job in jobs) == [(2, 10), (5, 3), (5, 3)]


def test_what_cannot_follow_is_refused(queue: PgQueue, tell: Any) -> None:
    foreign: Any = PgQueue().task(name="foreign")(lambda job_id: None)
    nothing: Any = queue.task(name="nothing")(lambda: None)
    late = tell.options(delay=timedelta(seconds=1))
    unfit: list[tuple[Any, str]] = [
        (print, "give another task of this queue"),
        (foreign, "give another task of this queue"),
        (nothing, "with the id of the failed job"),
        (late, "no delay"),
    ]
    for task, reason in unfit:
        with pytest.raises(TaskDefinitionError, match=f"task one: on_failed .*{reason}"):
            queue.task(name="one", on_failed=task)(lambda: None)


def test_the_follow_up_has_none_of_the_time_limits_of_the_failed_job(
    engine: Engine, queue: PgQueue
) -> None:
    told = queue.task(name="told")(lambda job_id: None)
    options: dict[str, Any] = {"max_attempts": 1, "on_failed": told}
    failing = queue.task(name="failing", expires_in=timedelta(days=1), **options)(lambda: 1 / 0)
    own: dict[str, Any] = {"expires_in": timedelta(hours=1), "timeout": timedelta(hours=1)}
    failing.options(**own, meta={"colour": "red"}).delay()

    Worker(queue).run_until_empty()

    with Session(engine) as session:
        assert session.scalars(select(Job.meta).where(Job.task == "told")).one() == {
            "colour": "red"
        }
