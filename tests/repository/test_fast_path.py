"""The short way: what an application may notice of SQLAlchemy is as if it had been gone by."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Executable, create_engine, event, text
from sqlalchemy.exc import (
    DBAPIError,
    InvalidRequestError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import wait_until
from pgqueue import Job, PayloadError, PgQueue, SchemaMissing
from pgqueue.models import SCHEMA
from pgqueue.repository import enqueue
from pgqueue.repository.fast_path import CURSOR, fetch
from pgqueue.repository.messages import Start

queue = PgQueue()


@queue.task(name="tests.number")
def number(number: int) -> None: ...


@queue.task(name="tests.word")
def word(word: str) -> None: ...


@pytest.fixture(autouse=True)
def bound(engine: Engine) -> Iterator[PgQueue]:
    queue.bind(engine)
    yield queue
    queue._sessions = None


@pytest.mark.parametrize(
    "what",
    ["before_cursor_execute", "after_cursor_execute", "before_execute", "after_execute"],
)
def test_whoever_listens_to_an_engine_hears_of_an_enqueue(engine: Engine, what: str) -> None:
    heard: list[str] = []
    event.listen(engine, what, lambda *said: heard.append(" ".join(map(str, said))))

    number.delay(1)
    with Session(engine) as session, session.begin():
        number.enqueue(session, 2)

    assert sum(f"{SCHEMA}.message_queue" in said for said in heard) == 2


def test_it_is_taken_when_nobody_looks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(engine) as session, session.begin():
        session.connection()
        monkeypatch.setattr(Connection, "execute", pytest.fail)

        number.enqueue(session, 1)
        number.options(unique_key="one").enqueue(session, 2)
        number.delay(3)

        monkeypatch.undo()


def test_whoever_handles_errors_hears_of_that_of_an_enqueue(database_url: str) -> None:
    queue.bind(engine := create_engine(database_url))
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {SCHEMA}.jobs ADD CHECK (task <> 'tests.number')"))
    heard: list[str] = []
    event.listen(engine, "handle_error", lambda context: heard.append(context.statement))

    with pytest.raises(DBAPIError):
        number.delay(1)

    engine.dispose()
    assert len(heard) == 1


def test_an_engine_with_a_name_has_its_own_log(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    named = create_engine(database_url, logging_name="shop")
    queue.bind(named)
    with caplog.at_level(logging.INFO, logger="sqlalchemy.engine.Engine.shop"):
        number.delay(1)
    named.dispose()

    assert f"INSERT INTO {SCHEMA}.message_queue" in caplog.text


def test_what_the_driver_cannot_write_costs_a_session_nothing_else(database_url: str) -> None:
    latin = create_engine(database_url, connect_args={"client_encoding": "latin1"})
    queue.bind(latin)
    with Session(latin) as session:
        number.enqueue(session, 1)
        with pytest.raises(PayloadError):
            word.enqueue(session, "\N{EURO SIGN}")
        session.commit()

        assert [job.args for job in session.query(Job)] == [{"number": 1}]
    latin.dispose()


def test_whoever_has_statements_logged_finds_an_enqueue(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="sqlalchemy.engine.Engine"):
        number.delay(1)

    assert f"INSERT INTO {SCHEMA}.message_queue" in caplog.text


def test_an_engine_that_echoes_shows_it(database_url: str, capfd: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    loud = create_engine(database_url, echo=True)
    queue.bind(loud)

    number.delay(1)
    loud.dispose()

    assert f"INSERT INTO {SCHEMA}.message_queue" in capfd.readouterr().out


def test_errors_are_those_of_sqlalchemy(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {SCHEMA}.jobs ADD CHECK (task <> 'tests.number')"))

    with pytest.raises(DBAPIError, match="INSERT INTO") as raised:
        number.delay(1)

    assert raised.value.orig is not None
    assert raised.value.orig.sqlstate == "23514"  # type: ignore[attr-defined]
    assert not raised.value.connection_invalidated


def test_missing_tables_are_named(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {SCHEMA} CASCADE"))

    with pytest.raises(SchemaMissing) as raised:
        number.delay(1)

    assert isinstance(raised.value.__cause__, ProgrammingError)


def test_when_the_server_was_restarted_the_whole_pool_is_forgotten(engine: Engine) -> None:
    opened = [engine.connect() for _ in range(3)]
    pids = [one.scalar(text("SELECT pg_backend_pid()")) for one in opened]
    for one in opened:
        one.close()
    _terminate(engine, pids)

    with pytest.raises(OperationalError) as raised:
        number.delay(1)
    jobs = [number.delay(2).id for _ in range(3)]

    assert raised.value.connection_invalidated
    assert len(set(jobs)) == 3


def test_the_connection_that_replaces_an_invalidated_one_has_its_own_cursor(engine: Engine) -> None:
    with Session(engine) as session:
        number.enqueue(session, 1)
        session.connection().invalidate()
        session.rollback()
        number.enqueue(session, 2)
        session.commit()

        assert [job.args for job in session.query(Job)] == [{"number": 2}]


def test_a_connection_keeps_its_cursor_but_not_what_many_jobs_have_left_in_it(
    engine: Engine,
) -> None:
    with engine.begin() as connection, Session(connection) as session:
        number.enqueue(session, 1)
        kept = connection.info[CURSOR]
        number.enqueue(session, 2)
        assert connection.info[CURSOR] is kept

        number.enqueue_many(session, [(3,), (4,)])

        assert CURSOR not in connection.info


def test_a_job_enqueued_on_a_bare_connection_is_there_when_that_commits(engine: Engine) -> None:
    with engine.connect() as connection:
        rows = fetch(connection, *_an_enqueue())
        connection.commit()

    with Session(engine) as session:
        assert session.get_one(Job, rows[0][0]).queue == "q"


def test_a_session_whose_connection_was_lost_has_to_roll_back(engine: Engine) -> None:
    with Session(engine) as session:
        number.enqueue(session, 1)
        _terminate(engine, [session.scalar(text("SELECT pg_backend_pid()"))])

        with pytest.raises(OperationalError):
            number.enqueue(session, 2)
        with pytest.raises(PendingRollbackError):
            number.enqueue(session, 3)
        session.rollback()
        number.enqueue(session, 4)
        session.commit()

    with Session(engine) as session:
        assert [job.args for job in session.query(Job)] == [{"number": 4}]


def test_nothing_is_enqueued_behind_a_transaction_that_is_over(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        transaction.rollback()

        with pytest.raises(InvalidRequestError, match="closed transaction"):
            fetch(connection, *_an_enqueue())


def test_nothing_is_enqueued_behind_a_savepoint_that_is_gone(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.begin()
        savepoint = connection.begin_nested()
        connection.exec_driver_sql("ROLLBACK")  # behind SQLAlchemy's back
        with pytest.raises(DBAPIError):
            savepoint.commit()

        with pytest.raises(PendingRollbackError):
            fetch(connection, *_an_enqueue())


@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "AUTOCOMMIT"])
def test_a_delayed_job_leaves_the_connection_as_it_was(
    database_url: str, isolation_level: Any
) -> None:
    engine = create_engine(database_url, isolation_level=isolation_level, pool_size=1)
    queue.bind(engine)

    number.delay(1)

    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        assert driver.autocommit == (isolation_level == "AUTOCOMMIT")
        assert connection.scalar(text(f"SELECT count(*) FROM {SCHEMA}.jobs")) == 1
    engine.dispose()


def test_a_translated_schema_is_still_translated(database_url: str) -> None:
    # Engines that share compiled statements must all translate the same schemas.
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER SCHEMA {SCHEMA} RENAME TO moved"))
    translated = engine.execution_options(schema_translate_map={SCHEMA: "moved"})

    with Session(translated) as session, session.begin():
        number.enqueue(session, 7)

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT args ->> 'number' FROM moved.jobs")) == "7"
    engine.dispose()


def test_an_interrupted_enqueue_leaves_no_connection_that_still_waits(engine: Engine) -> None:
    once = number.options(unique_key="one")
    given_up: list[object] = []
    event.listen(engine, "invalidate", lambda *said: given_up.append(said))
    with Session(engine) as holder:
        once.enqueue(holder, 1)

        def interrupt() -> None:
            wait_until(lambda: _somebody_waits(engine))
            os.kill(os.getpid(), signal.SIGINT)

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            once.delay(2)
        other.join()
        holder.rollback()
    assert len(given_up) == 1

    once.delay(3)
    with Session(engine) as session:
        assert [job.args for job in session.query(Job)] == [{"number": 3}]


def _an_enqueue() -> tuple[Executable, dict[str, Any]]:
    statement = enqueue.enqueue_job(start=Start.NOW, unique=False, notify=False)
    values = {"queue": "q", "task": "t", "args": "{}", "priority": 5, "max_attempts": 1}
    return statement, values


def _somebody_waits(engine: Engine) -> bool:
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    with engine.connect() as connection:
        return bool(connection.scalar(waiting))


def _terminate(engine: Engine, pids: list[int | None]) -> None:
    with create_engine(engine.url, isolation_level="AUTOCOMMIT").connect() as connection:
        for pid in pids:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
