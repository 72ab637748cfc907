"""The end of a batch against additions and other ends, and the rows that each statement reads."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import execute, wait_until
from chaos.plans import AUTO_EXPLAIN, plans_of, prepare_at_once
from pgqueue import BatchEnded, Job, PgQueue, Worker
from pgqueue.database.settings import LOOKING, UPKEEP
from pgqueue.repository import batches
from pgqueue.repository.batches import Batches
from pgqueue.repository.blocked import BlockedNodes, Look
from pgqueue.repository.workers import Workers
from pgqueue.tables import BatchJob
from pgqueue.testing.databases import fresh_database
from pgqueue.worker.looks import Looker

WAITS = "SELECT count(*) FROM pg_locks WHERE NOT granted"
queue = PgQueue()


@queue.task(name="tests.piece")
def piece() -> None: ...


@queue.task(name="tests.told")
def told(batch_id: int) -> None: ...


@pytest.fixture
def batch_id(engine: Engine) -> int:
    """A batch whose only job has ended."""
    queue.bind(engine)
    with (
        Session(engine) as session,
        session.begin(),
        queue.batch(session, on_cancelled=told) as new,
    ):
        queue.cancel(session, piece.enqueue(session).id)
    return new.id


@pytest.fixture
def ending(engine: Engine) -> Iterator[Connection]:
    """The connection on which a worker ends batches."""
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        yield connection


def end(connection: Connection) -> bool | None:
    """Look at the batch in an open transaction: whether it has ended, None if it is skipped."""
    over, _ = BlockedNodes(connection).swept(None)
    for batch_id in BlockedNodes(connection).over(over).batch_ids:
        look = Batches(connection).look(batch_id)
        return bool(look.ended) if look != Look() else None
    return None


def test_a_batch_does_not_end_while_a_transaction_adds_to_it(
    engine: Engine, batch_id: int, ending: Connection
) -> None:
    with Session(engine) as session:
        with queue.extend_batch(session, batch_id):
            added = piece.enqueue(session).id
        assert end(ending) is None
        ending.rollback()
        session.commit()

    assert end(ending) is False
    ending.commit()

    with Session(engine) as session:
        queue.cancel(session, added)
        session.commit()
    assert end(ending) is True
    ending.commit()
    with Session(engine) as session:
        assert queue.get_batch(session, batch_id).total == 2


def test_additions_do_not_wait_for_each_other(engine: Engine, batch_id: int) -> None:
    with Session(engine) as one, Session(engine) as other:
        other.execute(text("SET lock_timeout = '60s'"))
        with queue.extend_batch(one, batch_id), queue.extend_batch(other, batch_id):
            piece.enqueue(one)
            piece.enqueue(other)
        other.commit()
        one.commit()
        assert queue.get_batch(one, batch_id).total == 3


def test_an_addition_that_comes_during_the_end_is_refused_after_it(
    engine: Engine, batch_id: int, ending: Connection
) -> None:
    refused = threading.Event()

    def add() -> None:
        with Session(engine) as session:
            try:
                with queue.extend_batch(session, batch_id):
                    piece.enqueue(session)
                session.commit()
            except BatchEnded:
                refused.set()

    assert end(ending) is True
    thread = threading.Thread(target=add)
    thread.start()
    try:
        with engine.connect() as seeing:
            wait_until(lambda: bool(seeing.scalar(text(WAITS))))
    finally:
        ending.commit()
        thread.join(60)

    assert refused.is_set()
    with Session(engine) as session:
        assert session.query(Job).where(Job.task == "tests.piece").count() == 1
        assert session.query(BatchJob).count() == 1


def test_an_addition_with_an_older_snapshot_fails(
    engine: Engine, batch_id: int, ending: Connection
) -> None:
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(text("SELECT 1 FROM pgqueue.blocked"))
        assert end(ending) is True
        ending.commit()

        with (
            pytest.raises(OperationalError, match="could not serialize"),
            queue.extend_batch(session, batch_id),
        ):
            pass


def test_a_second_worker_skips_the_batch_that_the_first_ends(
    engine: Engine, batch_id: int, ending: Connection
) -> None:
    with engine.connect() as other:
        other.execute(text("SET lock_timeout = '60s'"))
        assert end(ending) is True
        assert end(other) is None
        other.rollback()
        ending.commit()
        assert end(other) is None
    Looker(notify=False).look(ending, [-batch_id])

    with Session(engine) as session:
        [callback] = session.query(Job).where(Job.task == "tests.told")
        assert queue.get_batch(session, batch_id).callback_id == callback.id


def test_an_end_that_is_rolled_back_leaves_nothing(
    engine: Engine, batch_id: int, ending: Connection
) -> None:
    assert end(ending) is True
    ending.rollback()

    with Session(engine) as session:
        assert queue.get_batch(session, batch_id).outcome is None
        [callback] = session.query(Job).where(Job.task == "tests.told")
        assert callback.status == "blocked"
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}


def sql_of(statement: Any) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # so in SQLAlchemy
    return str(statement.compile(dialect=dialect))


def test_additions_share_their_lock_and_that_of_an_end_waits_for_none() -> None:
    added = sql_of(batches.keep_open())
    ended = sql_of(batches.lock_batch())

    assert added.endswith("FOR SHARE OF blocked")
    assert ended.endswith("FOR NO KEY UPDATE SKIP LOCKED")


BIG = 20_000
MANY = f"""
    INSERT INTO pgqueue.jobs (task, outcome, finished_at)
    SELECT 'tests.piece', CASE WHEN n <= {BIG // 2} THEN 'succeeded' END,
           CASE WHEN n <= {BIG // 2} THEN clock_timestamp() END
    FROM generate_series(1, {BIG}) AS n;
    INSERT INTO pgqueue.batches (ended_at, outcome, total)
    SELECT clock_timestamp(), 'succeeded', 0 FROM generate_series(1, 5000);
    INSERT INTO pgqueue.batches (name, count_at)
    VALUES ('big', clock_timestamp() + interval '1 day');
    INSERT INTO pgqueue.blocked VALUES (-5001, {BIG});
    INSERT INTO pgqueue.batch_jobs SELECT 5001, id FROM pgqueue.jobs;
"""  # numbers


@pytest.fixture(scope="module", params=["never analyzed", "analyzed"])
def many_url(server_url: str, template_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A big batch, half of whose jobs have ended, after 5000 that have ended."""
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url)
        execute(engine, MANY)
        if request.param == "analyzed":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("ANALYZE"))
        yield url
        engine.dispose()


