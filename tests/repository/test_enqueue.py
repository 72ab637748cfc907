"""Enqueue: a job belongs to the transaction that made it, and to nothing else."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, ForeignKey, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    relationship,
)

from pgqueue import DuplicateJob, Job, JobStatus, MessageQueue, PgQueue

queue = PgQueue()
silent = PgQueue(notify=False)


@queue.task(name="tests.greet")
def greet(name: str, times: int = 1) -> None: ...


@queue.task(name="tests.once", unique_key=lambda user_id: f"once:{user_id}")
def once(user_id: int) -> None: ...


@silent.task(name="tests.quiet")
def quiet() -> None: ...


class Base(DeclarativeBase):
    pass


class Order(Base):
    """A table of an application that refers to jobs."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    job_id: Mapped[int | None] = mapped_column(ForeignKey(Job.id))
    job: Mapped[Job | None] = relationship(Job)


@pytest.fixture
def bound(engine: Engine) -> Iterator[PgQueue]:
    queue.bind(engine)
    yield queue
    queue._sessions = None


@pytest.fixture
def orders(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def counts(engine: Engine) -> tuple[int, int]:
    """Committed jobs and messages."""
    with Session(engine) as session:
        return session.query(Job).count(), session.query(MessageQueue).count()


class TestTransactions:
    def test_enqueue_flushes_nothing_else_of_the_session(
        self, session: Session, orders: None
    ) -> None:
        order = Order(id=1)
        session.add(order)

        greet.enqueue(session, "Ada")
        greet.enqueue_many(session, [("Bob",)])
        assert once.enqueue(session, 7) is once.enqueue(session, 7)

        assert order in session.new

    def test_delay_opens_and_commits_a_transaction_of_its_own(
        self, engine: Engine, bound: PgQueue
    ) -> None:
        job = greet.delay("Ada")
        again = [once.delay(7).id, once.delay(7).id]

        assert counts(engine) == (2, 2)
        assert job.status is JobStatus.PENDING
        assert again[0] == again[1]

    def test_enqueue_works_without_notifications(self, engine: Engine, session: Session) -> None:
        quiet.enqueue(session)
        quiet.enqueue_many(session, [(), ()])
        quiet.options(unique_key="k").enqueue(session)
        session.add(quiet.job())
        session.commit()

        assert counts(engine) == (5, 5)


class TestTheJob:
    def test_enqueue_returns_the_job_as_a_select_would_load_it(
        self, engine: Engine, session: Session
    ) -> None:
        job = greet.options(priority=2, queue="mail").enqueue(session, "Ada", times=3)
        given = {column.key: getattr(job, column.key) for column in Job.__mapper__.column_attrs}
        session.commit()

        with Session(engine) as other:
            loaded = other.get_one(Job, job.id)
            for name, value in given.items():
                assert getattr(loaded, name) == value, name
        assert given["args"] == {"name": "Ada", "times": 3}
        assert given["status"] is JobStatus.PENDING

    def test_add_gives_a_job_its_message_at_the_flush(
        self, engine: Engine, session: Session
    ) -> None:
        job = greet.job("Ada")
        session.add(job)
        assert job.id is None

        session.commit()

        assert job.status is JobStatus.PENDING
        with Session(engine) as other:
            assert other.query(MessageQueue).one().target_id == job.id
            assert queue.check(other) == []

    def test_a_job_made_by_hand_is_reported(self, engine: Engine, session: Session) -> None:
        job = Job(task="tests.greet", args={"name": "Ada"})
        session.add(job)
        session.commit()

        [violation] = queue.check(session)

        assert violation.job_id == job.id
        assert "no worker will ever run it" in violation.detail

    def test_a_job_can_stand_in_a_relationship(
        self, engine: Engine, session: Session, orders: None
    ) -> None:
        session.add(Order(id=1, job=greet.job("Ada")))
        session.add(Order(id=2, job=greet.enqueue(session, "Bob")))
        session.commit()

        with Session(engine) as other:
            pending = select(Order.id).join(Order.job).where(Job.status == JobStatus.PENDING)
            assert set(other.scalars(pending)) == {1, 2}
            assert queue.check(other) == []

    def test_a_job_that_an_application_refers_to_cannot_be_deleted_from_under_it(
        self, session: Session, orders: None
    ) -> None:
        session.add(Order(id=1, job=greet.job("Ada")))
        session.commit()
        job = session.query(Order).one().job
        assert job is not None

        session.delete(job)
        with pytest.raises(IntegrityError, match="orders_job_id_fkey"):
            session.flush()

        session.rollback()
        assert queue.check(session) == []


class TestMany:
    @pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
    def test_the_ids_of_many_jobs_come_in_the_order_of_the_rows(
        self, session: Session, count: int
    ) -> None:
        rows: list[Any] = [
            (f"n{n}", n) if n % 2 else {"name": f"n{n}", "times": n} for n in range(count)
        ]

        ids = greet.enqueue_many(session, rows)

        loaded = {job.id: job.args for job in session.scalars(select(Job))}
        assert [loaded[id] for id in ids] == [{"name": f"n{n}", "times": n} for n in range(count)]
        assert queue.check(session) == []

    def test_a_taken_key_gives_the_id_of_its_holder(self, session: Session) -> None:
        holder = once.enqueue(session, 2)

        ids = once.enqueue_many(session, [(1,), (2,), (1,), {"user_id": 3}, (2,)])

        keys = {job.id: job.unique_key for job in session.scalars(select(Job))}
        assert [keys[id] for id in ids] == ["once:1", "once:2", "once:1", "once:3", "once:2"]
        assert ids[1] == ids[4] == holder.id
        assert len(keys) == 3
        assert queue.check(session) == []

    def test_keys_that_are_none_are_not_unique(self, session: Session) -> None:
        maybe = queue.task(name="tests.maybe", unique_key=lambda n: f"k{n}" if n else None)(_maybe)

        ids = maybe.enqueue_many(session, [(0,), (1,), (0,), (1,)])

        loaded = {job.id: job.args["n"] for job in session.scalars(select(Job))}
        assert [loaded[id] for id in ids] == [0, 1, 0, 1]
        assert len(set(ids)) == 3


def _maybe(n: int) -> None: ...


class TestOptions:
    def test_options_change_what_is_enqueued_through_them_and_nothing_else(
        self, session: Session
    ) -> None:
        special = greet.options(priority=0, queue="mail", max_attempts=1, unique_key="k")

        job, plain = special.enqueue(session, "Ada"), greet.enqueue(session, "Bob")

        assert (job.priority, job.queue, job.max_attempts, job.unique_key) == (0, "mail", 1, "k")
        assert (plain.priority, plain.queue, plain.max_attempts) == (5, "default", 10)
        alone = dict(session.execute(select(MessageQueue.target_id, MessageQueue.alone)).all())
        assert alone == {job.id: True, plain.id: False}

    @pytest.mark.parametrize("how", ["enqueue", "many", "add"])
    def test_a_delay_counts_from_now_and_a_past_time_is_now(
        self, session: Session, how: str
    ) -> None:
        later = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
        tasks = [
            greet.options(delay=timedelta(hours=1)),
            greet.options(run_at=later),
            greet.options(run_at=later - timedelta(days=300)),
        ]
        for task in tasks:
            match how:
                case "enqueue":
                    task.enqueue(session, "Ada")
                case "many":
                    task.enqueue_many(session, [("Ada",)])
                case _:
                    session.add(task.job("Ada"))
                    session.flush()

        now = session.scalar(select(func.clock_timestamp()))
        times = session.scalars(select(Job.run_at).order_by(Job.id)).all()
        assert now is not None
        assert timedelta(minutes=59) < times[0] - now <= timedelta(hours=1)
        assert times[1] == later
        assert timedelta(0) <= now - times[2] < timedelta(minutes=1)
        assert queue.check(session) == []


class TestDuplicates:
    def test_duplicates_raise_at_a_flush(self, engine: Engine, session: Session) -> None:
        once.enqueue(session, 7)
        session.commit()
        session.add(once.job(7))

        with pytest.raises(DuplicateJob, match="once:7"):
            session.flush()

        session.rollback()
        assert counts(engine) == (1, 1)

    def test_the_key_of_an_ended_job_is_free(self, session: Session) -> None:
        first = once.enqueue(session, 7)
        queue.cancel(session, first.id)

        second = once.enqueue(session, 7)

        assert first.id != second.id
        assert queue.check(session) == []

    def test_a_key_belongs_to_its_queue(self, session: Session) -> None:
        here = once.enqueue(session, 7)
        there = once.options(queue="mail").enqueue(session, 7)

        assert here.id != there.id

    def test_the_job_that_has_the_key_comes_with_what_the_session_has_changed(
        self, session: Session
    ) -> None:
        first = once.enqueue(session, 7)
        session.commit()
        first.meta = {"seen": True}

        assert once.enqueue(session, 7) is first

        assert first.meta == {"seen": True}


def test_a_message_follows_the_job_and_not_the_caller(session: Session) -> None:
    job = greet.job("Ada")
    job.queue, job.priority = "mail", 1
    session.add(job)
    session.flush()

    row = session.execute(text("SELECT queue, priority FROM pgqueue.message_queue")).one()

    assert tuple(row) == ("mail", 1)
