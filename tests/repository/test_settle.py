"""The settle: whatever a handler asks for is written, or it is refused in the handler itself."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    enqueue,
    execute,
    stored,
    violations,
)
from pgqueue import (
    Job,
    JobAttempt,
    JobStatus,
    MessageQueue,
    PgQueueError,
    RetryLater,
    Snooze,
)
from pgqueue.models import UnreadableJob
from pgqueue.outcomes import (
    AttemptEnd,
    ErrorReport,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.jobs import Jobs

DAY = timedelta(days=1)


def only_job(engine: Engine) -> Job:
    [job] = stored(engine, Job)
    return job


@pytest.mark.parametrize("delay", [timedelta.max, timedelta.min])
def test_a_delay_beyond_all_bounds_is_brought_within_them(
    engine: Engine, worker: LogicalWorker, delay: timedelta
) -> None:
    outcomes: tuple[Outcome, ...] = (Snoozed(delay), Retried(delay, ERROR))
    claims = [worker.claim_new(engine) for _ in outcomes]

    for claimed, outcome in zip(claims, outcomes, strict=True):
        assert worker.settle(claimed, outcome)

    latest = datetime.now(UTC) + timedelta(days=36_526)
    for job in stored(engine, Job):
        assert job.status is JobStatus.PENDING
        assert datetime.now(UTC) - timedelta(minutes=1) < job.run_at < latest
    assert violations(engine) == []


def test_a_job_that_snoozes_for_ever_is_not_stopped_by_its_counter(
    engine: Engine, worker: LogicalWorker
) -> None:
    with engine.begin() as connection:
        enqueue(connection)
        connection.execute(text("UPDATE pgqueue.jobs SET snoozes = 32766"))

    for _ in range(3):
        [claimed] = worker.claim()
        assert claimed.attempt == 1
        assert worker.settle(claimed, Snoozed(timedelta(0)))

    assert only_job(engine).snoozes == 32_767


@pytest.mark.parametrize("delay", [5, 2.5, "1 hour", None])
def test_a_snooze_of_something_else_than_a_timedelta_is_refused_where_it_is_made(
    delay: Any,
) -> None:
    with pytest.raises(PgQueueError, match="timedelta") as refusal:
        Snooze(delay)

    assert isinstance(refusal.value, TypeError)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"delay": 5}, "RetryLater takes a timedelta"),
        ({"delay": timedelta(-1)}, "from zero"),
        ({"queue": "a b"}, "RetryLater: queue is 'a b'"),
        ({"priority": 10}, "RetryLater: priority is 10"),
    ],
)
def test_a_retry_that_cannot_be_is_refused_where_it_is_asked_for(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(PgQueueError, match=words):
        RetryLater(**given)


def test_what_goes_on_keeps_its_attempts_its_place_and_its_errors(
    engine: Engine, worker: LogicalWorker
) -> None:
    enqueue(engine, max_attempts=3)
    first_run_at = only_job(engine).run_at
    steps: list[tuple[Outcome, int, int]] = [
        (Released(), 0, 0),
        (Snoozed(timedelta(0)), 0, 1),
        (Retried(timedelta(0), ERROR), 1, 1),
        (Released(), 1, 1),
        (Retried(None, ERROR), 2, 1),
    ]

    for outcome, attempts, snoozes in steps:
        [claimed] = worker.claim()
        before = only_job(engine).run_at
        assert worker.settle(claimed, outcome)
        job = only_job(engine)
        assert (job.attempts, job.snoozes, job.status) == (attempts, snoozes, JobStatus.PENDING)
        if isinstance(outcome, Released) or outcome == Retried(None, ERROR):
            assert job.run_at == before
        [message] = stored(engine, MessageQueue)
        assert (message.run_at, message.attempt) == (job.run_at, attempts)

    [last] = worker.claim()
    assert last.attempt == 3
    assert worker.settle(last, Retried(timedelta(0), ERROR))
    job = only_job(engine)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.FAILED, 3, "planned")
    assert job.run_at > first_run_at
    rows = sorted((row.attempt, row.outcome, row.error_type) for row in stored(engine, JobAttempt))
    assert rows == [(attempt, "failed", "ValueError") for attempt in (1, 2, 3)]
    assert violations(engine) == []


def test_the_last_error_of_an_exception_without_a_message_is_its_type(
    engine: Engine, worker: LogicalWorker
) -> None:
    silent = ErrorReport("shop.OutOfStock", "", "")

    assert worker.settle(worker.claim_new(engine), Failed(silent))

    assert only_job(engine).last_error == "shop.OutOfStock"
    [failed] = stored(engine, JobAttempt)
    assert (failed.error_type, failed.error) == ("shop.OutOfStock", "")


@pytest.mark.parametrize("how", ["with a result", "in a batch", "in its transaction"])
def test_a_job_that_has_succeeded_has_no_error_but_its_attempts_keep_theirs(
    engine: Engine, worker: LogicalWorker, how: str
) -> None:
    claimed = worker.claim_new(engine)
    assert worker.settle(claimed, Retried(timedelta(0), ERROR))
    assert only_job(engine).last_error == "planned"

    [claimed] = worker.claim()
    match how:
        case "with a result":
            assert worker.settle(claimed, Succeeded({"sum": 3}))
        case "in a batch":
            assert worker.attempts.settle_succeeded([claimed]) is None
        case _:
            assert worker.attempts.settle_one_success(claimed)

    job = only_job(engine)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.SUCCEEDED, 2, None)
    [failed] = stored(engine, JobAttempt)
    assert (failed.attempt, failed.error) == (1, "planned")
    assert violations(engine) == []


@pytest.mark.parametrize("outcome", [Snoozed(timedelta(0)), Released()])
def test_a_job_that_goes_on_keeps_the_error_of_the_attempt_that_failed_last(
    engine: Engine, worker: LogicalWorker, outcome: Outcome
) -> None:
    enqueue(engine)
    for one in (Retried(timedelta(0), ERROR), outcome):
        worker.run_next(one)

    assert only_job(engine).last_error == "planned"


def test_a_crash_of_a_handlers_process_is_counted_apart_from_failures(
    engine: Engine, worker: LogicalWorker
) -> None:
    enqueue(engine, max_attempts=4)
    steps = [
        (Retried(timedelta(0), ERROR), 0),
        (Retried(None, ERROR, AttemptEnd.CRASHED), 1),
        (Retried(timedelta(0), ERROR), 1),
    ]

    for outcome, crashes in steps:
        worker.run_next(outcome)
        [message] = stored(engine, MessageQueue)
        assert (message.crashes, message.alone) == (crashes, crashes > 0)

    worker.run_next(Retried(None, ERROR, AttemptEnd.CRASHED))
    job = only_job(engine)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.FAILED, 4, "planned")
    assert violations(engine) == []


def test_a_batch_may_end_in_every_way_at_once(engine: Engine, worker: LogicalWorker) -> None:
    with engine.begin() as connection:
        ids = [enqueue(connection, key=f"k{n}") for n in range(7)]
    outcomes: list[Outcome] = [
        Succeeded({"sum": 3}),
        Failed(ERROR),
        Retried(timedelta(0), ERROR),
        Snoozed(timedelta(hours=1)),
        Released(),
        Unreadable(ERROR, DAY),
        Interrupted(max_interruptions=1),
    ]
    claimed = worker.claim(10)

    settled = worker.attempts.settle(list(zip(claimed, outcomes, strict=True)))

    assert settled.keys() == set(ids)
    jobs = stored(engine, Job)
    assert [(job.id, job.status.value, job.held_unique_key) for job in jobs] == [
        (ids[0], "succeeded", None),
        (ids[1], "failed", None),
        *((ids[n], "pending", f"k{n}") for n in (2, 3, 4, 5)),
        (ids[6], "failed", None),
    ]
    assert jobs[0].result == {"sum": 3}
    assert violations(engine) == []


def test_an_interruption_counts_towards_a_limit_of_its_own(
    engine: Engine, worker: LogicalWorker
) -> None:
    enqueue(engine, max_attempts=1)

    for interruptions in (1, 2, 3):
        assert only_job(engine).status is JobStatus.PENDING
        claimed = worker.run_next(Interrupted(max_interruptions=3))
        job = only_job(engine)
        assert (claimed.attempt, job.attempts, job.interruptions) == (1, 0, interruptions)

    assert job.status is JobStatus.FAILED
    assert job.last_error is not None
    assert "The job has reached max_interruptions = 3" in job.last_error
    rows = stored(engine, JobAttempt)
    assert [(row.attempt, row.outcome) for row in rows] == [(1, "interrupted")] * 3
    assert violations(engine) == []


def of_only_job(engine: Engine, change: str) -> None:
    execute(engine, change)


def claim_now(engine: Engine, worker: LogicalWorker) -> Claimed:
    for table in ("jobs", "message_queue"):
        of_only_job(engine, f"UPDATE pgqueue.{table} SET run_at = '2001-01-01Z'")
    [claimed] = worker.claim()
    return claimed


@pytest.mark.parametrize(("age", "pause"), [(0, 5), (40, 20), (4000, 60)])
def test_an_unreadable_job_waits_longer_the_longer_it_has_waited(
    engine: Engine, worker: LogicalWorker, age: int, pause: int
) -> None:
    enqueue(engine, max_attempts=1)
    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, DAY))
    of_only_job(engine, f"UPDATE pgqueue.unreadable_jobs SET since = now() - interval '{age} s'")

    claimed = claim_now(engine, worker)
    before = datetime.now(UTC)
    assert worker.settle(claimed, Unreadable(ERROR, DAY))

    job = only_job(engine)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.PENDING, 0, "planned")
    assert timedelta(seconds=pause) <= job.run_at - before < timedelta(seconds=pause + 5 + age / 20)
    [row] = stored(engine, UnreadableJob)
    assert (row.job_id, row.task, row.reason) == (job.id, claimed.task, "planned")
    assert row.since <= before - timedelta(seconds=age)
    assert stored(engine, JobAttempt) == []
    assert violations(engine) == []


def test_a_job_that_was_unreadable_for_too_long_fails_and_may_be_requeued(
    engine: Engine, worker: LogicalWorker
) -> None:
    job = enqueue(engine)
    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, DAY))
    of_only_job(engine, "UPDATE pgqueue.unreadable_jobs SET since = now() - interval '1 day'")

    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, DAY))

    failed = only_job(engine)
    assert (failed.status, failed.attempts, failed.last_error) == (JobStatus.FAILED, 1, "planned")
    assert [row.outcome for row in stored(engine, JobAttempt)] == ["failed"]
    assert stored(engine, UnreadableJob) == []
    with engine.begin() as connection:
        Jobs(connection).requeue(job, notify=False)
    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, DAY))
    assert only_job(engine).status is JobStatus.PENDING
    assert violations(engine) == []


def test_a_limit_of_zero_fails_an_unreadable_job_at_once(
    engine: Engine, worker: LogicalWorker
) -> None:
    enqueue(engine)

    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, timedelta(0)))

    assert only_job(engine).status is JobStatus.FAILED


@pytest.mark.parametrize(
    ("outcome", "is_kept"),
    [
        (Released(), True),
        (Retried(timedelta(0), ERROR), False),
        (Snoozed(timedelta(0)), False),
        (Interrupted(max_interruptions=9), False),
        (Succeeded({"sum": 3}), False),
    ],
)
def test_a_started_attempt_forgets_since_when_a_job_was_unreadable(
    engine: Engine, worker: LogicalWorker, outcome: Outcome, is_kept: bool
) -> None:
    enqueue(engine)
    assert worker.settle(claim_now(engine, worker), Unreadable(ERROR, DAY))

    assert worker.settle(claim_now(engine, worker), outcome)

    assert len(stored(engine, UnreadableJob)) == is_kept


def started_ago(engine: Engine, hours: int) -> None:
    """Move back what is on record of the first attempt, and of the lease."""
    ago = f"started_at = started_at - interval '{hours} hours'"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE pgqueue.job_attempts SET {ago} WHERE attempt = 1"))
        connection.execute(text(f"UPDATE pgqueue.leases SET {ago} WHERE attempt = 1"))


def retried(delay: timedelta, limit: timedelta | None) -> Retried:
    return Retried(delay, ERROR, give_up_after=limit)


@pytest.mark.parametrize(
    ("delay", "limit", "outcome"),
    [(2, 1, "failed"), (1, 2, None), (48, None, None)],
)
def test_a_wait_that_ends_after_the_limit_fails_the_job_at_its_first_attempt(
    engine: Engine, worker: LogicalWorker, delay: int, limit: int | None, outcome: str | None
) -> None:
    claimed = worker.claim_new(engine)
    longest = None if limit is None else timedelta(hours=limit)

    assert worker.settle(claimed, retried(timedelta(hours=delay), longest))

    job = only_job(engine)
    assert (job.outcome, job.attempts, job.last_error) == (outcome, 1, ERROR.message)
    assert violations(engine) == []


def test_the_limit_counts_from_the_start_of_the_first_attempt(
    engine: Engine, worker: LogicalWorker
) -> None:
    limit = timedelta(hours=2)
    first = worker.claim_new(engine)
    assert worker.settle(first, retried(timedelta(0), limit))
    started_ago(engine, 1)
    worker.run_next(retried(timedelta(0), limit))
    assert only_job(engine).outcome is None
    started_ago(engine, 1)
    [third] = worker.claim()

    assert worker.settle(third, retried(timedelta(0), limit))

    assert (only_job(engine).outcome, only_job(engine).attempts) == ("failed", 3)


def test_the_limit_begins_anew_when_a_failed_job_is_requeued(
    engine: Engine, worker: LogicalWorker
) -> None:
    limit = timedelta(hours=2)
    claimed = worker.claim_new(engine)
    assert worker.settle(claimed, retried(3 * limit, limit))
    started_ago(engine, 5)
    with Session(engine) as session, session.begin():
        assert Jobs(session).requeue(claimed.job_id, notify=False)

    for _ in range(2):
        worker.run_next(retried(timedelta(0), limit))

    assert (only_job(engine).outcome, only_job(engine).attempts) == (None, 2)
