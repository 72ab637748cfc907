"""One promise on every driver and with every kind of session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from sqlalchemy import URL, Engine, Integer, NullPool, create_engine, func, make_url, select, text
from sqlalchemy.ext.asyncio import (
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgqueue import (
    Change,
    DuplicateJob,
    Job,
    MessageQueue,
    NoTransaction,
    PgQueue,
)
from pgqueue.worker import Worker

pytestmark = pytest.mark.journey

queue = PgQueue()


@dataclass
class Line:
    name: str
    price: Decimal


class Address(BaseModel):
    street: str
    since: date | None = None


@queue.task(name="drivers.keep")
def keep(
    name: str,
    number: int,
    factor: float,
    id: UUID,
    day: date,
    at: datetime,
    clock: time,
    span: timedelta,
    price: Decimal,
    raw: bytes,
    lines: list[Line],
    address: Address,
    tags: dict[str, Any],
) -> str:
    return repr((name, number, factor, id, day, at, clock, span, price, raw, lines, address, tags))


ARGUMENTS: tuple[Any, ...] = (
    "Grüße, 世界 \U0001f600 \\ ' \" %s :name $1 {} \u2028",
    -(2**200) - 1,
    1e-7,
    UUID("12345678-1234-5678-1234-567812345678"),
    date(1999, 12, 31),
    datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
    time(4, 5, 6, 7),
    timedelta(days=-1, microseconds=1),
    Decimal("1234567890.123456789012345678901234567890"),
    bytes(range(256)),
    [Line("café", Decimal("0.10")), Line("", Decimal(0))],
    Address(street="Żółć", since=date(2020, 1, 1)),
    {"": "empty", "a b": [None, True, 2**63, {"x": []}]},
)


@queue.task(name="drivers.note")
def note(n: int) -> int:
    return n


@queue.task(name="drivers.once", unique_key=lambda n: f"once:{n}")
def once(n: int) -> int:
    return n


class Caller:
    """What an application does with its session, the same for all kinds."""

    def __init__(self, session: Any, *, is_async: bool) -> None:
        self.session = session
        self.is_async = is_async

    async def enqueue(self, task: Any, *args: Any) -> Job:
        if self.is_async:
            return await task.enqueue_async(self.session, *args)  # type: ignore[no-any-return]
        return task.enqueue(self.session, *args)  # type: ignore[no-any-return]

    async def enqueue_many(self, task: Any, rows: list[Any]) -> list[int]:
        if self.is_async:
            return await task.enqueue_many_async(self.session, rows)  # type: ignore[no-any-return]
        return task.enqueue_many(self.session, rows)  # type: ignore[no-any-return]

    async def add(self, job: Job) -> Job:
        self.session.add(job)
        await self.do("flush")
        return job

    async def do(self, name: str, *args: Any) -> Any:
        """Call a method of the session."""
        done = getattr(self.session, name)(*args)
        return await done if self.is_async else done

    async def operate(self, operation: Callable[..., Change], job_id: int) -> Change:
        if self.is_async:
            scoped = isinstance(self.session, async_scoped_session)
            session = self.session() if scoped else self.session
            return await session.run_sync(operation, job_id)  # type: ignore[no-any-return]
        return operation(self.session, job_id)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[Any]:
        """A savepoint that is rolled back at the end."""
        nested = await self.session.begin_nested() if self.is_async else self.session.begin_nested()
        try:
            yield nested
        finally:
            await nested.rollback() if self.is_async else nested.rollback()


KINDS = [
    ("psycopg", "Session"),
    ("psycopg", "scoped_session"),
    ("psycopg2", "Session"),
    ("psycopg2", "scoped_session"),
    ("psycopg", "AsyncSession"),
    ("psycopg", "async_scoped_session"),
    ("asyncpg", "AsyncSession"),
    ("asyncpg", "async_scoped_session"),
]
Scenario = Callable[[Caller], Any]


def with_session(url: str | URL, kind: tuple[str, str], scenario: Scenario, **options: Any) -> Any:
    """Run a scenario in a session of that kind; what it returned."""
    driver, named = kind
    own_url = make_url(url).set(drivername=f"postgresql+{driver}")

    async def run() -> Any:
        if not named.lower().startswith("async"):
            engine = create_engine(own_url, poolclass=NullPool, **options)
            maker = sessionmaker(engine, expire_on_commit=False)
            session: Any = scoped_session(maker) if named == "scoped_session" else maker()
            caller = Caller(session, is_async=False)
        else:
            async_engine = create_async_engine(own_url, poolclass=NullPool, **options)
            async_maker = async_sessionmaker(async_engine, expire_on_commit=False)
            scoped = async_scoped_session(async_maker, scopefunc=asyncio.current_task)
            session = scoped if named == "async_scoped_session" else async_maker()
            caller = Caller(session, is_async=True)
        try:
            return await scenario(caller)
        finally:
            await caller.do("close")

    return asyncio.run(run())


def count(engine: Engine) -> tuple[int, int]:
    """Committed jobs and messages; nothing is broken."""
    with Session(engine) as session:
        assert queue.check(session) == []
        return session.query(Job).count(), session.query(MessageQueue).count()


every_kind = pytest.mark.parametrize("kind", KINDS, ids="-".join)
every_driver = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind[1].endswith("Session")], ids="-".join
)


@every_kind
def test_what_is_enqueued_runs_with_its_arguments(engine: Engine, kind: tuple[str, str]) -> None:
    async def scenario(caller: Caller) -> list[int]:
        first = await caller.enqueue(keep, *ARGUMENTS)
        second = await caller.add(keep.job(*ARGUMENTS))
        many = await caller.enqueue_many(
            keep, [ARGUMENTS, dict(zip(names, ARGUMENTS, strict=True))]
        )
        assert not any(count(engine))
        await caller.do("commit")
        return [first.id, second.id, *many]

    names = keep.payload.names
    ids = with_session(engine.url, kind, scenario)
    own = PgQueue(engine)
    own.tasks = queue.tasks
    ended = Worker(own, concurrency=2).run_until_empty(timeout=60)

    assert ended == {"succeeded": 4}
    with Session(engine) as session:
        results = {session.get_one(Job, id).result for id in ids}
    assert results == {repr(ARGUMENTS)}


@every_driver
def test_options_and_keys_are_kept(engine: Engine, kind: tuple[str, str]) -> None:
    later = datetime(2040, 1, 1, tzinfo=UTC)

    async def scenario(caller: Caller) -> dict[str, Any]:
        delayed = note.options(delay=timedelta(days=2), priority=0, queue="mail", max_attempts=1)
        timed = note.options(run_at=later, unique_key="timed")
        jobs = [
            await caller.enqueue(delayed, 1),
            await caller.add(delayed.job(2)),
            await caller.enqueue(timed, 3),
        ]
        ids = await caller.enqueue_many(note.options(run_at=later), [(4,), {"n": 5}])
        again = await caller.enqueue(timed, 3)
        assert again.id == jobs[2].id
        keyed = await caller.enqueue_many(once, [(1,), (2,), (1,)])
        assert keyed[0] == keyed[2] != keyed[1]
        assert (await caller.enqueue(once, 2)).id == keyed[1]
        with pytest.raises(DuplicateJob):
            async with caller.savepoint():
                await caller.add(once.job(1))
        await caller.do("commit")
        return {"delayed": [job.id for job in jobs[:2]], "later": [jobs[2].id, *ids]}

    ids = with_session(engine.url, kind, scenario)

    assert count(engine) == (7, 7)
    with Session(engine) as session:
        for id in ids["delayed"]:
            job = session.get_one(Job, id)
            assert (job.priority, job.queue, job.max_attempts) == (0, "mail", 1)
            in_two_days = job.created_at + timedelta(days=2)
            assert abs(job.run_at - in_two_days) < timedelta(minutes=5)
        assert [session.get_one(Job, id).run_at for id in ids["later"]] == [later] * 3


@every_driver
def test_a_rollback_leaves_nothing_and_a_savepoint_nothing_of_its_own(
    engine: Engine, kind: tuple[str, str]
) -> None:
    async def write(caller: Caller) -> None:
        await caller.enqueue(note, 1)
        await caller.enqueue_many(note, [(2,), (3,)])
        await caller.enqueue_many(once, [(2,), (3,)])
        await caller.add(note.job(4))
        await caller.enqueue(once, 1)

    async def scenario(caller: Caller) -> None:
        await write(caller)
        await caller.do("rollback")
        kept = await caller.enqueue(note, 5)
        async with caller.savepoint():
            await write(caller)
        await caller.enqueue(once, 1)
        await caller.do("commit")
        assert kept.args == {"n": 5}

    with_session(engine.url, kind, scenario)

    assert count(engine) == (2, 2)


@every_driver
def test_jobs_are_cancelled_and_put_back(engine: Engine, kind: tuple[str, str]) -> None:
    async def scenario(caller: Caller) -> list[Change]:
        job = await caller.enqueue(once, 1)
        other = await caller.enqueue(note, 1)
        changes = [
            await caller.operate(queue.cancel, job.id),
            await caller.operate(queue.cancel, job.id),
            await caller.operate(queue.requeue, job.id),
            await caller.operate(queue.cancel, other.id),
        ]
        await caller.do("commit")
        await caller.operate(queue.requeue, other.id)
        await caller.do("rollback")
        return changes

    changes = with_session(engine.url, kind, scenario)

    cancelled, requeued = Change.CANCELLED, Change.REQUEUED
    assert changes == [cancelled, Change.UNCHANGED, requeued, cancelled]
    assert count(engine) == (2, 1)


@every_driver
def test_in_autocommit_one_statement_works_and_several_are_refused(
    engine: Engine, kind: tuple[str, str]
) -> None:
    async def scenario(caller: Caller) -> None:
        id = (await caller.enqueue(note, 1)).id
        assert count(engine) == (1, 1), "committed when enqueue has returned"
        again = [(await caller.enqueue(once, 1)).id for _ in range(2)]
        assert again[0] == again[1]
        with pytest.raises(NoTransaction, match=r"task drivers.note: enqueue_many: .* AUTOCOMMIT"):
            await caller.enqueue_many(note, [(1,)])
        with pytest.raises(NoTransaction, match=r"task drivers.note: session.add"):
            await caller.add(note.job(1))
        await caller.do("rollback")
        with pytest.raises(NoTransaction, match=rf"cancel of job {id}: .* AUTOCOMMIT"):
            await caller.operate(queue.cancel, id)
        with pytest.raises(NoTransaction, match=rf"requeue of job {id}: .* AUTOCOMMIT"):
            await caller.operate(queue.requeue, id)

    with_session(engine.url, kind, scenario, isolation_level="AUTOCOMMIT")

    assert count(engine) == (2, 2)


def enqueue_all(session: Any) -> list[int]:
    """By every door of a sync session; returns the ids."""
    job = note.job(1)
    session.add(job)
    session.flush()
    keyed = [once.enqueue(session, 2).id, once.enqueue_many(session, [(3,)])[0]]
    return [job.id, note.enqueue(session, 4).id, *note.enqueue_many(session, [(5,)]), *keyed]


class TestSessionsOfEveryMake:
    def test_a_session_that_does_not_begin_by_itself_enqueues(self, engine: Engine) -> None:
        with Session(engine, autobegin=False) as session, session.begin():
            enqueue_all(session)

        assert count(engine) == (5, 5)

    def test_a_session_inside_a_transaction_that_is_not_its_own_enqueues(
        self, engine: Engine
    ) -> None:
        with engine.connect() as connection:
            outer = connection.begin()
            session = Session(connection, join_transaction_mode="create_savepoint")
            enqueue_all(session)
            session.commit()
            assert count(engine) == (0, 0)
            outer.commit()

        assert count(engine) == (5, 5)

    @pytest.mark.parametrize("ends", ["commit", "rollback"])
    def test_a_session_with_two_phases_enqueues(self, engine: Engine, ends: str) -> None:
        with engine.connect() as connection:
            if connection.scalar(text("SHOW max_prepared_transactions")) == "0":
                pytest.skip("this server prepares no transactions: max_prepared_transactions = 0")

        with Session(engine, twophase=True) as session:
            cancelled, *_ = enqueue_all(session)
            queue.cancel(session, cancelled)
            queue.requeue(session, cancelled)
            session.prepare()
            getattr(session, ends)()

        assert count(engine) == ((5, 5) if ends == "commit" else (0, 0))

    def test_a_session_with_an_engine_for_jobs_alone_enqueues(
        self, engine: Engine, empty_database_url: str
    ) -> None:
        elsewhere = create_engine(empty_database_url, poolclass=NullPool)
        with Session(elsewhere, binds={Job: engine}) as session:
            ids = enqueue_all(session)
            assert queue.cancel(session, ids[0]) is Change.CANCELLED
            assert queue.requeue(session, ids[0]) is Change.REQUEUED
            queue.pause(session, "mail")
            assert queue.check(session) == []
            assert sum(each.jobs for each in queue.counts(session)) == 5
            assert session.scalar(text("SELECT current_database()"), bind_arguments={}) != (
                engine.url.database
            )
            session.commit()

        assert count(engine) == (5, 5)

    def test_a_session_of_a_tenant_enqueues(self, engine: Engine) -> None:
        """A translate map for the application's own tables leaves ours where they are."""
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA tenant_1"))
        tenant = engine.execution_options(schema_translate_map={None: "tenant_1"})

        with Session(tenant) as session:
            enqueue_all(session)
            session.commit()

        assert count(engine) == (5, 5)


