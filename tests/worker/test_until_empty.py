"""Worker.run_until_empty as tests use it: errors are raised, and the future is run."""

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from worker_rig import wait_until

from pgqueue import (
    AttemptEnded,
    AttemptFailed,
    Cancel,
    Discard,
    JobContext,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    Retry,
    Worker,
)
from pgqueue.testing import enqueued


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def test_the_first_error_of_a_handler_is_raised_when_all_jobs_have_run(queue: PgQueue) -> None:
    error = LookupError("no such card")
    ran = []

    @queue.task
    def fail(session: Session) -> None:
        raise error

    @queue.task
    def note() -> None:
        ran.append("note")

    fail.delay()
    note.delay()

    with pytest.raises(LookupError) as caught:
        Worker(queue, concurrency=1).run_until_empty(raise_errors=True)

    assert caught.value is error
    assert ran == ["note"]


def test_what_a_handler_asks_for_is_no_error(queue: PgQueue) -> None:
    @queue.task
    def give_up(how: str) -> Cancel | Discard:
        if how == "raise":
            raise Discard("no use")
        return Discard("no use") if how == "discard" else Cancel("no use")

    for how in ("raise", "discard", "cancel"):
        give_up.delay(how)

    counts = Worker(queue).run_until_empty(raise_errors=True)

    assert counts == {"failed": 2, "cancelled": 1}


def test_a_failure_without_an_exception_is_raised_too(queue: PgQueue) -> None:
    never = Event()

    @queue.task(timeout=timedelta(milliseconds=100), retry=Retry.never())
    def stay(ctx: JobContext) -> None:
        while not ctx.is_cancelled():
            never.wait(0.01)

    stay.delay()

    with pytest.raises(AttemptFailed, match="attempt 1 ended as timeout"):
        Worker(queue, concurrency=2).run_until_empty(raise_errors=True)


def test_ahead_runs_the_future_and_leaves_what_is_later(queue: PgQueue) -> None:
    seen: list[str] = []

    @queue.task
    def note(session: Session, word: str) -> None:
        seen.append(word)
        if word == "in one hour":
            note.options(delay=timedelta(hours=1)).enqueue(session, "in two hours")

    note.options(delay=timedelta(minutes=90)).delay("in 90 minutes")
    note.options(delay=timedelta(hours=1)).delay("in one hour")
    later = note.options(delay=timedelta(hours=4)).delay("in four hours")

    counts = Worker(queue).run_until_empty(ahead=timedelta(hours=3))

    assert seen == ["in one hour", "in 90 minutes", "in two hours"]
    assert counts == {"succeeded": 3}
    with queue.session() as session:
        (left,) = enqueued(session)
        assert (left.id, left.run_at, left.status) == (later.id, later.run_at, JobStatus.PENDING)
        assert queue.check(session) == []


def test_the_endings_are_plain_words(queue: PgQueue) -> None:
    @queue.task
    def finish(ctx: JobContext) -> None:
        with ctx.finish():
            pass

    finish.delay()

    counts = Worker(queue).run_until_empty(timeout=60)

    assert repr(counts) == "{'succeeded': 1}"


def test_a_result_that_is_not_kept_is_logged_with_the_reason(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    lost = queue.task(name="lose")(lambda: object()).delay()

    Worker(queue).run_until_empty(timeout=60)

    [line] = [line for line in caplog.messages if line.startswith(f"job {lost.id} lose")]
    assert "it has succeeded, and its result is not kept: object: object has no form in" in line


def test_ahead_is_a_timedelta(queue: PgQueue) -> None:
    with pytest.raises(OptionError, match="ahead is 5; give a timedelta from zero"):
        Worker(queue).run_until_empty(ahead=5)  # type: ignore[arg-type]


def test_a_job_that_was_given_back_before_it_started_is_not_counted(queue: PgQueue) -> None:
    releases: list[int] = []

    @queue.on_attempt_end
    def remember(end: AttemptEnded) -> None:
        if end.outcome == "released":
            releases.append(end.job_id)

    @queue.task
    def wait_for_a_release(number: int) -> None:
        # Some jobs later, the worker claims ahead of its slot; then those wait for too long.
        if number == 500:
            wait_until(lambda: releases, what="a job that was claimed ahead is given back")

    with queue.session() as session, session.begin():
        wait_for_a_release.enqueue_many(session, [(number,) for number in range(2000)])

    assert Worker(queue, concurrency=1).run_until_empty(timeout=60) == {"succeeded": 2000}


def test_a_round_of_admissions_that_fails_ends_no_worker(
    queue: PgQueue, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgqueue")
    limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
    limited.delay()

    with ThreadPoolExecutor() as pool, Session(engine) as locking:
        locking.execute(text("LOCK TABLE pgqueue.waiting_messages"))
        ended = pool.submit(Worker(queue).run_until_empty, timeout=60)
        # The first round may have begun before the worker waits for one.
        wait_until(lambda: caplog.text.count("admitter: waiting for a lock") > 2 or ended.done())
        locking.rollback()

        assert ended.result()["succeeded"] == 1
