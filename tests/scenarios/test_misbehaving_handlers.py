"""Handlers that treat their session badly: their own job pays, and no other."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgqueue import Job, PgQueue, Retry, Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (word text)"))
        connection.execute(text("CREATE TABLE parents (id int PRIMARY KEY)"))
        constraint = "REFERENCES parents DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(f"CREATE TABLE children (parent int {constraint})"))
    return PgQueue(engine)


def test_what_the_application_sets_for_its_connections_stays_set(
    database_url: str, queue: PgQueue
) -> None:
    paths: list[str] = []

    @event.listens_for(queue.engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.execute("SET search_path = pg_temp, public")
        connection.commit()

    @queue.task
    def look(session: Session) -> None:
        paths.append(session.execute(text("SHOW search_path")).scalar_one())

    queue.engine.dispose()
    with queue.session() as session:
        look.enqueue_many(session, [()] * 3)
        session.commit()

    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert paths == ["pg_temp, public"] * 3


def _commits(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('a')"))
    session.commit()
    session.execute(text("INSERT INTO written VALUES ('b')"))


def _rolls_back(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.rollback()
    session.execute(text("INSERT INTO written VALUES ('b')"))


def _closes(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.close()


def _survives_an_error(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('a')"))
    try:
        with session.begin_nested():
            session.execute(text("SELECT 1/0"))
    except SQLAlchemyError:
        session.execute(text("INSERT INTO written VALUES ('b')"))


def _commits_then_raises(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.commit()
    raise ValueError("after its commit")


def _fails_in_sql(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.execute(text("SELECT 1/0"))


def _hides_an_error(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    try:
        session.execute(text("SELECT 1/0"))
    except SQLAlchemyError:
        return


def _breaks_a_deferred_constraint(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.execute(text("INSERT INTO children VALUES (1)"))


def _breaks_a_deferred_trigger(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.execute(
        text(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'refused by a trigger'; END $$;"
            " CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON written DEFERRABLE"
            " INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();"
            " INSERT INTO written VALUES ('lost')"
        )
    )


def _leaves_a_bad_flush(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.add(Job(task="x", queue="q" * 1000, priority=99))


def _ends_the_transaction(session: Session) -> None:
    session.connection().get_transaction().rollback()  # type: ignore[union-attr]


def _closes_the_connection(session: Session) -> None:
    session.connection().close()


def _invalidates_the_connection(session: Session) -> None:
    session.connection().invalidate()


def _ends_its_own_backend(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def _commits_by_hand(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('published')"))
    session.execute(text("COMMIT"))


def _commits_by_hand_and_goes_on(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('published')"))
    session.execute(text("COMMIT"))
    session.execute(text("INSERT INTO written VALUES ('lost')"))


def _ends_the_savepoint_and_goes_on(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.connection().get_nested_transaction().rollback()  # type: ignore[union-attr]
    session.execute(text("INSERT INTO written VALUES ('lost too')"))


def _replaces_the_savepoint_and_raises(session: Session) -> None:
    connection = session.connection()
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    (connection.get_nested_transaction() or connection.begin_nested()).rollback()
    session.execute(text("INSERT INTO written VALUES ('lost too')"))
    connection.begin_nested()
    session.execute(text("INSERT INTO written VALUES ('lost as well')"))
    raise ValueError("in a savepoint of its own")


def _closes_the_driver(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.connection().connection.dbapi_connection.driver_connection.pgconn.finish()  # type: ignore[union-attr]


def _goes_on_without_its_backend(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    with suppress(SQLAlchemyError):
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    session.rollback()
    session.execute(text("INSERT INTO written VALUES ('by nobody')"))
    session.commit()


def _commits_what_it_rolled_back_to(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('a')"))
    session.commit()
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.rollback()
    session.execute(text("INSERT INTO written VALUES ('b')"))
    session.commit()


def _rolls_back_then_raises(session: Session) -> None:
    session.execute(text("INSERT INTO written VALUES ('lost')"))
    session.rollback()
    session.execute(text("INSERT INTO written VALUES ('lost too')"))
    session.commit()
    raise ValueError("after its rollback")


MANNERS: dict[Callable[[Session], None], tuple[str, list[str]]] = {
    _commits: ("succeeded", ["a", "b"]),
    _rolls_back: ("succeeded", ["b"]),
    _closes: ("succeeded", []),
    _survives_an_error: ("succeeded", ["a", "b"]),
    _commits_then_raises: ("failed", []),
    _fails_in_sql: ("failed", []),
    _hides_an_error: ("failed", []),
    _breaks_a_deferred_constraint: ("failed", []),
    _breaks_a_deferred_trigger: ("failed", []),
    _leaves_a_bad_flush: ("failed", []),
    _ends_the_transaction: ("failed", []),
    _closes_the_connection: ("failed", []),
    _invalidates_the_connection: ("failed", []),
    _ends_its_own_backend: ("failed", []),
    _goes_on_without_its_backend: ("failed", []),
    _ends_the_savepoint_and_goes_on: ("failed", []),
    _replaces_the_savepoint_and_raises: ("failed", []),
    _closes_the_driver: ("failed", []),
    _commits_by_hand: ("failed", ["published"]),
    _commits_by_hand_and_goes_on: ("failed", ["published"]),
    _commits_what_it_rolled_back_to: ("succeeded", ["a", "b"]),
    _rolls_back_then_raises: ("failed", []),
}


def _task(queue: PgQueue, kind: str, act: Callable[[Session], None], *, max_attempts: int) -> Any:
    """A task whose handler does this with the session it is given."""
    if kind == "sync":

        @queue.task(name="act", retry=Retry.never(), max_attempts=max_attempts)
        def ill_mannered(session: Session) -> None:
            act(session)

        return ill_mannered

    @queue.task(name="act", retry=Retry.never(), max_attempts=max_attempts)
    async def async_ill_mannered(session: AsyncSession) -> None:
        await session.run_sync(act)

    return async_ill_mannered


@pytest.mark.parametrize(
    ("act", "kind"),
    [*((act, "sync") for act in MANNERS), *((act, "async") for act in list(MANNERS)[::5])],
    ids=lambda part: part.strip("_") if isinstance(part, str) else part.__name__.strip("_"),
)
def test_a_handler_can_neither_drop_its_job_nor_publish_half_of_its_work(
    queue: PgQueue, kind: str, act: Callable[[Session], None]
) -> None:
    outcome, words = MANNERS[act]
    task = _task(queue, kind, act, max_attempts=1)

    @queue.task(name="neighbour")
    def neighbour(session: Session) -> None:
        session.execute(text("SELECT count(*) FROM written"))

    with queue.session() as session:
        job = task.enqueue(session).id
        neighbour.enqueue(session)
        session.commit()

    counts = Worker(queue, concurrency=1).run_until_empty(timeout=60)

    with queue.session() as session:
        ended = session.get_one(Job, job)
        assert (ended.outcome, ended.attempts) == (outcome, 1)
        assert sorted(session.scalars(text("SELECT word FROM written"))) == words
        assert counts["succeeded"] == (2 if outcome == "succeeded" else 1)
        assert queue.check(session) == []


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "act", [_ends_the_transaction, _commits_by_hand, _commits_by_hand_and_goes_on]
)
def test_who_ends_its_transaction_has_failed_and_not_crashed(
    queue: PgQueue, kind: str, act: Callable[[Session], None]
) -> None:
    task = _task(queue, kind, act, max_attempts=3)

    with queue.session() as session:
        job = task.enqueue(session).id
        session.commit()

    assert Worker(queue, concurrency=1).run_until_empty(timeout=60) == {"failed": 1}

    with queue.session() as session:
        ended = session.get_one(Job, job)
        assert (ended.outcome, ended.attempts) == ("failed", 1)
        assert "session.rollback(), which leave it open" in (ended.last_error or "")