@queue.task(name="drivers.bulk")
def bulk(numbers: list[int]) -> None: ...


@queue.task(name="drivers.keyed_bulk", unique_key=lambda numbers: f"k{len(numbers) % 7}")
def keyed_bulk(numbers: list[int]) -> None: ...


@pytest.mark.battery
def test_many_large_payloads_are_one_call(engine: Engine) -> None:
    """More than PostgreSQL's jsonb takes at once: a number of one digit becomes twelve bytes."""
    with Session(engine) as session:
        ids = bulk.enqueue_many(session, [([7] * 100_000,)] * 240)

        assert len(set(ids)) == 240
        session.rollback()


def test_what_is_large_goes_in_several_statements_and_keeps_its_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pgqueue.tasks.binding", "pgqueue.arguments.payload"):
        monkeypatch.setattr(f"{module}.LARGEST_TEXT", 300_000)
    rows = [([7] * n,) for n in range(1100)]

    with Session(engine) as session:
        ids = bulk.enqueue_many(session, rows)
        keyed = keyed_bulk.enqueue_many(session, rows[:1050])
        length = func.jsonb_array_length(Job.args["numbers"], type_=Integer)
        found = dict(session.execute(select(Job.id, length)).all())
        keys = dict(session.execute(select(Job.id, Job.unique_key)).all())

    assert [found[id] for id in ids] == list(range(1100))
    assert [keys[id] for id in keyed] == [f"k{n % 7}" for n in range(1050)]


