"""Bad input is refused at enqueue, by every door, with the task, the culprit and the remedy.

Nothing is written, and the transaction of the caller goes on as if it had not been tried.
"""

import asyncio
import io
import math
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from conftest import fresh_database
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgqueue import (
    ArgumentsError,
    Job,
    OptionError,
    PayloadError,
    PgQueue,
    PgQueueError,
    Retry,
    TaskDefinitionError,
    UnknownOption,
    UnknownTask,
)
from pgqueue.errors import NotBound
from pgqueue.statements.tables import CHANNEL

queue = PgQueue()


@queue.task(name="shop.pay")
def pay(order, note: str = "", *, when: datetime | None = None, count: int = 0) -> None: ...  # type: ignore[no-untyped-def]


@queue.task(name="shop.keyed", unique_key=lambda key: key)
def keyed(key: str | int) -> None: ...


@queue.task(name="shop.broken_key", unique_key=lambda key: {"fine": "k"}[key])
def broken_key(key: str) -> None: ...


class Base(DeclarativeBase):
    pass


class Order(Base):
    """A row of the application's own, in the same transaction."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Point:
    x: int


class Hostile:
    """Raises when looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look")

    __str__ = __repr__

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("do not look")


class Text(str):
    """Its own methods lie; what is stored is the text it is."""

    def __str__(self) -> str:
        raise RuntimeError("do not look")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@dataclass(frozen=True)
