"""The trail of a job: what has happened to it, and how long it waited and ran."""

from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import ERROR, LogicalWorker, enqueue, execute
from pgqueue.outcomes import Retried, Succeeded
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.listing import JobDetails, Listing
from pgqueue.views.trail import Event, What, schedule_of, stretches, trail

HOUR = timedelta(hours=1)


def details(engine: Engine, job_id: int) -> JobDetails:
    with Session(engine) as session:
        return Listing(session).job(job_id)


def told(events: list[Event]) -> list[tuple[str, int | None, str]]:
    return [(event.what.value, event.attempt, event.outcome) for event in events]


def test_it_has_each_attempt_and_the_end_in_order(engine: Engine, worker: LogicalWorker) -> None:
    job_id = enqueue(engine)
    worker.run_next(Retried(timedelta(0), ERROR))
    worker.run_next(Succeeded())

    events = trail(details(engine, job_id))

    assert [one for one in told(events) if one[0] != "due"] == [
        ("enqueued", None, ""),
        ("attempt", 1, "failed"),
        ("attempt", 2, "succeeded"),
        ("ended", None, "succeeded"),
    ]
    first, second = (event for event in events if event.what is What.ATTEMPT)
    assert first.error == "ValueError: planned"
    assert first.until is not None
    assert second.waited == second.at - first.until


def test_an_attempt_names_the_queue_of_its_retry(engine: Engine, worker: LogicalWorker) -> None:
    job_id = enqueue(engine)
    worker.run_next(Retried(HOUR, ERROR, queue="retries"))

    moved = [event.moved_to for event in trail(details(engine, job_id))]

    assert [queue for queue in moved if queue is not None] == ["retries"]


def test_a_retry_to_come_is_its_last_event(engine: Engine, worker: LogicalWorker) -> None:
    job_id = enqueue(engine)
    worker.run_next(Retried(HOUR, ERROR))
    job = details(engine, job_id)

    assert told(trail(job))[-2:] == [("attempt", 1, "failed"), ("due", None, "")]
    assert [one.is_run for one in stretches(job)] == [False, True, False]
    assert stretches(job)[-1].took > HOUR - timedelta(minutes=5)


def test_a_running_attempt_lasts_until_now(engine: Engine, worker: LogicalWorker) -> None:
    job_id = worker.claim_new(engine).job_id
    with engine.begin() as connection:
        Jobs(connection).cancel(job_id)
    execute(engine, "UPDATE pgqueue.leases SET started_at = started_at - interval '1 h'")
    execute(engine, "UPDATE pgqueue.jobs SET created_at = created_at - interval '2 h'")
    job = details(engine, job_id)

    assert ("attempt", 1, "running") in told(trail(job))
    assert told(trail(job))[-1] == ("cancel requested", None, "")
    waited, ran = stretches(job)
    assert (waited.is_run, ran.is_run) == (False, True)
    assert abs(waited.took - HOUR) < timedelta(minutes=5)
    assert abs(ran.took - HOUR) < timedelta(minutes=5)


def test_a_job_cancelled_while_it_waited_has_waited_only(engine: Engine) -> None:
    job_id = enqueue(engine)
    with engine.begin() as connection:
        Jobs(connection).cancel(job_id)

    assert [one.is_run for one in stretches(details(engine, job_id))] == [False]


def test_meta_names_its_schedule_also_if_a_hand_has_written_it(engine: Engine) -> None:
    named = enqueue(engine, meta='{"schedule": {"name": "nightly", "tick": null}}')
    odd = [enqueue(engine, meta=meta) for meta in ("7", '{"schedule": 7}', '{"schedule": {}}')]

    assert schedule_of(details(engine, named)) == "nightly"
    assert [schedule_of(details(engine, job_id)) for job_id in odd] == [None] * 3
