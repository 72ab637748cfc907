"""One attempt in a savepoint of a test ends as it would in a transaction of a worker."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session

from pgqueue import Cancel, Discard, JobContext, JobStatus, PgQueue
from pgqueue.testing import run_jobs


@pytest.fixture(params=["psycopg", "psycopg2"])
def engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{request.param}"))
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE TABLE notes (word text)"))
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


@pytest.fixture
def queue(session: Session) -> PgQueue:
    return PgQueue(session.connection())


def note(session: Session, word: str) -> None:
    session.execute(text("INSERT INTO notes VALUES (:word)"), {"word": word})


def notes(session: Session) -> list[str]:
    return list(session.scalars(text("SELECT word FROM notes ORDER BY word")))


def test_a_handlers_commits_and_rollbacks_are_its_own(queue: PgQueue, session: Session) -> None:
    told: list[str] = []

    @queue.task
    def work(session: Session) -> None:
        event.listen(session, "after_commit", lambda _: told.append("committed"))
        note(session, "kept")
        session.commit()
        note(session, "rolled back")
        session.rollback()
        note(session, "last")
        told.append("worked")

    note(session, "before")
    work.enqueue(session)

    run_jobs(session, queue=queue)

    assert notes(session) == ["before", "kept", "last"]
    assert told == ["worked", "committed"]


def test_a_failure_undoes_what_the_handler_has_committed(queue: PgQueue, session: Session) -> None:
    @queue.task
    def raise_discard(session: Session) -> None:
        note(session, "undone")
        session.commit()
        raise Discard("no use")

    @queue.task
    def return_cancel(session: Session) -> Cancel:
        note(session, "kept")
        return Cancel("done before")

    @queue.task
    def be_cancelled(session: Session, ctx: JobContext) -> None:
        note(session, "undone")
        queue.cancel(session, ctx.job_id)

    for task in (raise_discard, return_cancel, be_cancelled):
        task.enqueue(session)

    ran = run_jobs(session, queue=queue)

    assert [job.status for job in ran] == [
        JobStatus.FAILED,
        JobStatus.CANCELLED,
        JobStatus.CANCELLED,
    ]
    assert notes(session) == ["kept"]


def test_what_a_plain_handler_commits_stays_although_it_fails(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def work() -> None:
        with queue.session() as own:
            note(own, "committed")
            own.commit()
            note(own, "left open")
            raise LookupError("and failed")

    job = work.enqueue(session)

    with pytest.raises(LookupError, match="and failed"):
        run_jobs(session, queue=queue)

    assert notes(session) == ["committed"]
    assert (job.status, job.attempts) == (JobStatus.PENDING, 1)
