"""What must not be enqueued, what only looks so, and the doors at which each is tried."""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgqueue import (
    ArgumentsError,
    Job,
    OptionError,
    PayloadError,
    PgQueue,
    PgQueueError,
)

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


def plain(n: int = 0) -> None: ...


class Suit(Enum):
    HEARTS = "hearts"


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
    Bad("bytes and not letters", PayloadError, ("'order'", "pass its id"), ("é" * 131_072,)),
    Bad("30 MB", PayloadError, ("'order'", "pass its id"), ("x" * 30_000_000,)),
    Bad("many keys", PayloadError, ("'order'",), (dict.fromkeys(map(str, range(10**5))),)),
    Bad("int keys", ArgumentsError, ("order", "str keys", "convert its keys"), ({1: 1},)),
    unserialisable("Decimal", Decimal(1)),
    unserialisable("bytes", b"x"),
    unserialisable("tuple", (1,)),
    unserialisable("lock", threading.Lock()),
    unserialisable("class", Point),
    unserialisable("raises when looked at", Hostile()),
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
        ("raised KeyError", "return a str"),
        ("x",),
        None,
        broken_key,
    ),
]

ACCEPTED: dict[str, Any] = {
    "astral pair": "\U0001f600",
    "U+FFFF, U+2028 and BOM": "\uffff\u2028\ufeff",
    "HTML": "<script>alert(1)</script>",
    "ANSI and RTL": "\x1b[31m\u202e",
    "formula": "=cmd|' /C calc'!A0",
    "forged log line": "a\r\nERROR forged",
    "placeholders": "%s {0} $1 ; --",
    "escape in words": "\\u0000",
    "backslash": "\\",
    "empty text": "",
    "2**53 + 1": 2**53 + 1,
    "10**400": 10**400,
    "least bigint": -(2**63),
    "zero": 0,
    "minus zero": -0.0,
    "True": True,
    "None": None,
    "empty dict": {},
    "empty list": [],
    "a tenth": 0.1,
    "keys of JavaScript and Python": {"__proto__": 1, "constructor": 2, "__class__": "os.system"},
    "pickles in words": {"py/object": "os.system", "!!python/object": "x"},
    "depth 64": nested(64),
}
"""What only looks bad: it comes out as it went in."""

# The doors: each tries to enqueue one call in the caller's session, or is given that session.


def by_enqueue(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.enqueue(session, *args, **kwargs)


def by_many(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.enqueue_many(session, [row_of(args, kwargs)])


def by_add(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session.add(task.job(*args, **kwargs))
    session.flush()


def by_delay(_session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.delay(*args, **kwargs)


def by_options(session: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    task.options(priority=1, delay=timedelta(days=1)).enqueue(session, *args, **kwargs)


def row_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call as a row; one that is given both ways is a row of names."""
    return args if not kwargs else {**dict(zip(("order", "note"), args, strict=False)), **kwargs}


Door = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]
SYNC_DOORS: tuple[Door, ...] = (by_enqueue, by_many, by_add, by_delay, by_options)


def assert_says(error: PgQueueError, task: str, words: tuple[str, ...]) -> None:
    said = str(error)
    for word in (f"task {task}", *words):
        assert word in said, said
    assert len(said) < 1000, "a message is read by people"
