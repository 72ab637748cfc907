"""What ``queue.on_attempt_end`` tells: every outcome that is accepted, once, after its COMMIT."""

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, Rig, endings

from chaos.interleavings.logical_workers import TASK, logical_workers, worker_settings
from pgqueue import (
    AttemptEnd,
    AttemptEnded,
    AttemptOutcome,
    Cancel,
    Discard,
    Job,
    JobContext,
    PgQueue,
    Retry,
    Secret,
    Snooze,
    Worker,
)

AT_ONCE = Retry.constant(timedelta(0))
Outcome = AttemptOutcome


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.fixture
def told(queue: PgQueue) -> list[AttemptEnded]:
    told: list[AttemptEnded] = []
    queue.on_attempt_end(told.append)
    return told


def run(queue: PgQueue) -> dict[str, int]:
    return endings(Worker(queue, concurrency=2))


def in_short(told: list[AttemptEnded]) -> list[tuple[int, str, str | None, bool]]:
    return [(each.attempt, each.outcome, each.end, each.is_final) for each in told]


def test_each_ending_is_told_as_it_is_in_the_tables(
    queue: PgQueue, told: list[AttemptEnded]
) -> None:
    expected = {
        "succeed": [(1, Outcome.SUCCEEDED, None, True)],
        "give": [(1, Outcome.SUCCEEDED, None, True)],
        "fail": [
            (1, Outcome.RETRIED, AttemptEnd.FAILED, False),
            (2, Outcome.FAILED, AttemptEnd.FAILED, True),
        ],
        "discard": [(1, Outcome.FAILED, AttemptEnd.DISCARDED, True)],
        "cancel": [(1, Outcome.CANCELLED, None, True)],
        "snooze": [(1, Outcome.SNOOZED, None, False), (1, Outcome.SUCCEEDED, None, True)],
        "write": [(1, Outcome.SUCCEEDED, None, True)],
        "sleep": [(1, Outcome.FAILED, AttemptEnd.TIMEOUT, True)],
    }
    snoozed: list[int] = []
    stop = Event()

    def handle(session: Session, how: str) -> Any:
        match how:
            case "give":
                return 7
            case "fail":
                raise ValueError("in the handler")
            case "discard":
                raise Discard("no use")
            case "cancel":
                return Cancel("not needed")
            case "snooze" if not snoozed:
                snoozed.append(1)
                return Snooze(timedelta(0))
            case "write":
                session.execute(text("SELECT 1"))
        return None

    options: dict[str, Any] = {"max_attempts": 2, "retry": AT_ONCE}
    task = queue.task(name="any", **options)(handle)

    @queue.task(max_attempts=1, timeout=timedelta(seconds=0.3))
    def oversleep(ctx: JobContext) -> None:
        while not ctx.is_cancelled():
            stop.wait(0.01)

    jobs = {how: task.delay(how).id for how in expected if how != "sleep"}
    jobs["sleep"] = oversleep.delay().id

    run(queue)

    found = {how: in_short([e for e in told if e.job_id == id]) for how, id in jobs.items()}
    assert found == expected
    assert {event.job_id for event in told} == set(jobs.values())


def test_an_event_knows_the_job_its_error_and_its_times(
    queue: PgQueue, told: list[AttemptEnded]
) -> None:
    @queue.task(name="pay", queue="money", max_attempts=3, retry=Retry.never())
    def pay(card: Secret[str]) -> None:
        time.sleep(0.02)
        raise ValueError(f"card {card} is refused")

    with queue.session() as session, session.begin():
        job = pay.enqueue(session, "4000-1111")
        job_id, run_at = job.id, job.run_at

    run(queue)

    [event] = told
    assert (event.job_id, event.task, event.queue) == (job_id, "pay", "money")
    assert (event.attempt, event.max_attempts) == (1, 3)
    assert event.error is not None
    assert (event.error.type, event.error.message) == ("ValueError", "card *** is refused")
    assert "4000-1111" not in event.error.traceback
    assert event.ran is not None
    assert event.ran >= timedelta(seconds=0.02)
    with queue.session() as session:
        started = session.scalars(select(Job.started_at)).one()
    assert started is not None
    assert event.waited is not None
    # The lease is written after the claim has read the clock, and the handler starts after that.
    assert abs(event.waited - (started - run_at)) < timedelta(seconds=PATIENCE)
    assert event.waited >= timedelta(0)


