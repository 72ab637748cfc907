"""Workers count the jobs of the queues, one worker at a time, and jobs never wait for a count."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine
from worker_rig import running, wait_until

from chaos.interleavings.logical_workers import execute, stored
from pgqueue import Job, PgQueue, Worker
from pgqueue.database.opening import own_connection
from pgqueue.tables import QueueMinute
from pgqueue.worker.duties import depths
from pgqueue.worker.duties.depths import DepthCounter
from pgqueue.worker.duties.rescue import HOUSEKEEPING
from pgqueue.worker.outage import Outage


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "EVERY", 0.0)


@pytest.fixture
def rescuer(engine: Engine) -> Iterator[Connection]:
    with own_connection(engine, HOUSEKEEPING, isolation_level="READ COMMITTED") as connection:
        yield connection


class Counter(DepthCounter):
    """Notes that it is woken, and has no thread."""

    wakes = 0

    def wake(self, seconds: float = 0.0) -> None:
        self.wakes += 1


def test_a_worker_counts_the_jobs_of_all_queues(engine: Engine) -> None:
    queue = PgQueue(engine)
    other = PgQueue(engine)
    queue.task(name="t", queue="other")(lambda: None).delay()

    with running(Worker(other, ["mine"])):
        wait_until(lambda: bool(stored(engine, QueueMinute)), what="the queues are counted")

    row = stored(engine, QueueMinute)[-1]
    assert (row.queue, row.waiting, row.due) == ("other", 1, 1)


def test_one_worker_counts_and_another_one_when_it_ends(engine: Engine) -> None:
    first, second = (Counter(engine, Outage()) for _ in range(2))
    with own_connection(engine, HOUSEKEEPING, isolation_level="READ COMMITTED") as ours:
        with own_connection(engine, HOUSEKEEPING, isolation_level="READ COMMITTED") as theirs:
            first.wake_if_due(theirs)
            second.wake_if_due(ours)
            first.wake_if_due(theirs)
            assert (first.wakes, second.wakes) == (2, 0)

        def is_woken() -> bool:
            second.wake_if_due(ours)
            return second.wakes == 1

        wait_until(is_woken, what="the server has ended the other connection")


def test_a_count_is_followed_by_a_rest_of_fifty_times_as_long(
    engine: Engine, rescuer: Connection
) -> None:
    counter = Counter(engine, Outage())
    execute(
        engine,
        "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END'",
    )
    execute(
        engine,
        "CREATE TRIGGER slow AFTER INSERT ON pgqueue.queue_minutes EXECUTE FUNCTION public.slow()",
    )

    counter.step(rescuer)
    counter.wake_if_due(rescuer)

    assert counter.wakes == 0


def test_jobs_run_on_where_the_queues_cannot_be_counted(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    execute(engine, "ALTER TABLE pgqueue.queue_minutes ADD CHECK (started IS NULL)")
    queue = PgQueue(engine)
    task = queue.task(name="t")(lambda: None)

    with running(Worker(queue)):
        wait_until(lambda: "depths: the database refuses" in caplog.text, what="a count is refused")
        job = task.delay()
        wait_until(lambda: stored(engine, Job)[0].outcome == "succeeded", what=f"job {job} ran")
