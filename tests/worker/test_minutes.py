"""Statistics: a worker writes how its attempts have ended, and no job ever waits for that."""

import logging
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from worker_rig import endings

from chaos.interleavings.logical_workers import (
    TASK,
    declare_dead,
    enqueue,
    execute,
    stored,
    workers_at,
)
from pgqueue import Cancel, JobContext, PgQueue, Retry, Snooze, Worker
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import UPKEEP
from pgqueue.tables import Deploy, ErrorGroup, QueueMinute, TaskMinute
from pgqueue.worker.attempt_counts import AttemptCounts
from pgqueue.worker.duties.minutes import MinuteWriter
from pgqueue.worker.server_clock import ServerClock

AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine, application="shop", version="v1")


def numbers(engine: Engine) -> dict[str, list[int]]:
    """By task: succeeded, failed, retried, cancelled, other."""
    found: dict[str, list[int]] = {}
    for row in stored(engine, TaskMinute):
        before = found.get(row.task, [0] * 5)
        now = (row.succeeded, row.failed, row.retried, row.cancelled, row.other)
        found[row.task] = [sum(pair) for pair in zip(before, now, strict=True)]
    return found


def declare_tasks(queue: PgQueue) -> None:
    @queue.task(name="plain")
    def plain() -> None: ...

    @queue.task(name="result")
    def result() -> int:
        return 1

    @queue.task(name="transactional")
    def transactional(session: Session) -> None:
        session.execute(text("SELECT 1"))

    @queue.task(name="finish")
    def finish(ctx: JobContext) -> None:
        with ctx.finish():
            pass

    @queue.task(name="deleted", keep=timedelta(0))
    def deleted() -> None: ...

    @queue.task(name="fails", max_attempts=3, retry=AT_ONCE)
    def fails() -> None:
        raise ValueError("planned")

    @queue.task(name="gives_up")
    def gives_up() -> Cancel:
        return Cancel("")

    @queue.task(name="snoozes")
    def snoozes(ctx: JobContext) -> Snooze:
        return Snooze(timedelta(days=1))


def test_each_attempt_counts_once_however_it_has_ended(queue: PgQueue, engine: Engine) -> None:
    declare_tasks(queue)
    for task in queue.tasks.values():
        task.delay()

    endings(Worker(queue))

    success = [1, 0, 0, 0, 0]
    assert numbers(engine) == {
        **dict.fromkeys(("plain", "result", "transactional", "finish", "deleted"), success),
        "fails": [0, 1, 2, 0, 0],
        "gives_up": [0, 0, 0, 1, 0],
        "snoozes": [0, 0, 0, 0, 1],
    }
    for row in stored(engine, TaskMinute):
        attempts = sum((row.succeeded, row.failed, row.retried, row.cancelled, row.other))
        assert (sum(row.ran), sum(row.waited)) == (attempts, attempts)
    [group] = stored(engine, ErrorGroup)
    assert (group.error_type, group.message, group.attempts) == ("ValueError", "planned", 3)
    assert group.place.endswith("fails")
    started = sum(row.started for row in stored(engine, QueueMinute))
    assert started == len(queue.tasks) + 2  # two retries
    [deploy] = stored(engine, Deploy)
    assert (deploy.application, deploy.version, group.first_version) == ("shop", "v1", "v1")


def test_of_a_long_drain_some_attempts_are_measured_and_stand_for_all(
    queue: PgQueue, engine: Engine
) -> None:
    @queue.task(name="plain")
    def plain(number: int) -> None: ...

    attempts = 5000
    with queue.session() as session:
        plain.enqueue_many(session, [(number,) for number in range(attempts)])
        session.commit()

    endings(Worker(queue, concurrency=1))

    ran = sum(sum(row.ran) for row in stored(engine, TaskMinute))
    # About forty are measured: five standard deviations to either side.
    assert attempts / 5 < ran < 2 * attempts


def test_the_crash_of_a_worker_is_counted_by_the_one_that_rescues(
    queue: PgQueue, engine: Engine
) -> None:
    queue.task(name=TASK)(lambda: None)
    with workers_at(engine, 1) as [dead]:
        enqueue(engine)
        dead.claim()
        declare_dead(engine, dead)

    endings(Worker(queue))

    assert numbers(engine)[TASK][1:] == [0, 1, 0, 0]
    [group] = stored(engine, ErrorGroup)
    assert (group.error_type, group.attempts) == ("WorkerCrashed", 1)


def test_without_statistics_nothing_is_written(queue: PgQueue, engine: Engine) -> None:
    queue.task(name="plain")(lambda: None).delay()

    endings(Worker(queue, statistics=False))

    assert stored(engine, TaskMinute) == []
    assert stored(engine, QueueMinute) == []
    assert stored(engine, Deploy) == []


def test_jobs_run_on_where_the_statistics_cannot_be_written(
    queue: PgQueue, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    execute(engine, "DROP TABLE pgqueue.task_minutes")
    queue.task(name="plain")(lambda: None).delay()

    with caplog.at_level(logging.WARNING, logger="pgqueue"):
        ended = endings(Worker(queue))

    assert ended == {"succeeded": 1}
    [warning] = caplog.messages
    assert warning.startswith("the statistics cannot be written: ")


def test_what_a_lock_keeps_from_being_written_is_written_later(engine: Engine) -> None:
    counts = AttemptCounts(ServerClock())
    writer = MinuteWriter(counts, application="", version="")
    counts.succeeded(["t"])

    with own_connection(engine, UPKEEP, isolation_level="READ COMMITTED") as connection:
        with engine.begin() as other:
            other.execute(text("LOCK TABLE pgqueue.task_minutes"))
            writer.write(connection)
        counts.succeeded(["t"])
        writer.write(connection)
        writer.write(connection)

    assert numbers(engine) == {"t": [2, 0, 0, 0, 0]}


def test_what_a_broken_connection_keeps_from_being_written_is_written_later(
    engine: Engine,
) -> None:
    counts = AttemptCounts(ServerClock())
    writer = MinuteWriter(counts, application="", version="")
    counts.succeeded(["t"])

    with engine.connect() as broken, engine.connect() as connection:
        pid = broken.scalar(text("SELECT pg_backend_pid()"))
        broken.commit()
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        connection.commit()
        with pytest.raises(OperationalError):
            writer.write(broken)
        writer.write(connection)

    assert numbers(engine) == {"t": [1, 0, 0, 0, 0]}
