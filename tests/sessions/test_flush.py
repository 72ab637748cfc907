"""Whichever way a Job of ``task.job()`` comes to a flush, it gets its message there."""

import copy
import pickle
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, event, func, select
from sqlalchemy.exc import DBAPIError, SAWarning
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    make_transient,
    mapped_column,
    relationship,
)

from pgqueue import DuplicateJob, Job, JobStatus, Limit, MessageQueue, PgQueue

queue = PgQueue()


@queue.task(name="tests.print_report")
def print_report(number: int) -> None: ...


@queue.task(name="tests.print_once", unique_key=lambda number: f"print:{number}")
def print_once(number: int) -> None: ...


class Base(DeclarativeBase):
    pass


class Report(Base):
    __tablename__ = "reports"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str | None]
    job_id: Mapped[int | None] = mapped_column(ForeignKey(Job.id))
    job: Mapped[Job | None] = relationship(Job)


@pytest.fixture
def reports(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def assert_one_job_waits(engine: Engine) -> None:
    """What workers see: one job, its message, and nothing that breaks a rule."""
    with Session(engine) as session:
        [job] = session.scalars(select(Job))
        assert job.status is JobStatus.PENDING
        assert session.scalars(select(MessageQueue.target_id)).all() == [job.id]
        assert job.held_unique_key == job.unique_key
        assert queue.check(session) == []


def add_merged(session: Session, job: Job) -> None:
    session.merge(job)


def add_merged_twice(session: Session, job: Job) -> None:
    with Session() as other:
        session.merge(other.merge(job))


def add_pickled(session: Session, job: Job) -> None:
    session.add(pickle.loads(pickle.dumps(job)))


def add_merged_after_pickling(session: Session, job: Job) -> None:
    session.merge(pickle.loads(pickle.dumps(job)))


def add_copied(session: Session, job: Job) -> None:
    session.add(copy.deepcopy(job))


def add_after_another_session(session: Session, job: Job) -> None:
    with Session() as other:
        other.add(job)
        other.expunge(job)
    session.add(job)


def add_again_after_a_rollback(session: Session, job: Job) -> None:
    session.add(job)
    session.flush()
    session.rollback()
    session.add(job)


def add_with_a_report(session: Session, job: Job) -> None:
    session.add(Report(id=1, job=job))


def merge_with_a_report(session: Session, job: Job) -> None:
    session.merge(Report(id=1, job=job))


def merge_into_a_stored_report(session: Session, job: Job) -> None:
    session.add(Report(id=1))
    session.commit()
    session.merge(Report(id=1, job=job))


def add_before_a_flush(session: Session, job: Job) -> None:
    def add(session: Session, *_: Any) -> None:
        session.add(job)

    event.listen(session, "before_flush", add, once=True)
    session.add(Report(id=1))


def add_within_a_flush(session: Session, job: Job) -> None:
    def add(*_: Any) -> None:
        with pytest.warns(SAWarning, match="Session.add"):  # SQLAlchemy's advice to its caller
            session.add(job)

    event.listen(Report, "after_insert", add, once=True)
    session.add(Report(id=1))


WAYS = [
    add_merged,
    add_merged_twice,
    add_pickled,
    add_merged_after_pickling,
    add_copied,
    add_after_another_session,
    add_again_after_a_rollback,
    add_with_a_report,
    merge_with_a_report,
    merge_into_a_stored_report,
    add_before_a_flush,
    add_within_a_flush,
]


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("made", [print_report, print_once], ids=["plain", "unique"])
@pytest.mark.parametrize("come", WAYS, ids=lambda come: come.__name__)
def test_it_gets_its_message_however_it_comes(
    engine: Engine, session: Session, come: Callable[[Session, Job], None], made: Any
) -> None:
    come(session, made.job(7))
    session.commit()

    assert_one_job_waits(engine)


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("moment", ["before_insert", "after_insert", "after_update"])
def test_enqueue_within_a_flush_writes_at_once_and_without_a_warning(
    engine: Engine, session: Session, moment: str
) -> None:
    report = Report(id=1)
    found: list[Job] = []
    if moment == "after_update":
        session.add(report)
        session.commit()
        report.title = "Changed"

    def enqueue(_mapper: Any, _connection: Connection, row: Report) -> None:
        found.append(print_report.enqueue(session, row.id))
        found.append(print_once.enqueue(session, row.id))
        found.append(print_once.enqueue(session, row.id))

    event.listen(Report, moment, enqueue, once=True)
    session.add(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.commit()

    assert found[1] is found[2]
    assert all(job in session for job in found)
    assert [job.args for job in found] == [{"number": 1}] * 3
    with Session(engine) as other:
        waiting = other.scalars(select(MessageQueue.target_id).order_by(MessageQueue.id)).all()
        assert waiting == [found[0].id, found[1].id]
        assert queue.check(other) == []


@pytest.mark.usefixtures("reports")
def test_a_flush_that_fails_takes_back_what_was_enqueued_within_it(
    engine: Engine, session: Session
) -> None:
    def enqueue(_mapper: Any, _connection: Connection, row: Report) -> None:
        print_report.enqueue(session, row.id)
        raise LookupError

    event.listen(Report, "after_insert", enqueue, once=True)
    session.add(Report(id=1))
    with pytest.raises(LookupError):
        session.flush()
    session.rollback()

    with Session(engine) as other:
        assert other.scalars(select(Job)).all() == []


@pytest.mark.parametrize("load", ["select", "enqueue"])
def test_one_that_was_stored_is_a_new_job_after_make_transient(
    engine: Engine, session: Session, load: str
) -> None:
    job = print_report.enqueue(session, 7)
    if load == "select":
        session.commit()
        session.refresh(job)
    session.expunge(job)
    make_transient(job)
    job.id = None  # type: ignore[assignment]  # as SQLAlchemy's manual copies a row
    session.add(job)
    session.commit()

    with Session(engine) as other:
        assert other.scalar(select(func.count()).select_from(MessageQueue)) == 2
        assert queue.check(other) == []


@pytest.mark.usefixtures("reports")
def test_one_that_has_ended_is_stored_without_a_message(engine: Engine, session: Session) -> None:
    ended = session.scalar(select(func.clock_timestamp()))
    job = print_report.job(7)
    job.outcome, job.finished_at, job.attempts = "succeeded", ended, 1
    session.merge(job)
    session.commit()

    with Session(engine) as other:
        assert other.scalars(select(MessageQueue)).all() == []
        assert queue.check(other) == []


def test_one_made_by_hand_stays_without_a_message_when_it_is_pickled(session: Session) -> None:
    job = pickle.loads(pickle.dumps(Job(task="tests.print_report", args={"number": 7})))
    session.add(job)
    session.commit()

    [violation] = queue.check(session)
    assert violation.job_id == job.id


limited = PgQueue(queue_limits={"mail": Limit(1)})


@limited.task(queue="mail")
def send_mail(number: int) -> None: ...


def some_jobs(count: int) -> list[Job]:
    """Jobs of three tasks, with options of all kinds."""
    hour = timedelta(hours=1)
    kinds: list[Callable[[int], Job]] = [
        print_report.job,
        print_once.job,
        send_mail.job,
        lambda n: print_report.options(delay=hour, meta={"n": n}, tags=["late"]).job(n),
        lambda n: print_report.options(run_at=datetime.now(UTC) + hour, priority=n % 10).job(n),
    ]
    return [kinds[number % len(kinds)](number) for number in range(count)]


def test_the_jobs_of_a_flush_are_written_together(engine: Engine, session: Session) -> None:
    """One statement for the jobs, one for their messages, and one for the time."""
    print_report.enqueue(session, 0)  # the first enqueue of an engine asks for Citus
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))

    session.add_all(some_jobs(200))
    session.flush()

    assert len(sent) == 3
    session.commit()
    late = select(Job).where(Job.run_at > func.clock_timestamp() + timedelta(minutes=50))
    with Session(engine) as other:
        assert other.scalar(select(func.count()).select_from(MessageQueue)) == 161
        assert other.scalar(select(func.count()).select_from(late.subquery())) == 80
        assert other.scalar(select(func.count()).where(Job.meta.is_not(None))) == 40
        assert queue.check(other) == []


def test_the_jobs_of_a_flush_start_in_its_order(engine: Engine, session: Session) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    session.add_all([made.options(run_at=at).job(n) for n in range(9) for made in TASKS])
    session.commit()

    waiting = select(MessageQueue.target_id).order_by(MessageQueue.id)
    assert session.scalars(waiting).all() == session.scalars(select(Job.id).order_by(Job.id)).all()


TASKS = (print_once, print_report)


def test_a_taken_key_among_many_names_its_job(session: Session) -> None:
    print_once.enqueue(session, 7)
    jobs = [print_once.job(number) for number in range(10)]
    session.add_all(jobs)

    with pytest.raises(
        DuplicateJob, match=r"<Job \d+ tests.print_once>: .* key 'print:7'"
    ) as error:
        session.flush()

    assert f"<Job {jobs[7].id} " in str(error.value)


def test_a_flush_after_one_that_has_failed_writes_its_own_jobs(
    engine: Engine, session: Session
) -> None:
    session.add_all([print_report.job(1), Job(task="t", queue="q", args={}, priority=99)])
    with pytest.raises(DBAPIError):
        session.flush()
    session.rollback()

    session.add(print_once.job(7))
    session.commit()

    assert_one_job_waits(engine)