class TestThePayloadLimit:
    def test_the_payload_limit_is_that_of_the_queue_and_a_worker_runs_what_is_there(
        self, engine: Engine
    ) -> None:
        wide, narrow = PgQueue(engine, max_payload_bytes=2**20), PgQueue(engine)
        lengths = [each.task(name="drivers.long")(_length) for each in (wide, narrow)]
        text_of_a_megabyte = "x" * (2**20 - 20)

        job = lengths[0].delay(text_of_a_megabyte)
        with pytest.raises(ValueError, match="over the limit of 262,144"):
            lengths[1].delay(text_of_a_megabyte)

        assert Worker(narrow, concurrency=1).run_until_empty(timeout=60) == {"succeeded": 1}
        with Session(engine) as session:
            assert session.get_one(Job, job.id).result == len(text_of_a_megabyte)


def _length(value: str) -> int:
    return len(value)


@every_driver
def test_missing_tables_are_named_with_what_brings_them(
    empty_database_url: str, kind: tuple[str, str]
) -> None:
    from pgqueue import SchemaMissing

    async def scenario(caller: Caller) -> None:
        with pytest.raises(SchemaMissing, match="pgqueue --app module:queue upgrade"):
            await caller.enqueue(note, 1)
        await caller.do("rollback")
        with pytest.raises(SchemaMissing, match="pgqueue --app module:queue upgrade"):
            await caller.enqueue_many(note, [(1,)])

    with_session(empty_database_url, kind, scenario)


@every_driver
def test_older_tables_are_named_with_what_brings_them_up(
    engine: Engine, kind: tuple[str, str]
) -> None:
    from pgqueue import SchemaTooOld

    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE pgqueue.message_queue RENAME alone TO older"))

    async def scenario(caller: Caller) -> None:
        with pytest.raises(SchemaTooOld, match="pgqueue --app module:queue upgrade"):
            await caller.enqueue(note, 1)

    with_session(engine.url, kind, scenario)