def on(url: str, settings: dict[str, str]) -> Engine:
    given = {**settings, **AUTO_EXPLAIN}
    options = " ".join(f"-c {name}={value}".replace(", ", ",") for name, value in given.items())
    return prepare_at_once(create_engine(make_url(url).update_query_dict({"options": options})))


def test_a_look_at_an_open_batch_is_two_probes(many_url: str) -> None:
    engine = on(many_url, UPKEEP)
    with engine.connect() as connection, plans_of(connection) as plans:
        notices = Workers(connection).notices(running=[], search=False, scheduled="{}", sweeps=True)
        connection.rollback()
    engine.dispose()

    assert notices.over == []
    assert plans.only.scans_of("jobs") <= {"Index Scan jobs_pkey"}
    assert plans.only.scans_of("batches") <= {
        "Index Scan batches_open",
        "Index Only Scan batches_open",
        "Index Scan batches_deadline_at",
    }
    assert plans.only.buffers < 40


def test_the_next_unfinished_job_is_found_from_the_newest_one_on(many_url: str) -> None:
    engine = on(many_url, LOOKING)
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE pgqueue.jobs SET outcome = 'failed', finished_at = now() WHERE id = :id"),
            {"id": BIG},
        )
        with plans_of(connection) as plans:
            assert end(connection) is False
        waits_for = connection.scalar(text("SELECT max(waits_for) FROM pgqueue.blocked"))
        connection.rollback()
    engine.dispose()

    assert waits_for == BIG - 1
    assert sum(plan.buffers for plan in plans.seen) < 100


def test_a_look_reads_no_job_but_those_that_wait(many_url: str) -> None:
    engine = on(many_url, {**LOOKING, "plan_cache_mode": "force_generic_plan"})
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO pgqueue.blocked VALUES (:id, 1)"), {"id": BIG})
        with plans_of(connection) as plans:
            assert BlockedNodes(connection).look([1], notify=False).released == 1
        connection.rollback()
    engine.dispose()

    assert [plan.whole_scans for plan in plans.seen if plan.whole_scans] == []
    assert sum(plan.buffers for plan in plans.seen) < 200
