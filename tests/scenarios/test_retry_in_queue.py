"""A retry may move a job to another queue and priority, as its policy or its handler says."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, endings

from chaos.interleavings.logical_workers import ERROR, LogicalWorker, enqueue, stored, violations
from pgqueue import (
    AttemptEnded,
    AttemptOutcome,
    Job,
    JobAttempt,
    JobContext,
    Limit,
    OptionError,
    PgQueue,
    Retry,
    RetryLater,
    Unique,
    Worker,
)
from pgqueue.database.opening import driver_connection
from pgqueue.models import WaitingMessage
from pgqueue.outcomes import Retried
from pgqueue.repository.tables import CHANNEL, SLEEPERS

NOW = timedelta(0)
HOUR = timedelta(hours=1)
AT_ONCE = Retry.constant(NOW)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def only_job(engine: Engine) -> Job:
    [job] = stored(engine, Job)
    return job


def test_a_policy_retries_in_its_queue_and_with_its_priority(
    queue: PgQueue, engine: Engine
) -> None:
    ran: list[tuple[str, int]] = []

    @queue.task(queue="mail", retry=AT_ONCE.in_queue("retries").with_priority(9))
    def send(ctx: JobContext) -> None:
        ran.append((ctx.queue, ctx.attempt))
        if ctx.attempt < 3:
            raise ConnectionError

    send.delay()
    assert endings(Worker(queue, ["mail"])) == {"retried": 1}
    assert endings(Worker(queue, ["retries"])) == {"retried": 1, "succeeded": 1}

    assert ran == [("mail", 1), ("retries", 2), ("retries", 3)]
    assert (only_job(engine).queue, only_job(engine).priority) == ("retries", 9)
    moved = [(one.attempt, one.moved_to) for one in stored(engine, JobAttempt)]
    assert sorted(moved) == [(1, "retries"), (2, None)]
    assert violations(engine) == []


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_handler_says_when_where_and_how_urgently_it_is_retried(
    queue: PgQueue, engine: Engine, executor: Any
) -> None:
    @queue.task(name="call", executor=executor, retry=Retry.never())
    def call() -> None:
        try:
            raise ConnectionError("down")
        except ConnectionError as error:
            raise RetryLater(HOUR, queue="retries", priority=7) from error

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1}
    job, [attempt] = only_job(engine), stored(engine, JobAttempt)
    assert (job.queue, job.priority, job.attempts) == ("retries", 7, 1)
    assert job.run_at - attempt.finished_at > HOUR - timedelta(minutes=1)
    assert (attempt.error_type, attempt.error) == ("ConnectionError", "down")
    assert job.last_error == "down"


def test_without_a_delay_and_a_queue_the_policy_says(queue: PgQueue, engine: Engine) -> None:
    asked: list[BaseException] = []

    def policy(_attempt: int, error: BaseException) -> timedelta:
        asked.append(error)
        return HOUR

    @queue.task(retry=Retry(policy).in_queue("retries"))
    def call() -> None:
        try:
            raise ConnectionError("down")
        except ConnectionError:
            raise RetryLater  # the exception in whose block it is raised counts too

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1}
    assert [type(error) for error in asked] == [ConnectionError]
    assert only_job(engine).queue == "retries"


def test_a_request_counts_as_an_attempt_and_the_last_one_fails(
    queue: PgQueue, engine: Engine
) -> None:
    last: list[bool] = []

    @queue.task(max_attempts=2, retry=Retry.exponential().only(ValueError))
    def call(ctx: JobContext) -> None:
        last.append(ctx.is_last_attempt)
        raise RetryLater(NOW)

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1, "failed": 1}
    assert last == [False, True]
    assert only_job(engine).queue == "default"


@pytest.mark.parametrize("is_returned", [True, False])
def test_a_returned_request_keeps_the_writes_and_a_raised_one_does_not(
    queue: PgQueue, engine: Engine, is_returned: bool
) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sent (job_id bigint)"))

    @queue.task
    def call(session: Session, ctx: JobContext) -> RetryLater | None:
        session.execute(text("INSERT INTO sent VALUES (1)"))
        later = RetryLater(HOUR, queue="retries")
        if is_returned:
            return later
        raise later

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1}
    with engine.begin() as connection:
        count = connection.execute(text("SELECT count(*) FROM sent")).scalar_one()
    assert count == (1 if is_returned else 0)
    assert (only_job(engine).queue, only_job(engine).attempts) == ("retries", 1)


def test_an_async_handler_may_ask_for_it(queue: PgQueue, engine: Engine) -> None:
    @queue.task
    async def call() -> None:
        await asyncio.sleep(0)
        raise RetryLater(HOUR, queue="retries")

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1}
    assert only_job(engine).queue == "retries"


def test_a_claim_without_a_worker_moves_the_job_too(queue: PgQueue, engine: Engine) -> None:
    @queue.task(retry=Retry.constant(HOUR).in_queue("retries"))
    def call() -> None: ...

    call.delay()
    with queue.session() as session, session.begin(), queue.claim(session) as job:
        assert job is not None
        raise ConnectionError

    assert only_job(engine).queue == "retries"


def test_an_event_names_the_queue(queue: PgQueue) -> None:
    events: list[AttemptEnded] = []
    queue.on_attempt_end(events.append)

    @queue.task(max_attempts=2, retry=AT_ONCE.in_queue("retries"))
    def call() -> None:
        raise ConnectionError

    call.delay()
    endings(Worker(queue))

    told = [(event.queue, event.outcome, event.moved_to) for event in events]
    assert told == [
        ("default", AttemptOutcome.RETRIED, "retries"),
        ("retries", AttemptOutcome.FAILED, None),
    ]


def test_a_worker_without_names_serves_the_queue_of_retries(queue: PgQueue) -> None:
    @queue.task(queue="mail", max_attempts=2, retry=AT_ONCE.in_queue("retries"))
    def send() -> None:
        raise ConnectionError

    send.delay()

    assert endings(Worker(queue)) == {"retried": 1, "failed": 1}


@pytest.mark.parametrize("to_queue", ["retries", None])
def test_the_workers_of_the_other_queue_are_woken(
    engine: Engine, worker: LogicalWorker, to_queue: str | None
) -> None:
    claimed = worker.claim_new(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
        listening.execute(text(f"SELECT pg_advisory_lock_shared({SLEEPERS})"))
        listening.exec_driver_sql(f"LISTEN {CHANNEL}")

        assert worker.settle(claimed, Retried(HOUR, ERROR, queue=to_queue))

        listening.exec_driver_sql(f"NOTIFY {CHANNEL}, 'the last word'")
        expected = [*(["enqueued"] if to_queue else []), "the last word"]
        heard = driver_connection(listening).notifies(timeout=PATIENCE, stop_after=len(expected))
        assert [note.payload for note in heard] == expected


def test_a_job_that_holds_a_key_of_its_queue_stays_there(
    engine: Engine, worker: LogicalWorker
) -> None:
    with engine.begin() as connection:
        enqueue(connection, key="k")
        enqueue(connection, queue="retries", key="k")

    [claimed] = worker.claim()
    assert worker.settle(claimed, Retried(NOW, ERROR, queue="retries", priority=1))

    jobs = {job.id: (job.queue, job.priority) for job in stored(engine, Job)}
    assert jobs[claimed.job_id] == ("default", 1)
    [attempt] = stored(engine, JobAttempt)
    assert attempt.moved_to is None
    assert violations(engine) == []


def test_a_job_with_a_key_across_queues_moves_with_it(queue: PgQueue, engine: Engine) -> None:
    retry = Retry.constant(HOUR).in_queue("retries")

    @queue.task(unique=Unique(across="queues"), retry=retry)
    def call() -> None:
        raise ConnectionError

    first = call.delay()
    endings(Worker(queue))

    assert only_job(engine).queue == "retries"
    assert call.delay().id == first.id


def test_a_job_under_a_rate_waits_for_it_in_the_other_queue(queue: PgQueue, engine: Engine) -> None:
    @queue.task(limit=Limit(1, per=HOUR), retry=Retry.constant(HOUR).in_queue("retries"))
    def call() -> None:
        raise ConnectionError

    call.delay()

    assert endings(Worker(queue)) == {"retried": 1}
    [waiting] = stored(engine, WaitingMessage)
    assert waiting.queue == "retries"
    assert violations(engine) == []


@pytest.mark.parametrize("limited", ["default", "retries"])
def test_queues_with_limits_are_neither_left_nor_entered(
    engine: Engine, limited: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = PgQueue(engine, queue_limits={limited: Limit(1)})
    with pytest.raises(OptionError, match=f"queue {limited} has limits"):
        queue.task(name="declared", retry=AT_ONCE.in_queue("retries"))(lambda: None)

    @queue.task(name="asks")
    def asks() -> None:
        raise RetryLater(HOUR, queue="retries")

    asks.delay()
    assert endings(Worker(queue)) == {"retried": 1}

    assert only_job(engine).queue == "default"
    assert f"queue {limited} has limits" in caplog.text


def test_a_key_of_the_queue_and_retries_in_another_are_refused(queue: PgQueue) -> None:
    retry = Retry.exponential().in_queue("retries")
    words = r"retries move to queue 'retries', .* across='queues'"
    with pytest.raises(OptionError, match=words):
        queue.task(retry=retry, unique=Unique())(lambda: None)

    task = queue.task(name="t", retry=retry)(lambda: None)
    with pytest.raises(OptionError, match=words):
        task.options(unique_key="k")

    queue.task(name="started", retry=retry, unique=Unique(until="started"))(lambda: None)


class NoUse(Exception): ...


def test_one_enqueue_has_a_policy_of_its_own(queue: PgQueue, engine: Engine) -> None:
    @queue.task(retry=Retry.constant(HOUR).never_on(NoUse))
    def call(error: str) -> None:
        raise NoUse if error == "no use" else ConnectionError

    own = call.options(retry=AT_ONCE.in_queue("retries").with_priority(2), max_attempts=2)
    with queue.session() as session, session.begin():
        own.enqueue(session, "retry")
        session.add(own.job("retry"))
        own.enqueue_many(session, [("retry",)])
        own.enqueue(session, "no use")
        call.enqueue(session, "retry")

    ended = endings(Worker(queue, ["default", "retries"]))

    assert ended == {"retried": 4, "failed": 4}
    moved = [(job.queue, job.priority, job.attempts) for job in stored(engine, Job)]
    assert sorted(moved) == [("default", 5, 1)] * 2 + [("retries", 2, 2)] * 3


def test_a_policy_that_cannot_be_stored_is_refused_at_the_enqueue(queue: PgQueue) -> None:
    task = queue.task(name="t", retry=Retry.never().never_on(NoUse))(lambda: None)

    with pytest.raises(OptionError, match=r"with a function, .* give it to the task"):
        task.options(retry=Retry(lambda attempt, error: 1))
    with pytest.raises(OptionError, match="give them to the task"):
        task.options(retry=AT_ONCE.only(NoUse))
    task.options(retry=task.settings.retry)
