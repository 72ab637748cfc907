"""Jobs that are enqueued by the name of their task: from Python, and from SQL."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from enqueued_at_once import enqueue_and_run
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from worker_rig import running, wait_until

from pgqueue import (
    ArgumentsError,
    DuplicateJob,
    Job,
    JobAttempt,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    Unique,
    UnknownOption,
    UnknownTask,
    Worker,
)
from pgqueue.repository.tables import lock_key
from pgqueue.tables import DeclaredTask

ARGUMENTS: list[dict[str, Any]] = [
    {"who": 'Zoë \U0001f600 "\\/\x7f\n', "n": 1},
    {"who": "ann", "n": 1.0},
    {"who": "ann", "n": 1e-7},
    {"who": "a" * 200, "n": 12345678901234},
    {"who": "ann"},
]


class Shop:
    """The application that has the tasks, and one that has none."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine, queue_limits={"mail": Limit(2)})
        self.other = PgQueue(engine)
        self.ran: list[Any] = []
        self.locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self.overlaps: list[int] = []
        self.mail = self.queue.task(
            name="mail",
            queue="mail",
            priority=2,
            max_attempts=3,
            limit=Limit(1, by=("who", "n")),
            unique=Unique(by=None),
        )(self._mail)
        self.keyed = self.queue.task(name="keyed", unique_key=lambda n: f"k{n}")(self._keyed)
        self.raises = self.queue.task(
            name="raises", unique=Unique(across="queues", on_conflict="raise")
        )(self._keyed)
        self.keyed_across = self.queue.task(
            name="keyed_across", unique=Unique(key=lambda n: f"k{n}", across="queues")
        )(self._keyed)
        self.moved = self.queue.task(name="moved", unique=Unique(on_conflict="postpone"))(
            self._keyed
        )
        self.once = self.queue.task(name="once", unique=Unique(until="succeeded"))(self._keyed)
        self.alone = self.queue.task(name="alone", limit=Limit(1, by="n"))(self._alone)
        self.daily = self.queue.task(name="daily", unique=Unique(period=timedelta(days=1)))(
            self._keyed
        )

    def _mail(self, who: str, n: float = 2.5) -> None:
        self.ran.append(who)

    def _keyed(self, n: int) -> None:
        self.ran.append(n)

    def _alone(self, n: int) -> None:
        """Takes a moment, and notes whether another of the same key runs meanwhile."""
        if not self.locks[n].acquire(blocking=False):
            self.overlaps.append(n)
            return
        time.sleep(0.002)
        self.locks[n].release()

    def work(self) -> dict[str, int]:
        return dict(Worker(self.queue, queues=["default", "mail"]).run_until_empty())


@pytest.fixture
def shop(engine: Engine) -> Iterator[Shop]:
    shop = Shop(engine)
    yield shop
    with Session(engine) as session:
        assert shop.queue.check(session) == []


@pytest.fixture
def declared(shop: Shop) -> Shop:
    shop.work()
    return shop


@pytest.mark.parametrize("args", ARGUMENTS)
def test_it_has_the_options_and_keys_that_its_task_gives(
    declared: Shop, session: Session, args: dict[str, Any]
) -> None:
    by_task = declared.mail.enqueue(session, **args)
    columns = ("queue", "priority", "max_attempts", "unique_key", "limit_keys")
    expected = [getattr(by_task, name) for name in columns]
    session.rollback()

    job_id = declared.other.enqueue_by_name(session, "mail", args)

    job = session.get_one(Job, job_id)
    assert [getattr(job, name) for name in columns] == expected
    assert declared.mail.enqueue(session, **args).id == job_id
    session.rollback()


def test_python_and_sql_enqueue_under_the_same_keys(declared: Shop, session: Session) -> None:
    first = declared.daily.enqueue(session, 7).id
    across = declared.raises.enqueue(session, 7).id
    once = declared.once.enqueue(session, 7).id

    sql = text("""SELECT pgqueue.enqueue('daily', '{"n": 7}')""")
    assert session.scalar(sql) == first
    assert declared.other.enqueue_by_name(session, "once", {"n": 7}) == once
    with pytest.raises(DuplicateJob, match=f"job {across}"):
        declared.other.enqueue_by_name(session, "raises", {"n": 7}, queue="elsewhere")
    session.commit()


