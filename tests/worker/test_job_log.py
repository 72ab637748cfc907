"""What a worker logs of its jobs: each failure with its error, and on request each attempt."""

import logging
from datetime import timedelta
from threading import Event
from typing import Literal

import pytest
from sqlalchemy import Engine, text
from worker_rig import PATIENCE

from pgqueue import AttemptEnded, Discard, JobContext, PgQueue, Retry, Secret, Worker
from pgqueue.events import AttemptOutcome
from pgqueue.worker.job_log import LogJobs, job_log

AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine, caplog: pytest.LogCaptureFixture) -> PgQueue:
    caplog.set_level(logging.DEBUG, "pgqueue")
    return PgQueue(engine)


def run(queue: PgQueue, log_jobs: Literal["info", "debug"] | None = None) -> None:
    Worker(queue, concurrency=3, log_jobs=log_jobs).run_until_empty(timeout=PATIENCE)


def of_level(caplog: pytest.LogCaptureFixture, level: int) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == level]


def test_the_traceback_of_an_error_of_several_lines_is_printed_whole(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    @queue.task(name="mail.send", retry=Retry.never())
    def send() -> None:
        raise ValueError("no such address\nsecond line")

    send.delay()

    run(queue)

    [record] = of_level(caplog, logging.ERROR)
    assert logging.Formatter().format(record).endswith("ValueError: no such address\nsecond line")


def test_the_line_of_a_failed_attempt_says_when_it_is_retried(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    @queue.task(retry=Retry.constant(timedelta(minutes=1.5)))
    def send() -> None:
        raise ValueError("no such address")

    send.delay()

    run(queue)

    [record] = of_level(caplog, logging.WARNING)
    assert record.getMessage().endswith("; it is retried after 90.0 s")


def test_a_failed_attempt_is_logged_with_its_exception_and_its_template(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    @queue.task(name="mail.send", max_attempts=2, retry=AT_ONCE)
    def send(address: str) -> None:
        raise ValueError(f"no such address: {address}")

    job_id = send.delay("a@example.org").id

    run(queue)

    [first], [last] = of_level(caplog, logging.WARNING), of_level(caplog, logging.ERROR)
    assert first.getMessage() == (
        f"job {job_id} mail.send: attempt 1 of 2: "
        "ValueError: no such address: a@example.org; it is retried"
    )
    assert last.getMessage().endswith("the job has failed")
    for record in (first, last):
        assert record.msg == "job %d %s: attempt %d of %d: %s: %s; %s"
        assert vars(record)["job_id"] == job_id
        assert vars(record)["task"] == "mail.send"
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ValueError)
        printed = logging.Formatter().format(record)
        assert printed.count("Traceback (most recent call last)") == 1
        assert "pgqueue/worker" not in printed
        assert printed.count("no such address: a@example.org") == 1


def test_an_exception_that_may_quote_a_secret_is_logged_as_masked_text_only(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    @queue.task(retry=Retry.never())
    def pay(card: Secret[str]) -> None:
        raise ValueError(f"card {card} is refused")

    pay.delay("4000-1111")

    run(queue)

    [record] = of_level(caplog, logging.ERROR)
    assert record.exc_info is None
    printed = logging.Formatter().format(record)
    assert "ValueError: card *** is refused" in printed
    assert "Traceback (most recent call last)" in printed
    assert "4000-1111" not in printed


def test_each_way_to_fail_for_good_leaves_one_line_of_level_error(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Event()

    @queue.task(name="raises", max_attempts=1)
    def raises() -> None:
        raise ValueError("in the handler")

    @queue.task(name="discards")
    def discards() -> Discard:
        return Discard("no use")

    @queue.task(name="oversleeps", max_attempts=1, timeout=timedelta(seconds=0.3))
    def oversleeps(ctx: JobContext) -> None:
        while not ctx.is_cancelled():
            stop.wait(0.01)

    @queue.task(name="crashed", max_attempts=1)
    def crashed() -> None: ...

    jobs = {task.delay().id: task.name for task in (raises, discards, oversleeps, crashed)}
    with queue.engine.begin() as connection:
        # As a worker leaves it whose process was killed more often than the job may be tried.
        connection.execute(
            text("UPDATE pgqueue.message_queue SET attempt = 1, crashes = 1 WHERE task = 'crashed'")
        )

    run(queue)

    lines = [record.getMessage() for record in of_level(caplog, logging.ERROR)]
    assert sorted(line.split()[2].rstrip(":") for line in lines) == sorted(jobs.values())
    reasons = {
        "raises": "in the handler",
        "discards": "discarded: no use",
        "oversleeps": "ran longer than",
        "crashed": "died",
    }
    for job_id, name in jobs.items():
        [line] = [line for line in lines if line.startswith(f"job {job_id} {name}")]
        assert reasons[name] in line


def test_each_line_about_an_attempt_has_its_meta_with_passwords_masked(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    def report(how: str) -> object:
        match how:
            case "raises":
                raise ValueError("in the handler")
            case "discards":
                return Discard("no use")
        return object()  # not kept, which is logged

    task = queue.task(name="report", max_attempts=1)(report)
    meta = {"tenant": "acme", "source": "ftp://me:hidden@example.org"}
    for how in ("raises", "discards", "returns"):
        task.options(meta=meta).delay(how)

    run(queue, log_jobs="info")

    lines = [record for record in caplog.records if record.getMessage().startswith("job ")]
    assert len(lines) == 6
    shown = {"tenant": "acme", "source": "ftp://me:***@example.org"}
    assert [vars(line)["meta"] for line in lines] == [shown] * 6
    assert {(vars(line)["task"], vars(line)["attempt"]) for line in lines} == {("report", 1)}


def test_each_attempt_is_logged_on_request(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = queue.task(name="any")(lambda: None).delay().id

    run(queue, log_jobs="debug")

    [record] = [record for record in caplog.records if record.name == "pgqueue.worker.job_log"]
    assert record.levelno == logging.DEBUG
    assert record.getMessage().startswith(f"job {job_id} any succeeded: attempt 1 of 10, waited")
    fields = vars(record)
    assert (fields["job_id"], fields["task"], fields["queue"]) == (job_id, "any", "default")
    assert (fields["attempt"], fields["outcome"]) == (1, "succeeded")
    assert fields["waited"] >= 0
    assert fields["ran"] >= 0


@pytest.mark.parametrize(
    ("waited", "ran", "shown"),
    [
        (timedelta(microseconds=92), timedelta(seconds=2), "waited 0.000 s, ran 2.000 s"),
        (timedelta(days=2), timedelta(milliseconds=107), "waited 172800.000 s, ran 0.107 s"),
        (None, None, "waited ? s, ran ? s"),
    ],
)
def test_durations_are_logged_with_three_decimals(
    caplog: pytest.LogCaptureFixture, waited: timedelta | None, ran: timedelta | None, shown: str
) -> None:
    caplog.set_level(logging.INFO)

    job_log(LogJobs.INFO)(
        AttemptEnded(
            job_id=7, task="any", queue="default", attempt=1, max_attempts=10,
            outcome=AttemptOutcome.SUCCEEDED, is_final=True, waited=waited, ran=ran,
        )
    )  # fmt: skip

    assert caplog.messages == [f"job 7 any succeeded: attempt 1 of 10, {shown}"]