class Bad:
    """One call that is refused: what it is given, the error, and what the message must say."""

    name: str
    error: type[PgQueueError]
    said: tuple[str, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    task: Any = pay

    def __str__(self) -> str:
        return self.name


def unserialisable(name: str, value: Any) -> Bad:
    said = ("argument order", "must be plain JSON", "convert the value, or annotate")
    return Bad(name, ArgumentsError, said, (value,))


CALLS = [
    Bad("NUL in a text", PayloadError, ("argument order", "NUL", "remove it"), ("a\x00b",)),
    Bad("NUL in a key", PayloadError, ("argument order", "key", "NUL", "remove"), ({"a\0": 1},)),
    Bad("NUL in a str parameter", PayloadError, ("note", "NUL", "remove"), (1, "\0")),
    Bad("lone high surrogate", PayloadError, ("order", "surrogate", "decode"), ("\ud800",)),
    Bad("lone low surrogate", PayloadError, ("order.x[1]", "surrogate"), ({"x": [1, "\udfff"]},)),
    Bad("surrogate in a key", PayloadError, ("order", "surrogate", "decode"), ({"\ud800": 1},)),
    Bad("NaN", PayloadError, ("order", "nan", "pass None"), (math.nan,)),
    Bad("Infinity", PayloadError, ("order[0]", "inf", "pass None"), ([math.inf],)),
    Bad("minus Infinity", PayloadError, ("order.x", "-inf", "pass None"), ({"x": -math.inf},)),
    Bad("a float literal too large", PayloadError, ("order", "inf", "finite"), (1e400,)),
    Bad("5000 digits", PayloadError, ("order", "4,300 digits", "bytes"), (10**5000,)),
    Bad("depth 65", PayloadError, ("order", "64 levels", "flatter"), (nested(65),)),
    Bad("depth 100000", PayloadError, ("order", "64 levels", "flatter"), (nested(100_000),)),
    Bad("a circle", PayloadError, ("order", "contains itself", "flatter"), (circular(),)),
    Bad(
        "256 KiB and a byte",
        PayloadError,
        ("262,145 bytes", "'order'", "pass its id", "max_payload_bytes"),
        ("x" * (262_144 - len('{"order":""}') + 1),),
    ),
    Bad("30 MB", PayloadError, ("'order'", "pass its id"), ("x" * 30_000_000,)),
    Bad("many keys", PayloadError, ("'order'",), (dict.fromkeys(map(str, range(10**5))),)),
    Bad("int keys", ArgumentsError, ("order", "str keys", "convert its keys"), ({1: 1},)),
    unserialisable("Decimal", Decimal(1)),
    unserialisable("date", date(2024, 1, 1)),
    unserialisable("datetime", datetime(2024, 1, 1, tzinfo=UTC)),
    unserialisable("naive datetime without annotation", datetime(2024, 1, 1)),
    unserialisable("UUID", UUID(int=7)),
    unserialisable("bytes", b"x"),
    unserialisable("set", {1}),
    unserialisable("tuple", (1,)),
    unserialisable("generator", (n for n in range(3))),
    unserialisable("lambda", lambda: None),
    unserialisable("open file", io.StringIO()),
    unserialisable("lock", threading.Lock()),
    unserialisable("class", Point),
    unserialisable("dataclass without annotation", Point(1)),
    unserialisable("raises when looked at", Hostile()),
    unserialisable("exception", ValueError("x")),
    Bad("ORM object", ArgumentsError, ("order", "pass its primary key"), (Order(id=1),)),
    Bad("ORM object of ours", ArgumentsError, ("order", "pass its primary key"), (Job(),)),
    Bad(
        "naive datetime",
        PayloadError,
        ("argument when", "naive datetime", "datetime.now(UTC)"),
        (1,),
        {"when": datetime(2024, 1, 1)},
    ),
    Bad("str for int", ArgumentsError, ("count", "must be an int, not str"), (1,), {"count": "1"}),
    Bad("bool for int", ArgumentsError, ("count", "not bool", "convert"), (1,), {"count": True}),
    Bad("float for int", ArgumentsError, ("count", "not float"), (1,), {"count": 1.0}),
    Bad("None for int", ArgumentsError, ("count", "not NoneType"), (1,), {"count": None}),
    Bad("int for str", ArgumentsError, ("argument note", "must be a str, not int"), (1, 2)),
    Bad("missing", ArgumentsError, ("'order'", "(order, note=..., when=..., count=...)")),
    Bad("too many", ArgumentsError, ("too many positional", "its arguments are"), (1, "", 3)),
    Bad("extra", ArgumentsError, ("'colour'", "its arguments are"), (1,), {"colour": 1}),
    Bad("twice", ArgumentsError, ("'order'", "its arguments are"), (1,), {"order": 1}),
    Bad("key not a str", OptionError, ("unique_key gave 7", "must give a str"), (7,), None, keyed),
    Bad("key empty", OptionError, ("unique_key gave ''", "at least one"), ("",), None, keyed),
    Bad(
        "key function raises",
        OptionError,
        ("raised KeyError", "give a str"),
        ("x",),
        None,
        broken_key,
    ),
]

OPTIONS: list[tuple[str, dict[str, Any], type[PgQueueError], str]] = [
    ("unknown option", {"colour": 1}, UnknownOption, "no option 'colour'; known are delay,"),
    ("misspelt option", {"priorty": 1}, UnknownOption, "did you mean 'priority'"),
    ("option of a task", {"timeout": timedelta(1)}, UnknownOption, "'timeout'"),
    ("priority 10", {"priority": 10}, OptionError, "priority is 10; give a whole number from 0"),
    ("priority -1", {"priority": -1}, OptionError, "from 0 to 9"),
    ("priority True", {"priority": True}, OptionError, "from 0 to 9"),
    ("priority text", {"priority": "1"}, OptionError, "from 0 to 9"),
    ("priority 1.5", {"priority": 1.5}, OptionError, "from 0 to 9"),
    ("priority 32768", {"priority": 32_768}, OptionError, "from 0 to 9"),
    ("max_attempts 0", {"max_attempts": 0}, OptionError, "max_attempts is 0; give .* from 1 to"),
    ("max_attempts -1", {"max_attempts": -1}, OptionError, "from 1 to 30000"),
    ("max_attempts 30001", {"max_attempts": 30_001}, OptionError, "from 1 to 30000"),
    ("max_attempts 2**31", {"max_attempts": 2**31}, OptionError, "from 1 to 30000"),
    ("max_attempts None", {"max_attempts": None}, OptionError, "from 1 to 30000"),
    ("delay negative", {"delay": timedelta(seconds=-1)}, OptionError, "delay .* from zero to"),
    ("delay number", {"delay": 5}, OptionError, "delay is 5; give a timedelta"),
    ("delay 1e308", {"delay": 1e308}, OptionError, "give a timedelta"),
    ("delay NaN", {"delay": math.nan}, OptionError, "give a timedelta"),
    ("delay largest", {"delay": timedelta.max}, OptionError, "36525 days"),
    ("run_at naive", {"run_at": datetime(2030, 1, 1)}, OptionError, r"time zone.*now\(UTC\)"),
    ("run_at text", {"run_at": "2030-01-01T00:00:00Z"}, OptionError, "run_at .* give a datetime"),
    ("run_at number", {"run_at": 1e9}, OptionError, "run_at .* give a datetime"),
    ("run_at year 1", {"run_at": datetime(1, 1, 1, tzinfo=UTC)}, OptionError, "2000 to 9999"),
    ("run_at last", {"run_at": datetime.max.replace(tzinfo=UTC)}, OptionError, "2000 to 9999"),
    (
        "delay and run_at",
        {"delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC)},
        OptionError,
        "both delay and run_at",
    ),
    ("unique_key number", {"unique_key": 7}, OptionError, "give a string, a callable or None"),
    ("unique_key bytes", {"unique_key": b"k"}, OptionError, "give a string, a callable or None"),
    ("unique_key empty", {"unique_key": ""}, OptionError, "at least one character, or None"),
    ("unique_key NUL", {"unique_key": "a\0"}, PayloadError, "unique_key .* remove NUL"),
    ("unique_key surrogate", {"unique_key": "\ud800"}, PayloadError, "lone surrogates"),
    ("unique_key of a class", {"unique_key": dict}, TaskDefinitionError, "write it as a lambda"),
    ("unique_key asks", {"unique_key": lambda x: x}, TaskDefinitionError, "'x'.*it may name"),
    *(
        (f"queue {name!r:.20}", {"queue": name}, OptionError, "queue is .* 1 to 64 letters")
        for name in (
            *("", "q" * 65, 'a"b', "a'; DROP TABLE jobs;--", "../x", "a\0b", "mail\u2709"),
            *("mail ", "mail\n", "*", "\ud800", None, 7, b"mail", ["mail"]),
        )
    ),
]


# The doors: each tries to enqueue one call in the caller's session, or is given that session.


def by_enqueue(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.enqueue(session, *args, **kwargs)


def by_many(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.enqueue_many(session, [_row(args, kwargs)])


def by_add(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session.add(task.job(*args, **kwargs))
    session.flush()


def by_delay(_session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.delay(*args, **kwargs)


def by_options(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.options(priority=1, delay=timedelta(days=1)).enqueue(session, *args, **kwargs)


def _row(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call as a row; one that is given both ways is a row of names."""
    return args if not kwargs else {**dict(zip(("order", "note"), args, strict=False)), **kwargs}


GIVEN_TWO_WAYS = [bad for bad in CALLS if bad.name == "twice"]
SYNC_DOORS = (by_enqueue, by_many, by_add, by_delay, by_options)
Door = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]


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


def assert_says(error: PgQueueError, task: str, words: tuple[str, ...]) -> None:
    said = str(error)
    for word in (f"task {task}", *words):
        assert word in said, said
    assert len(said) < 1000, "a message is read by people"


CALLS_BY_ROW = [bad for bad in CALLS if bad not in GIVEN_TWO_WAYS]
"""A row of a batch is a tuple or a dict, never both."""


@pytest.mark.parametrize(
    ("bad", "door"),
    [
        (bad, door)
        for bad in CALLS
        for door in SYNC_DOORS
        if door is not by_many or bad in CALLS_BY_ROW
    ],
)
def test_a_bad_call_is_refused_by_every_door(shared: Engine, bad: Bad, door: Door) -> None:
    with Untouched(shared) as session, pytest.raises(bad.error) as refused:
        door(session, bad.task, bad.args, bad.kwargs or {})

    assert_says(refused.value, bad.task.name, bad.said)


@pytest.mark.parametrize("bad", CALLS_BY_ROW, ids=str)
def test_a_bad_call_is_refused_by_the_async_doors(shared: Engine, bad: Bad) -> None:
    args, kwargs = bad.args, bad.kwargs or {}
    before = contents(shared)

    async def body() -> list[PgQueueError]:
        engine = create_async_engine(shared.url, poolclass=NullPool)
        async with AsyncSession(engine) as session:
            with pytest.raises(bad.error) as one:
                await bad.task.enqueue_async(session, *args, **kwargs)
            with pytest.raises(bad.error) as many:
                await bad.task.enqueue_many_async(session, [_row(args, kwargs), ("fine",)])
            assert await session.scalar(text("SELECT 1")) == 1
            await session.commit()
        return [one.value, many.value]

    one, many = asyncio.run(body())

    assert contents(shared) == before
    assert_says(one, bad.task.name, bad.said)
    assert_says(many, bad.task.name, (*bad.said, "call 0 of the batch"))


AT_THE_EDGES = [(bad, index) for bad in CALLS[:1] for index in (0, 1, 499, 500, 999, 1000, 10_000)]


@pytest.mark.parametrize(("bad", "index"), [*AT_THE_EDGES, *((bad, 2) for bad in CALLS_BY_ROW[1:])])
def test_a_bad_row_of_a_batch_is_named_by_its_index(shared: Engine, bad: Bad, index: int) -> None:
    rows = [*[("fine",)] * index, _row(bad.args, bad.kwargs or {}), ("fine",)]

    with Untouched(shared) as session, pytest.raises(bad.error) as refused:
        bad.task.enqueue_many(session, iter(rows))

    assert_says(refused.value, bad.task.name, (*bad.said, f"call {index} of the batch"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (5, "the rows of enqueue_many are int; give a list"),
        (None, "the rows of enqueue_many are NoneType; give a list"),
        ("ab", "row 0 of enqueue_many is str; give a tuple"),
        ({"order": 1}, "row 0 of enqueue_many is str; give a tuple"),
        ([(1,), [2]], "row 1 of enqueue_many is list; give a tuple"),
        ([(1,), 7], "row 1 of enqueue_many is int; give a tuple"),
        ([(1,), None], "row 1 of enqueue_many is NoneType; give a tuple"),
    ],
)
def test_rows_that_are_no_rows_are_refused(shared: Engine, rows: Any, said: str) -> None:
    with (
        Untouched(shared) as session,
        pytest.raises(ArgumentsError, match=f"task shop.pay: {said}"),
    ):
        pay.enqueue_many(session, rows)


@pytest.mark.parametrize(
    ("given", "error", "said"), [each[1:] for each in OPTIONS], ids=[each[0] for each in OPTIONS]
)
def test_a_bad_option_is_refused_before_there_is_a_door(
    shared: Engine, given: dict[str, Any], error: type[PgQueueError], said: str
) -> None:
    with Untouched(shared) as session, pytest.raises(error, match=f"task shop.pay: .*{said}"):
        pay.options(**given).enqueue(session, 1)


def plain(n: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        *((each[1], each[2], each[3]) for each in OPTIONS if each[1].keys() <= {"priority"}),
        *((each[1], each[2], each[3]) for each in OPTIONS if each[1].keys() <= {"queue"}),
        *((each[1], each[2], each[3]) for each in OPTIONS if each[1].keys() <= {"max_attempts"}),
        ({"colour": 1}, UnknownOption, "no option 'colour'"),
        ({"delay": timedelta(1)}, UnknownOption, "no option 'delay'"),
        ({"max_attempt": 1}, UnknownOption, "did you mean 'max_attempts'"),
        ({"timeout": timedelta(0)}, OptionError, "timeout .* above zero, or None"),
        ({"timeout": timedelta(-1)}, OptionError, "timeout .* above zero, or None"),
        ({"timeout": 30}, OptionError, "timeout is 30; give a timedelta"),
        ({"timeout": math.inf}, OptionError, "give a timedelta"),
        ({"retry": 3}, OptionError, "retry is 3; give a Retry"),
        ({"retry": Retry}, OptionError, "give a Retry"),
        ({"transactional": 1}, OptionError, "give True or False"),
        ({"unique_key": 7}, OptionError, "give a string, a callable or None"),
        ({"unique_key": ""}, OptionError, "at least one character"),
        ({"unique_key": lambda user: "k"}, TaskDefinitionError, "asks for 'user'.*may name n"),
    ],
)
def test_a_bad_option_is_refused_where_the_task_is_declared(
    given: dict[str, Any], error: type[PgQueueError], said: str
) -> None:
    own = PgQueue()

    with pytest.raises(error, match=rf"task \S*plain: .*{said}"):
        own.task(**given)(plain)

    assert own.tasks == {}


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\n", "x" * 201, "x" * 10_000, "a\0", "\ud800", None, 7, b"x"]
)
def test_a_name_that_cannot_be_stored_is_refused_where_the_task_is_declared(name: Any) -> None:
    with pytest.raises(
        OptionError, match=r"the name of a task is .*; use 1 to 200 char"
    ) as refused:
        PgQueue().task(name=name)(plain)

    assert len(str(refused.value)) < 300


def _session_without_type(session, order_id: int) -> None: ...  # type: ignore[no-untyped-def]
def _context_without_type(ctx, order_id: int) -> None: ...  # type: ignore[no-untyped-def]
def _async_session_without_type(async_session, n: int) -> None: ...  # type: ignore[no-untyped-def]
def _context_after_session(session: Session, ctx, n: int) -> None: ...  # type: ignore[no-untyped-def]
def _session_later(n: int, session: Session) -> None: ...
def _anything(*args: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_session_without_type, "'session' has no annotation.*write `session: Session`"),
        (_context_without_type, "'ctx' has no annotation.*write `ctx: JobContext`"),
        (_async_session_without_type, "write `async_session: AsyncSession`"),
        (_context_after_session, "'ctx' has no annotation.*write `ctx: JobContext`"),
        (_session_later, "'session' is a Session.*move it to the front"),
        (_anything, "'args' takes any number of arguments: take a list"),
        (Point, "cannot be made a task: decorate a function"),
        (7, "cannot be made a task: decorate a function"),
        (pay, "cannot be made a task: decorate a function"),
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


class TestSessions:
    """What is given as the session, and is none."""

    @pytest.mark.parametrize("door", [by_enqueue, by_many], ids=lambda door: door.__name__)
    @pytest.mark.parametrize(
        "wrong",
        ["None", "int", "Engine", "Connection", "AsyncSession", "sessionmaker", "the class"],
    )
    def test_it_is_named_with_the_right_one(self, shared: Engine, wrong: str, door: Door) -> None:
        from sqlalchemy.orm import sessionmaker

        given: dict[str, Any] = {
            "None": lambda: None,
            "int": lambda: 7,
            "Engine": lambda: shared,
            "Connection": shared.connect,
            "AsyncSession": AsyncSession,
            "sessionmaker": lambda: sessionmaker(shared),
            "the class": lambda: Session,
        }
        session = given[wrong]()

        with Untouched(shared), pytest.raises(ArgumentsError) as refused:
            door(session, pay, (1,), {})

        named = "the class Session" if wrong == "the class" else type(session).__name__
        words = ("first argument is the Session", f"not {named}", "_async", "delay(...)")
        assert_says(refused.value, "shop.pay", words)
        if wrong == "Connection":
            session.close()

    @pytest.mark.parametrize("wrong", ["None", "Session", "async_sessionmaker"])
    def test_an_async_door_names_the_right_one(self, shared: Engine, wrong: str) -> None:
        from sqlalchemy.ext.asyncio import async_sessionmaker

        given = {
            "None": None,
            "Session": Session(shared),
            "async_sessionmaker": async_sessionmaker(),
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
    def test_one_without_an_engine_for_jobs_is_named(self, shared: Engine, door: Door) -> None:
        said = r"task shop.pay: .* \{Job: engine\}"
        with Session(binds={Order: shared}) as session, pytest.raises(NotBound, match=said):
            door(session, pay, (1,), {})

    @pytest.mark.parametrize("door", [by_enqueue, by_many], ids=lambda door: door.__name__)
    def test_one_on_another_database_is_named(self, door: Door) -> None:
        said = r"task shop.pay: .* sqlite, .* PostgreSQL"
        elsewhere = Session(create_engine("sqlite://"))
        with elsewhere as session, pytest.raises(ArgumentsError, match=said):
            door(session, pay, (1,), {})


@pytest.mark.parametrize("limit", [0, -1, 1023, 2**25, 10**6 + 0.5, "1", None, True])
def test_a_payload_limit_that_makes_no_sense_is_refused(limit: Any) -> None:
    with pytest.raises(OptionError, match=r"max_payload_bytes is .* from 1024 to 16777216"):
        PgQueue(max_payload_bytes=limit)


class TestAccepted:
    """What only looks bad."""

    @pytest.mark.parametrize(
        "value",
        [
            *("\U0001f600", "\uffff\u2028\ufeff", "<script>alert(1)</script>", "\x1b[31m\u202e"),
            *("=cmd|' /C calc'!A0", "a\r\nERROR forged", "%s {0} $1 ; --", "\\u0000", "\\", ""),
            *(2**53 + 1, 10**400, -(2**63), 0, -0.0, True, None, {}, [], 0.1),
            {"__proto__": 1, "constructor": 2, "__class__": "os.system"},
            {"py/object": "os.system", "!!python/object": "x"},
            nested(64),
        ],
        ids=lambda value: f"{type(value).__name__} {value!a:.20}",
    )
    def test_it_comes_back_as_it_went_in(self, shared: Engine, value: Any) -> None:
        with Session(shared) as session:
            added = pay.job(value)
            session.add(added)
            session.flush()
            ids = [pay.enqueue(session, value).id, *pay.enqueue_many(session, [(value,)]), added.id]
            stored = "SELECT args::text FROM pgqueue.jobs WHERE id = ANY(:ids)"
            texts = session.scalars(text(stored), {"ids": ids}).all()
            session.rollback()

        assert [pay.payload.loads(each) for each in texts] == [{"order": value}] * 3

    def test_a_text_that_lies_about_itself_is_the_text_it_is(self, shared: Engine) -> None:
        with Session(shared) as session:
            assert pay.enqueue(session, Text("fine")).args == {"order": "fine"}
            session.rollback()

    def test_queues_that_differ_by_case_are_two(self, shared: Engine) -> None:
        with Session(shared) as session:
            first = keyed.options(queue="mail").enqueue(session, "k")
            second = keyed.options(queue="Mail").enqueue(session, "k")
            session.rollback()

        assert first is not second

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


def test_no_queue_is_named_in_the_channel_of_the_wake_ups() -> None:
    # LISTEN cuts a name at 63 bytes without a word, and is where names become statements.
    assert re.fullmatch("pgqueue_[0-9a-f]{8}", CHANNEL)