def test_a_key_of_a_python_function_must_be_given(declared: Shop, session: Session) -> None:
    with pytest.raises(OptionError, match="made by a Python function; give unique_key"):
        declared.other.enqueue_by_name(session, "keyed", {"n": 7})

    job_id = declared.other.enqueue_by_name(session, "keyed", {"n": 7}, unique_key="k7")
    assert declared.keyed.enqueue(session, 7).id == job_id


def test_who_gives_the_key_of_a_python_function_is_its_duplicate_in_all_queues(
    declared: Shop, session: Session
) -> None:
    job_id = declared.other.enqueue_by_name(
        session, "keyed_across", {"n": 7}, unique_key="k7", queue="elsewhere"
    )

    assert declared.keyed_across.enqueue(session, 7).id == job_id


def test_a_task_whose_enqueue_may_change_another_job_is_refused(
    declared: Shop, session: Session
) -> None:
    with pytest.raises(OptionError, match="may change another job"):
        declared.other.enqueue_by_name(session, "moved", {"n": 7})


def test_limits_and_unique_keys_hold_while_sql_and_python_enqueue_at_once(
    declared: Shop, engine: Engine
) -> None:
    by_name = "SELECT pgqueue.enqueue(:task, jsonb_build_object('n', CAST(:n AS int)))"

    def in_python(connection: Connection, n: int) -> None:
        declared.alone.enqueue(connection, n % 3)
        declared.daily.enqueue(connection, n)

    def in_sql(connection: Connection, n: int) -> None:
        connection.execute(text(by_name), {"task": "alone", "n": n % 3})
        connection.execute(text(by_name), {"task": "daily", "n": n})

    enqueue_and_run(declared.queue, engine, in_python, in_sql)

    assert declared.overlaps == []
    assert sorted(declared.ran) == list(range(40)), "each unique job has run once"


def test_a_sleeping_worker_is_woken(declared: Shop, session: Session) -> None:
    sleeps = text("SELECT NOT pg_try_advisory_xact_lock(:key)")

    def is_asleep() -> bool:
        with declared.queue.engine.begin() as connection:
            return bool(connection.scalar(sleeps, {"key": lock_key("sleepers")}))

    with running(Worker(declared.queue, poll_interval=timedelta(days=1))):
        wait_until(is_asleep)
        session.scalar(text("""SELECT pgqueue.enqueue('daily', '{"n": 7}')"""))
        session.commit()
        wait_until(lambda: declared.ran == [7])


def test_an_unknown_task_needs_a_queue_and_waits_for_its_worker(
    shop: Shop, session: Session
) -> None:
    with pytest.raises(UnknownTask, match="task mail is not known"):
        shop.other.enqueue_by_name(session, "mail", {"who": "ann"})
    job_id = shop.other.enqueue_by_name(session, "mail", {"who": "ann", "n": 1}, queue="mail")
    plain = shop.other.enqueue_by_name(session, "keyed", {"n": 3}, queue="default")
    session.commit()
    Worker(PgQueue(shop.other.engine), queues=["mail", "default"]).run_until_empty()
    assert session.get_one(Job, job_id).status is JobStatus.BLOCKED

    Worker(shop.queue, queues=["none"]).run_until_empty()
    session.rollback()
    job = session.get_one(Job, job_id)
    assert job.limit_keys == 'mail:who+n ["ann",1]\nqueue:mail'
    assert session.get_one(Job, plain).status is JobStatus.PENDING
    session.rollback()

    assert shop.work() == {"succeeded": 2}
    assert sorted(map(str, shop.ran)) == ["3", "ann"]


