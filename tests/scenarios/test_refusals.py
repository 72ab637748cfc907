"""What a worker refuses before it touches a job: other tables, and another process."""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgqueue import Job, JobStatus, PgQueue, PgQueueError, SchemaError, Worker
from pgqueue.errors import OptionError, SchemaMissing, SchemaTooNew, SchemaTooOld, UsedAcrossFork


def test_a_worker_refuses_a_database_without_tables(empty_database_url: str) -> None:
    queue = PgQueue(create_engine(empty_database_url))

    with pytest.raises(SchemaMissing, match="upgrade"):
        Worker(queue).run()
    with pytest.raises(SchemaError):
        Worker(queue).run_until_empty(timeout=60)


def test_a_worker_refuses_tables_older_than_its_code(engine: Engine) -> None:
    queue = PgQueue(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.schema_version SET version = 0, oldest_code = 0"))

    with pytest.raises(SchemaTooOld, match="upgrade"):
        Worker(queue).run_until_empty(timeout=60)


def test_a_worker_refuses_tables_that_its_code_is_too_old_for(engine: Engine) -> None:
    queue = PgQueue(engine)
    with engine.begin() as connection:
        newer = "UPDATE pgqueue.schema_version SET version = 99, oldest_code = 98"
        connection.execute(text(newer))

    with pytest.raises(SchemaTooNew):
        Worker(queue).run_until_empty(timeout=60)


def test_a_worker_serves_newer_tables_that_still_serve_it(engine: Engine) -> None:
    queue = PgQueue(engine)
    with engine.begin() as connection:
        newer = "UPDATE pgqueue.schema_version SET version = version + 1"
        connection.execute(text(newer))

    assert Worker(queue).run_until_empty(timeout=60) == {}


def test_a_worker_is_refused_in_another_process_than_its_own(engine: Engine) -> None:
    worker = Worker(PgQueue(engine))

    said = _in_a_child(lambda: _refusal(worker))

    assert "make it after the fork" in said


@pytest.mark.parametrize("class_name", ["Job", "lambda"])
def test_a_worker_starts_no_job_beside_a_relationship_that_cannot_be_configured(
    engine: Engine, class_name: str
) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick() -> None: ...

    quick.delay()

    def run() -> str:
        class Base(DeclarativeBase): ...

        class Receipt(Base):
            __tablename__ = "receipts"
            id: Mapped[int] = mapped_column(primary_key=True)
            job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))
            job = relationship("Job" if class_name == "Job" else lambda: unknown)  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(PgQueueError) as refused:
            Worker(queue).run_until_empty(timeout=60)
        return str(refused.value)

    said = _in_a_child(run)

    assert "cannot be configured" in said
    assert ("relationship(Job)" in said) is (class_name == "Job")
    with queue.session() as session:
        assert session.query(Job).one().attempts == 0
        assert session.query(Job).one().status is JobStatus.PENDING


def test_a_worker_made_after_the_fork_runs_on_connections_of_its_own(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick() -> None: ...

    with queue.session() as session:
        parents = {_backend(session) for _ in range(3)}
        session.commit()
    quick.delay()

    said = _in_a_child(lambda: str(Worker(queue, concurrency=2).run_until_empty(timeout=60)))

    assert said == "{'succeeded': 1}"
    with queue.session() as session:  # the parent's connection is as it was
        assert {_backend(session)} == parents
        assert queue.check(session) == []


def test_a_forked_child_enqueues_on_connections_of_its_own(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick(n: int) -> None: ...

    with queue.session() as session:
        quick.enqueue(session, 1)
        parent = _backend(session)
        session.commit()

    def enqueue() -> str:
        quick.delay(2)
        with queue.session() as session:
            quick.enqueue(session, 3)
            child = _backend(session)
            session.commit()
        return str(child)

    children = {int(_in_a_child(enqueue)) for _ in range(3)}

    with queue.session() as session:
        assert parent not in children
        assert _backend(session) == parent
        assert session.query(Job).count() == 1 + 3 * 2
        assert queue.check(session) == []


@pytest.mark.parametrize("instead", ["postgresql://localhost/shop", None])
def test_a_worker_is_given_a_queue(instead: Any) -> None:
    with pytest.raises(OptionError, match="give the PgQueue whose tasks it is to run"):
        Worker(instead)


def _refusal(worker: Worker) -> str:
    with pytest.raises(UsedAcrossFork) as refused:
        worker.run_until_empty(timeout=60)
    return str(refused.value)


def _backend(session: Session) -> int:
    return int(session.execute(text("SELECT pg_backend_pid()")).scalar_one())


def _in_a_child(say: Callable[[], str]) -> str:
    """What a forked child says; it leaves without running the parent's clean-up."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        words = "nothing"
        try:
            words = say()
        except BaseException as error:
            words = repr(error)
        finally:
            os.write(there, words.encode())
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        words = pipe.read()
    os.waitpid(child, 0)
    return words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queues": {"mail": 0}}, "the weight of queue mail is 0; give a whole number from 1 to"),
        ({"queues": {"mail": 1001}}, "the weight of queue mail is 1001"),
        ({"queues": {"mail": 1.5}}, "the weight of queue mail is 1.5"),
        ({"queues": {"mail": True}}, "the weight of queue mail is True"),
        ({"queues": {"a b": 3}}, "a queue name has 1 to 64"),
        ({"queues": {}}, "or a weight for each queue"),
        ({"queues": [("mail", 3)]}, "a queue name has 1 to 64"),
        ({"queues": ["*", "-mail"]}, "queue -mail: a worker cannot leave a queue out"),
        (
            {"poll_interval": timedelta(0)},
            "give a timedelta of 0.01 s to 365 days",
        ),
        ({"max_jobs_per_child": 0}, "max_jobs_per_child is 0; give a whole number from 1"),
        ({"max_jobs": 0}, "max_jobs is 0; give a whole number from 1"),
        ({"max_idle": 60}, "max_idle is 60; give a timedelta of 0.01 s to 365 days, or None"),
        ({"ahead": 1001}, "ahead is 1001; give a whole number from 0 to 1000"),
        (
            {"age_after": 600},
            "age_after is 600; give a timedelta of 1 s to 365 days, or None",
        ),
        ({"age_after": timedelta(milliseconds=999)}, "give a timedelta of 1 s to 365"),
        ({"age_after": timedelta(days=366)}, "give a timedelta of 1 s to 365"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        Worker(PgQueue(), **options)
