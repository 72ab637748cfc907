"""Logging is code of the application: whatever it raises, jobs are run and recorded."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select
from worker_rig import endings

from pgqueue import Job, PgQueue, Retry, Worker, redaction


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="fail", retry=Retry.never())
    def fail(number: int) -> None:
        raise ValueError(number)

    for number in range(6):
        fail.delay(number)
    return queue


def all_fail(queue: PgQueue, log_jobs: Any = "info") -> None:
    assert endings(Worker(queue, concurrency=2, log_jobs=log_jobs)) == {"failed": 6}
    with queue.session() as session:
        assert queue.check(session) == []
        assert set(session.scalars(select(Job.last_error))) == set("012345")


@pytest.fixture
def collected() -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment,method-assign]
    logging.getLogger("pgqueue").addHandler(handler)
    yield found
    logging.getLogger("pgqueue").removeHandler(handler)


@pytest.fixture
def factory() -> Iterator[None]:
    """A record factory that sets what its formats name, as applications do."""
    before = logging.getLogRecordFactory()

    def with_fields(*args: Any, **options: Any) -> logging.LogRecord:
        record = before(*args, **options)
        record.__dict__.update(job_id="-", task="-", queue="-", attempt="-", meta="-", ran="-")
        return record

    logging.setLogRecordFactory(with_fields)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("factory")
def test_a_factory_that_sets_the_same_attributes_costs_no_line(
    queue: PgQueue, collected: list[logging.LogRecord]
) -> None:
    all_fail(queue)

    failed = [record for record in collected if "the job has failed" in record.getMessage()]
    assert len(failed) == 6
    assert all(isinstance(vars(record)["job_id"], int) for record in failed)


class Raising(logging.Handler):
    """Has no try around what it does, as many have not."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError("the collector is away"), SystemExit("bye"), GeneratorExit(), MemoryError()]
)
def test_a_handler_that_raises_costs_its_lines_and_no_job(
    queue: PgQueue,
    error: BaseException,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction, "LOST_EVERY", 0)
    handler = Raising(error)
    logging.getLogger("pgqueue").addHandler(handler)
    try:
        all_fail(queue)
    finally:
        logging.getLogger("pgqueue").removeHandler(handler)

    assert "pgqueue: a line could not be logged" in capfd.readouterr().err