def test_a_job_that_is_committed_after_the_declaration_waits_for_its_keys(
    shop: Shop, session: Session
) -> None:
    ids = [
        shop.other.enqueue_by_name(session, "alone", {"n": n % 2}, queue="default")
        for n in range(10)
    ]
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(running(Worker(shop.queue, poll_interval=timedelta(seconds=0.1))))
        with Session(shop.queue.engine) as reader:
            wait_until(lambda: reader.get(DeclaredTask, "alone"))
        session.commit()
        has_ended = "SELECT bool_and(outcome = 'succeeded') FROM pgqueue.jobs"
        wait_until(lambda: session.scalar(text(has_ended)))

    keys = session.scalars(select(Job.limit_keys).where(Job.id.in_(ids)))
    assert set(keys) == {"alone:n [0]", "alone:n [1]"}
    assert shop.overlaps == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"n": "many"}, "argument n must be an int"),
        ({"n": 1, "m": 1}, "it has no argument 'm'"),
        ({}, "missing a required argument: 'n'"),
    ],
)
def test_wrong_arguments_fail_the_job_at_once(
    declared: Shop, session: Session, args: dict[str, Any], message: str
) -> None:
    job_id = declared.other.enqueue_by_name(session, "keyed", args, unique_key="k")
    session.commit()

    assert declared.work() == {"failed": 1}

    [attempt] = session.scalars(select(JobAttempt).where(JobAttempt.job_id == job_id))
    assert str(attempt.error_type).endswith("ArgumentsError")
    assert message in str(attempt.error)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"args": {"n": object()}}, ArgumentsError),
        ({"queue": "a b"}, OptionError),
        ({"meta": {"pgqueue.x": 1}}, OptionError),
        ({"speed": 9}, UnknownOption),
        ({"timeout": timedelta(1)}, OptionError),
        ({"priority": 10}, OptionError),
    ],
)
def test_wrong_values_are_refused_and_leave_the_transaction_usable(
    declared: Shop, session: Session, given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        declared.other.enqueue_by_name(session, "daily", **{"args": {"n": 1}, **given})

    assert session.scalars(select(Job)).all() == []


def test_in_a_transaction_of_a_test_the_jobs_run_there(shop: Shop, connection: Connection) -> None:
    with shop.queue.bound_to(connection):
        with shop.queue.session() as session:
            shop.queue.enqueue_by_name(session, "keyed", {"n": 3}, queue="default")
            shop.queue.enqueue_by_name(session, "mail", {"who": "ann"}, queue="mail")
            session.commit()
        assert shop.work() == {"succeeded": 2}


async def in_async_session(url: str, queue: PgQueue) -> int:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session, session.begin():
        job_id = await queue.enqueue_by_name_async(session, "daily", {"n": 7})
    await engine.dispose()
    return job_id


def test_a_coroutine_enqueues_in_its_async_session(
    declared: Shop, session: Session, database_url: str
) -> None:
    job_id = asyncio.run(in_async_session(database_url, declared.other))

    assert session.get_one(Job, job_id).args == {"n": 7}


def test_the_function_takes_no_name_from_the_search_path_of_its_caller(
    declared: Shop, session: Session
) -> None:
    session.execute(
        text("""
            CREATE SCHEMA other;
            CREATE FUNCTION other.clock_timestamp() RETURNS timestamptz LANGUAGE sql
            AS $$ SELECT CAST('2100-01-01' AS timestamptz) $$;
            CREATE TABLE other.tasks (name text, declaration jsonb);
            SET search_path = other, pg_catalog
        """)
    )

    job_id = session.scalar(text("""SELECT pgqueue.enqueue('daily', '{"n": 7}')"""))

    assert session.get_one(Job, job_id).run_at.year < 2100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'a b', queue => 'default'", "without spaces"),
        ("'daily', queue => 'a b'", "queue is 'a b'"),
        ("'daily', '[1]'", "args is an array"),
        ("'daily', run_at => now(), delay => '1 s'", "both run_at and delay"),
        ("""'daily', meta => '{"pgqueue.batch": 1}'""", "begins with pgqueue"),
        ("""'daily', meta => '"x"'""", "meta is no object"),
        ("""'daily', tags => '"x"'""", "an array of texts"),
        ("'daily', tags => '[1]'", "an array of texts"),
        ("'daily', unique_key => ''", "unique_key is ''"),
        ("'daily', unique_key => 'pgqueue.across:k'", "give another text"),
    ],
)
def test_the_function_refuses_what_python_refuses(
    declared: Shop, session: Session, arguments: str, message: str
) -> None:
    with pytest.raises(DBAPIError, match=message) as raised:
        session.scalar(text(f"SELECT pgqueue.enqueue({arguments})".replace(":", r"\:")))

    assert getattr(raised.value.orig, "sqlstate", None) == "PQ002"


def test_a_trigger_enqueues_in_the_transaction_of_its_statement(
    declared: Shop, engine: Engine, session: Session
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("""
            CREATE TABLE users (id int);
            CREATE FUNCTION welcome() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                PERFORM pgqueue.enqueue('daily', jsonb_build_object('n', NEW.id));
                RETURN NEW;
            END $$;
            CREATE TRIGGER welcome AFTER INSERT ON users
            FOR EACH ROW EXECUTE FUNCTION welcome()
        """)
    session.execute(text("INSERT INTO users VALUES (1)"))
    session.rollback()
    session.execute(text("INSERT INTO users VALUES (2)"))
    session.commit()

    assert declared.work() == {"succeeded": 1}
    assert declared.ran == [2]
