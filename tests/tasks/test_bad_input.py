"""Bad input is refused at enqueue, by every door, with the task, the culprit and the remedy.

Nothing is written, and the transaction of the caller goes on as if it had not been tried.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from bad_calls import (
    ACCEPTED,
    CALLS,
    SYNC_DOORS,
    Bad,
    Base,
    Door,
    Order,
    Point,
    Text,
    assert_says,
    by_enqueue,
    by_many,
    keyed,
    pay,
    plain,
    queue,
    row_of,
)
from bad_options import DECLARED, OPTIONS
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import (
    ArgumentsError,
    OptionError,
    PgQueue,
    PgQueueError,
    TaskDefinitionError,
    UnknownTask,
)
from pgqueue.errors import NotBound
from pgqueue.testing.databases import fresh_database


@pytest.fixture(scope="module")
def shared_url(server_url: str, template_url: str) -> Iterator[str]:
    """One database for all of them: none may write to it anything but orders."""
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url, poolclass=NullPool)
        Base.metadata.create_all(engine)
        queue.bind(engine)
        yield url
        written = {name for name, count in contents(engine).items() if count}
        assert written == {"schema_version", "alembic_version"}
        queue._sessions = None


@pytest.fixture(scope="module")
def shared(shared_url: str) -> Iterator[Engine]:
    engine = create_engine(shared_url)
    yield engine
    engine.dispose()


def contents(engine: Engine) -> dict[str, int]:
    """How many rows there are in each table of ours."""
    with engine.connect() as connection:
        named = "SELECT tablename FROM pg_tables WHERE schemaname = 'pgqueue'"
        tables = connection.scalars(text(named)).all()
        counts = "SELECT count(*) FROM pgqueue.{}"
        return {name: connection.scalar(text(counts.format(name))) or 0 for name in tables}


ONE_OF_EACH = [bad for bad in CALLS if bad.name in ("NUL in a text", "missing", "key empty")]
"""Of what is refused by the arguments, by the signature and by an option."""


class Untouched:
    """A session with rows flushed and pending, which an error in the block must not disturb."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __enter__(self) -> Session:
        self.before = contents(self.engine)
        self.session = Session(self.engine)
        self.first, self.last = self._next_ids()
        self.session.add(Order(id=self.first))
        self.session.flush()
        self.session.add(Order(id=self.last))
        return self.session

    def __exit__(self, kind: Any, error: Any, _traceback: Any) -> None:
        if error is None:
            assert self.session.execute(text("SELECT 1")).scalar() == 1
            self.session.commit()
            found = self.session.query(Order).filter(Order.id.in_([self.first, self.last])).count()
            assert found == 2
            assert contents(self.engine) == self.before
        self.session.close()

    def _next_ids(self) -> tuple[int, int]:
        last = self.session.scalar(text("SELECT coalesce(max(id), 0) FROM orders"))
        assert last is not None
        return last + 1, last + 2


@pytest.mark.parametrize("bad", CALLS, ids=str)
def test_a_bad_call_is_refused(shared: Engine, bad: Bad) -> None:
    with Untouched(shared) as session, pytest.raises(bad.error) as refused:
        by_enqueue(session, bad.task, bad.args, bad.kwargs or {})

    assert_says(refused.value, bad.task.name, bad.said)


