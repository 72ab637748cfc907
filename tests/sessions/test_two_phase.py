"""Commits in two phases, asked for on Citus only.  The commits themselves are in tests/citus."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from some_nodes import put_two_phase_table
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from pgqueue import Job, PgQueue, Worker
from pgqueue.repository.nodes import TABLE, TABLE_EXISTS, WRITE_NO_ROW

ASKS, PREPARES = str(TABLE_EXISTS), str(WRITE_NO_ROW)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="note")(note)
    queue.task(name="write")(write)
    return queue


def note(number: int) -> None: ...


def write(session: Session) -> None:
    session.execute(text("SELECT 1"))


@pytest.fixture
def sent(engine: Engine) -> Iterator[list[str]]:
    """The statements about two phases, as they were sent."""
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if TABLE in statement:
            statements.append(statement)

    yield statements
    event.remove(engine, "before_cursor_execute", _note)


@pytest.fixture
def table(engine: Engine) -> None:
    """The table of Citus as a plain one, which serves to count."""
    put_two_phase_table(engine)


def test_without_citus_the_engine_is_asked_once_and_nothing_else_is_sent(
    queue: PgQueue, sent: list[str]
) -> None:
    for _ in range(3):
        with queue.session() as session, session.begin():
            queue.tasks["note"].enqueue(session, 1)
            session.add(queue.tasks["note"].job(2))
    queue.tasks["write"].delay()
    Worker(queue).run_until_empty(timeout=60)
    assert sent == [ASKS]


@pytest.mark.usefixtures("table")
def test_each_transaction_that_writes_jobs_asks_for_two_phases_once(
    queue: PgQueue, sent: list[str]
) -> None:
    task = queue.tasks["note"]
    for _ in range(2):
        with queue.session() as session, session.begin():
            with session.begin_nested() as savepoint:
                job_id = task.enqueue(session, 1).id
                savepoint.rollback()
            task.enqueue_many(session, [(2,), (3,)])
            job_id = task.enqueue(session, 4).id
            with queue.claim(session):
                pass
            queue.cancel(session, job_id)
    assert sent == [ASKS, PREPARES, PREPARES]


@pytest.mark.usefixtures("table")
def test_a_job_that_is_added_to_a_session_commits_in_two_phases(
    queue: PgQueue, sent: list[str]
) -> None:
    with queue.session() as session, session.begin():
        session.add(queue.tasks["note"].job(1))
    assert sent == [ASKS, PREPARES]


@pytest.mark.usefixtures("table")
def test_a_job_that_is_deleted_by_a_session_commits_in_two_phases(
    queue: PgQueue, sent: list[str]
) -> None:
    job_id = queue.tasks["note"].delay(1).id
    with queue.session() as session, session.begin():
        session.delete(session.get_one(Job, job_id))
    assert sent == [ASKS, PREPARES]


@pytest.mark.usefixtures("table")
def test_a_schedule_that_is_triggered_commits_in_two_phases(
    queue: PgQueue, sent: list[str]
) -> None:
    with queue.session() as session, session.begin():
        queue.schedules.add(
            session, queue.tasks["note"], name="note", every=timedelta(days=1), args=(1,)
        )
    with queue.session() as session, session.begin():
        queue.schedules.trigger(session, "note")
    assert sent == [ASKS, PREPARES, PREPARES]


@pytest.mark.usefixtures("table")
def test_a_delay_in_the_transaction_of_a_connection_makes_it_commit_in_two_phases(
    queue: PgQueue, engine: Engine, sent: list[str]
) -> None:
    with engine.begin() as connection, queue.bound_to(connection):
        queue.tasks["note"].delay(1)
    assert sent == [ASKS, PREPARES]


@pytest.mark.usefixtures("table")
def test_a_transaction_that_the_application_prepares_is_left_to_it(
    queue: PgQueue, engine: Engine, sent: list[str]
) -> None:
    with Session(engine, twophase=True) as session, session.begin():
        queue.tasks["note"].enqueue(session, 1)
    assert sent == [ASKS]


@pytest.mark.usefixtures("table")
def test_the_transaction_of_a_handler_commits_in_two_phases(
    queue: PgQueue, sent: list[str]
) -> None:
    queue.tasks["note"].delay(1)  # has no transaction
    queue.tasks["write"].delay()
    Worker(queue).run_until_empty(timeout=60)
    assert sent == [ASKS, PREPARES]


@pytest.mark.usefixtures("table")
def test_what_only_reads_needs_no_two_phases(queue: PgQueue, sent: list[str]) -> None:
    with queue.session() as session:
        queue.counts(session)
    assert sent == []
