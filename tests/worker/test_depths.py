"""Workers count the jobs of the queues, one worker at a time, and jobs never wait for a count."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine
from worker_rig import running, wait_until

from chaos.interleavings.logical_workers import execute, stored
from pgqueue import Job, PgQueue, Worker
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import UPKEEP
from pgqueue.tables import QueueMinute
from pgqueue.worker.duties import depths
from pgqueue.worker.duties.depths import CountQueues


@pytest.fixture
def upkeep(engine: Engine) -> Iterator[Connection]:
    with own_connection(engine, UPKEEP, isolation_level="READ COMMITTED") as connection:
        yield connection


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "EVERY", 0.05)


@pytest.mark.usefixtures("often")
def test_a_worker_counts_the_jobs_of_all_queues(engine: Engine) -> None:
    queue = PgQueue(engine)
    other = PgQueue(engine)
    queue.task(name="t", queue="other")(lambda: None).delay()

    with running(Worker(other, ["mine"])):
        wait_until(lambda: bool(stored(engine, QueueMinute)), what="the queues are counted")

    row = stored(engine, QueueMinute)[-1]
    assert (row.queue, row.waiting, row.due) == ("other", 1, 1)


def test_one_worker_counts_and_another_one_when_it_ends(engine: Engine, upkeep: Connection) -> None:
    first, second = CountQueues(), CountQueues()
    with own_connection(engine, UPKEEP, isolation_level="READ COMMITTED") as theirs:
        assert first.may_count(theirs)
        assert not second.may_count(upkeep)
        assert first.may_count(theirs)

    wait_until(lambda: second.may_count(upkeep), what="the server has ended the other connection")


def test_a_count_is_followed_by_a_rest_of_fifty_times_as_long(
    engine: Engine, upkeep: Connection
) -> None:
    duty = CountQueues()
    execute(
        engine,
        "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END'",
    )
    execute(
        engine,
        "CREATE TRIGGER slow AFTER INSERT ON pgqueue.queue_minutes EXECUTE FUNCTION public.slow()",
    )

    duty.step(upkeep)
    counted = stored(engine, QueueMinute)[-1].counted_at
    duty.step(upkeep)  # it was asked for while the last one ran

    assert stored(engine, QueueMinute)[-1].counted_at == counted
    assert not duty.may_count(upkeep)


@pytest.mark.usefixtures("often")
def test_jobs_run_on_where_the_queues_cannot_be_counted(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    execute(engine, "ALTER TABLE pgqueue.queue_minutes ADD CHECK (started IS NULL)")
    queue = PgQueue(engine)
    task = queue.task(name="t")(lambda: None)

    with running(Worker(queue)):
        wait_until(lambda: "janitor: the database" in caplog.text, what="it is refused")
        job = task.delay()
        wait_until(lambda: stored(engine, Job)[0].outcome == "succeeded", what=f"job {job} ran")