@pytest.mark.parametrize("door", SYNC_DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("bad", ONE_OF_EACH, ids=str)
def test_every_door_refuses_a_bad_call(shared: Engine, bad: Bad, door: Door) -> None:
    with Untouched(shared) as session, pytest.raises(bad.error) as refused:
        door(session, bad.task, bad.args, bad.kwargs or {})

    assert_says(refused.value, bad.task.name, bad.said)


@pytest.mark.parametrize("bad", ONE_OF_EACH, ids=str)
def test_a_bad_call_is_refused_by_the_async_doors(shared: Engine, bad: Bad) -> None:
    args, kwargs = bad.args, bad.kwargs or {}
    before = contents(shared)

    async def body() -> list[PgQueueError]:
        engine = create_async_engine(shared.url, poolclass=NullPool)
        async with AsyncSession(engine) as session:
            with pytest.raises(bad.error) as one:
                await bad.task.enqueue_async(session, *args, **kwargs)
            with pytest.raises(bad.error) as many:
                await bad.task.enqueue_many_async(session, [row_of(args, kwargs), ("fine",)])
            assert await session.scalar(text("SELECT 1")) == 1
            await session.commit()
        return [one.value, many.value]

    one, many = asyncio.run(body())

    assert contents(shared) == before
    assert_says(one, bad.task.name, bad.said)
    assert_says(many, bad.task.name, (*bad.said, "call 0 of the batch"))


@pytest.mark.parametrize("index", [0, 999, 1000, 10_000])
def test_a_bad_row_of_a_batch_is_named_by_its_index(shared: Engine, index: int) -> None:
    bad = ONE_OF_EACH[0]
    rows = [*[("fine",)] * index, row_of(bad.args, bad.kwargs or {}), ("fine",)]

    with Untouched(shared) as session, pytest.raises(bad.error) as refused:
        bad.task.enqueue_many(session, iter(rows))

    assert_says(refused.value, bad.task.name, (*bad.said, f"call {index} of the batch"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (5, "the rows of enqueue_many are int; give a list"),
        ("ab", "row 0 of enqueue_many is str; give a tuple"),
        ([(1,), [2]], "row 1 of enqueue_many is list; give a tuple"),
    ],
)
def test_rows_that_are_no_rows_are_refused(shared: Engine, rows: Any, said: str) -> None:
    with (
        Untouched(shared) as session,
        pytest.raises(ArgumentsError, match=f"task shop.pay: {said}"),
    ):
        pay.enqueue_many(session, rows)


def test_a_bad_option_is_refused_before_there_is_a_door(shared: Engine) -> None:
    with Untouched(shared) as session:
        for _name, given, error, said in OPTIONS:
            with pytest.raises(error, match=f"task shop.pay: .*{said}"):
                pay.options(**given).enqueue(session, 1)


def test_a_bad_option_is_refused_where_the_task_is_declared() -> None:
    own = PgQueue()
    of_both = {"priority", "queue", "max_attempts"}

    for _name, given, error, said in [*(o for o in OPTIONS if o[1].keys() <= of_both), *DECLARED]:
        with pytest.raises(error, match=rf"task \S*plain: .*{said}"):
            own.task(**given)(plain)

    assert own.tasks == {}


def test_a_name_that_cannot_be_stored_is_refused_where_the_task_is_declared() -> None:
    names: list[Any] = ["", " ", "a b", "a\n", "x" * 201, "a\0", "\ud800", None, 7, b"x"]
    for name in names:
        with pytest.raises(
            OptionError, match=r"the name of a task is .*; use 1 to 200 char"
        ) as refused:
            PgQueue().task(name=name)(plain)

        assert len(str(refused.value)) < 300


def _session_without_type(session, order_id: int) -> None: ...  # type: ignore[no-untyped-def]
def _context_without_type(ctx, order_id: int) -> None: ...  # type: ignore[no-untyped-def]
def _async_session_without_type(async_session, n: int) -> None: ...  # type: ignore[no-untyped-def]
def _context_after_session(session: Session, ctx, n: int) -> None: ...  # type: ignore[no-untyped-def]
def _rows() -> Iterator[int]:
    yield 1


async def _async_rows() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_session_without_type, "'session' has no annotation.*write `session: Session`"),
        (_context_without_type, "'ctx' has no annotation.*write `ctx: JobContext`"),
        (_async_session_without_type, "write `async_session: AsyncSession`"),
        (_context_after_session, "'ctx' has no annotation.*write `ctx: JobContext`"),
        (Point, "cannot be made a task: decorate a function"),
        (7, "cannot be made a task: decorate a function"),
        (pay, "cannot be made a task: decorate a function"),
        (functools.partial(plain, 1), "is no function, as a functools.partial is none; decorate a"),
        (_rows, "uses `yield`.*decorate a function that iterates"),
        (_async_rows, "uses `yield`.*decorate a function that iterates"),
    ],
)
def test_a_function_that_cannot_be_a_task_is_refused_where_it_is_declared(
    function: Any, said: str
) -> None:
    with pytest.raises(TaskDefinitionError, match=said):
        PgQueue().task(function)


def test_a_parameter_named_session_with_a_type_is_an_argument(shared: Engine) -> None:
    @PgQueue().task
    def log_in(session: str) -> None: ...

    with Session(shared) as session:
        assert log_in.enqueue(session, "s-1").args == {"session": "s-1"}


def test_an_unknown_task_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UnknownTask, match=r"no task 'os.system' .*known are shop.broken_key, "):
        queue.find("os.system")
    with pytest.raises(UnknownTask, match=r"no module with tasks is imported; .* by --app"):
        PgQueue().find("os.system")