def test_an_event_has_the_meta_of_its_job(queue: PgQueue, told: list[AttemptEnded]) -> None:
    task = queue.task(name="any", expires_in=timedelta(hours=1))(lambda: None)
    task.options(meta={"tenant": "acme"}).delay()

    run(queue)

    assert [event.meta for event in told] == [{"tenant": "acme"}]


def test_arguments_that_cannot_be_read_are_told(queue: PgQueue, told: list[AttemptEnded]) -> None:
    @queue.task
    def numbered(number: int) -> None: ...

    job_id = numbered.delay(1).id
    with queue.engine.begin() as connection:
        connection.execute(text("""UPDATE pgqueue.jobs SET args = '{"number": "x"}'"""))

    Worker(queue).run_until_empty(timeout=PATIENCE)

    assert (told[0].job_id, told[0].attempt) == (job_id, 1)
    assert told[0].outcome is not Outcome.SUCCEEDED


@pytest.mark.journey
def test_the_rescuer_tells_the_attempts_of_dead_workers(
    queue: PgQueue, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[AttemptEnded] = []
    queue.on_attempt_end(told.append)
    task = queue.task(name=TASK)(lambda: None)
    last = task.options(max_attempts=1, meta={"tenant": "acme"}).delay().id
    goes_on = task.delay().id
    workers = worker_settings(database_url)
    with logical_workers(workers, 1) as [dead]:
        assert len(dead.claim(2)) == 2
        with queue.engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
        worker = Worker(queue, poll_interval=timedelta(seconds=0.05))
        stop_at_end_of(queue, goes_on, worker)
        with caplog.at_level(logging.ERROR, "pgqueue"):
            worker.run()
    workers.dispose()

    crashes = [event for event in told if event.end is AttemptEnd.CRASHED]
    assert {(event.job_id, event.task, event.outcome, event.is_final) for event in crashes} == {
        (last, TASK, AttemptOutcome.FAILED, True),
        (goes_on, TASK, AttemptOutcome.RETRIED, False),
    }
    assert [event.meta for event in crashes if event.job_id == last] == [{"tenant": "acme"}]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [line for line in lines if line.startswith(f"job {last} {TASK} has failed")]


def stop_at_end_of(queue: PgQueue, job_id: int, worker: Worker) -> None:
    @queue.on_attempt_end
    def stop(event: AttemptEnded) -> None:
        if event.job_id == job_id and event.is_final:
            worker.stop()


@pytest.fixture
def rig(database_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("CHAOS_DIRECTORY", str(tmp_path))
    with Rig(database_url, tmp_path) as rig:
        yield rig


def test_a_callback_that_fails_is_logged_and_keeps_no_other_from_its_events(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    @queue.on_attempt_end
    def leave(event: AttemptEnded) -> None:
        raise SystemExit("in the callback")

    told: list[AttemptEnded] = []
    queue.on_attempt_end(told.append)
    task = queue.task(name="any")(lambda: None)
    for _ in range(3):
        task.delay()

    assert run(queue) == {"succeeded": 3}

    assert [event.outcome for event in told] == [AttemptOutcome.SUCCEEDED] * 3
    assert caplog.text.count("the on_attempt_end callback") == 3


def test_a_result_that_comes_too_late_is_not_told(queue: PgQueue, told: list[AttemptEnded]) -> None:
    @queue.task
    def lose_the_lease() -> None:
        with queue.engine.begin() as connection:
            connection.execute(text("DELETE FROM pgqueue.leases"))

    lose_the_lease.delay()

    assert run(queue) == {"stale": 1}
    assert told == []
