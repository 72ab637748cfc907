"""Worker.run_until_empty as tests use it: errors are raised, and the future is run."""

from datetime import timedelta
from threading import Event
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session
from worker_rig import wait_until

from pgqueue import (
    AttemptFailed,
    Cancel,
    Discard,
    JobContext,
    JobStatus,
    OptionError,
    PgQueue,
    Retry,
    Worker,
)
from pgqueue.testing import enqueued

MODES = pytest.mark.parametrize("mode", ["lease", "transaction"])


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@MODES
def test_the_first_error_of_a_handler_is_raised_when_all_jobs_have_run(
    queue: PgQueue, mode: str
) -> None:
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
        Worker(queue, mode=mode, concurrency=1).run_until_empty(raise_errors=True)

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


@MODES
def test_ahead_runs_the_future_and_leaves_what_is_later(queue: PgQueue, mode: str) -> None:
    seen: list[str] = []

    @queue.task
    def note(session: Session, word: str) -> None:
        seen.append(word)
        if word == "in one hour":
            note.options(delay=timedelta(hours=1)).enqueue(session, "in two hours")

    note.options(delay=timedelta(minutes=90)).delay("in 90 minutes")
    note.options(delay=timedelta(hours=1)).delay("in one hour")
    later = note.options(delay=timedelta(hours=4)).delay("in four hours")

    counts = Worker(queue, mode=mode).run_until_empty(ahead=timedelta(hours=3))

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


@MODES
def test_a_result_that_is_not_kept_is_logged_with_the_reason(
    queue: PgQueue, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost = queue.task(name="lose")(lambda: object()).delay()

    Worker(queue, mode=mode).run_until_empty(timeout=60)

    [line] = [line for line in caplog.messages if line.startswith(f"job {lost.id} lose")]
    assert "it has succeeded, and its result is not kept: object: object has no form in" in line


def test_ahead_is_a_timedelta(queue: PgQueue) -> None:
    with pytest.raises(OptionError, match="ahead is 5; give a timedelta of 0 seconds or more"):
        Worker(queue).run_until_empty(ahead=5)  # type: ignore[arg-type]


def test_a_timeout_that_another_slot_meets_half_settled_is_waited_for(
    engine: Engine, queue: PgQueue
) -> None:
    """Another slot claims the message between the end of its transaction and its settle."""
    met = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%held%'"

    @queue.task(
        timeout=timedelta(milliseconds=300), max_attempts=2, retry=Retry.constant(timedelta(0))
    )
    def stay(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            wait_until(ctx.is_cancelled)

    @event.listens_for(engine, "do_execute")
    def hold_up(cursor: Any, statement: str, parameters: Any, _: Any) -> bool:
        cursor.execute(statement, parameters)
        if "pg_terminate_backend" in statement:
            url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
            with psycopg.connect(url, autocommit=True) as own:
                wait_until(lambda: own.execute(met).fetchone() is not None)
        return True

    stay.delay()

    counts = Worker(queue, mode="transaction", concurrency=3).run_until_empty(timeout=60)

    assert counts == {"retried": 1, "succeeded": 1}