class TestSessions:
    """What is given as the session, and is none."""

    @pytest.mark.parametrize("door", [by_enqueue, by_many], ids=lambda door: door.__name__)
    @pytest.mark.parametrize("wrong", ["None", "Engine", "AsyncSession", "the class"])
    def test_a_wrong_session_is_named_with_the_right_one(
        self, shared: Engine, wrong: str, door: Door
    ) -> None:
        given: dict[str, Any] = {
            "None": lambda: None,
            "Engine": lambda: shared,
            "AsyncSession": AsyncSession,
            "the class": lambda: Session,
        }
        session = given[wrong]()

        with Untouched(shared), pytest.raises(ArgumentsError) as refused:
            door(session, pay, (1,), {})

        named = "the class Session" if wrong == "the class" else type(session).__name__
        words = ("first argument is the Session", f"not {named}", "_async", "delay(...)")
        assert_says(refused.value, "shop.pay", words)

    @pytest.mark.parametrize("wrong", ["None", "Session"])
    def test_an_async_door_names_the_right_one(self, shared: Engine, wrong: str) -> None:
        given = {
            "None": None,
            "Session": Session(shared),
        }
        session: Any = given[wrong]
        words = ("first argument is the AsyncSession", f"not {type(session).__name__}", "_async")

        with pytest.raises(ArgumentsError) as one:
            asyncio.run(pay.enqueue_async(session, 1))
        with pytest.raises(ArgumentsError) as many:
            asyncio.run(pay.enqueue_many_async(session, [(1,)]))

        assert_says(one.value, "shop.pay", words)
        assert_says(many.value, "shop.pay", words)

    @pytest.mark.parametrize("door", [by_enqueue, by_many], ids=lambda door: door.__name__)
    def test_a_session_without_an_engine_for_jobs_is_named(
        self, shared: Engine, door: Door
    ) -> None:
        said = r"task shop.pay: .* \{Job: engine\}"
        with Session(binds={Order: shared}) as session, pytest.raises(NotBound, match=said):
            door(session, pay, (1,), {})

    @pytest.mark.parametrize("door", [by_enqueue, by_many], ids=lambda door: door.__name__)
    def test_a_session_on_another_database_is_named(self, door: Door) -> None:
        said = r"task shop.pay: .* sqlite, .* PostgreSQL"
        elsewhere = Session(create_engine("sqlite://"))
        with elsewhere as session, pytest.raises(ArgumentsError, match=said):
            door(session, pay, (1,), {})


@pytest.mark.parametrize("limit", [1023, 2**25, 10**6 + 0.5, True])
def test_a_payload_limit_that_makes_no_sense_is_refused(limit: Any) -> None:
    with pytest.raises(OptionError, match=r"max_payload_bytes is .* from 1024 to 16777216"):
        PgQueue(max_payload_bytes=limit)


class TestAccepted:
    """What only looks bad."""

    def test_an_accepted_value_comes_back_as_it_went_in(self, shared: Engine) -> None:
        stored = text("SELECT args::text FROM pgqueue.jobs WHERE id = ANY(:ids)")
        with Session(shared) as session:
            for value in ACCEPTED.values():
                added = pay.job(value)
                session.add(added)
                session.flush()
                many = pay.enqueue_many(session, [(value,)])
                ids = [pay.enqueue(session, value).id, *many, added.id]

                texts = session.scalars(stored, {"ids": ids}).all()

                assert [pay.payload.loads(each) for each in texts] == [{"order": value}] * 3
            session.rollback()

    def test_a_text_that_lies_about_itself_is_the_text_it_is(self, shared: Engine) -> None:
        with Session(shared) as session:
            assert pay.enqueue(session, Text("fine")).args == {"order": "fine"}
            session.rollback()

    def test_a_key_of_a_megabyte_is_a_key(self, shared: Engine) -> None:
        with Session(shared) as session:
            first, second = (keyed.enqueue(session, "k" * 2**17 + end) for end in "ab")
            assert first is not second
            assert keyed.enqueue(session, "k" * 2**17 + "a") is first
            session.rollback()

    def test_a_key_with_other_arguments_is_that_of_the_job_that_holds_it(
        self, shared: Engine
    ) -> None:
        with Session(shared) as session:
            first = pay.options(unique_key="k").enqueue(session, 1)
            assert pay.options(unique_key="k").enqueue(session, 2) is first
            assert first.args == {"order": 1}
            session.rollback()
