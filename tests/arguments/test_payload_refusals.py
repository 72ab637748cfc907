"""What cannot be stored is refused before anything is written, with a remedy."""

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, Literal, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from payloads import payload_for, travelled, written

from pgqueue.arguments import MAX_DEPTH, MAX_PAYLOAD_BYTES
from pgqueue.errors import ArgumentsError, PayloadError


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


class Pretender:
    """Says it is a str, as a lazy proxy does."""

    @property  # type: ignore[misc]  # mypy wants __class__ to be the class it is
    def __class__(self) -> type[str]:  # type: ignore[override]
        return str


class Suit(Enum):
    HEARTS = "hearts"


class Level(IntEnum):
    LOW = 1


@dataclass
class Line:
    price: float


@dataclass
class Order:
    lines: list[Line]
    parent: "Order | None" = None
    broken: Any = field(default=None)


@dataclass
class Premium(Line):
    bonus: int = 0


class Address(TypedDict):
    street: str


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, "1"),
        (int, 1.0),
        (int, True),
        (int, None),
        (float, "1"),
        (float, True),
        (float, Decimal("1.5")),
        (str, 1),
        (str, b"x"),
        (bool, 1),
        (list[int], (1,)),
        (list[int], "12"),
        (tuple[int, ...], [1]),
        (tuple[int, int], [1, 2]),
        (set[int], [1]),
        (frozenset[int], {1}),
        (dict[str, int], [("a", 1)]),
        (dict[str, int], {1: 1}),
        (UUID, "00000000-0000-0000-0000-000000000007"),
        (datetime, date(2024, 1, 1)),
        (date, datetime(2024, 1, 1, tzinfo=UTC)),
        (Decimal, 1.5),
        (bytes, bytearray(b"x")),
        (Suit, "hearts"),
        (Level, 1),
        (Literal["a"], "b"),
        (Literal[1], True),
        (Literal["a"], []),
        (int | str, 1.5),
        (int | None, "x"),
        (Line, {"price": 1.0}),
        (Line, Premium(1.0)),
        (Address, [("street", "x")]),
    ],
)
def test_a_wrong_type_is_refused_and_both_types_are_named(annotation: Any, value: Any) -> None:
    with pytest.raises(ArgumentsError, match=r"task mail.welcome: argument value must "):
        written(payload_for(annotation), value)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (datetime, datetime(2024, 1, 1), "naive datetime.*datetime.now\\(UTC\\)"),
        (time, time(4, tzinfo=ZoneInfo("Europe/Berlin")), "pass a datetime"),
        (Decimal, Decimal("NaN"), "finite"),
        (Decimal, Decimal("-Infinity"), "finite"),
        (float, 2**53 + 1, "annotate the parameter as int"),
        (float, 10**400, "annotate the parameter as int"),
        (tuple[int, int], (1, 2, 3), "value is a tuple that is longer"),
        (tuple[int, int], (1,), r"value\[1\] is missing: the tuple is shorter"),
        (tuple[()], (1,), "value is a tuple that is longer"),
        (Address, {"street": "x", "town": "y"}, "'town'"),
        (Address, {}, "'street'"),
        (UUID | str, "00000000-0000-0000-0000-000000000007", "would come back as a UUID"),
        (list[str], ["fine", "a\0b"], r"argument value\[1\] holds a NUL"),
        (dict[str, str], {"a b": "\ud800"}, r"argument value\['a b'\] holds half a surrogate"),
    ],
)
def test_a_bad_value_of_the_right_type_is_refused_with_a_remedy(
    annotation: Any, value: Any, said: str
) -> None:
    with pytest.raises(PayloadError, match=said):
        written(payload_for(annotation), value)


def test_a_refusal_names_the_path_to_the_value() -> None:
    order: Any = Order([Line(1.0), Line("2")])  # type: ignore[arg-type]  # the mistake under test

    with pytest.raises(ArgumentsError, match=r"argument value\.lines\[1\]\.price must be a float"):
        written(payload_for(Order), order)


def test_a_dataclass_that_contains_itself_is_refused() -> None:
    order = Order([])
    order.parent = order

    with pytest.raises(PayloadError, match="contains itself"):
        written(payload_for(Order), order)


def test_depth_is_counted_through_every_type() -> None:
    order = Order([], broken=nested(MAX_DEPTH - 1))
    deeper = Order([], broken=nested(MAX_DEPTH))

    assert travelled(Order, order) == order
    with pytest.raises(PayloadError, match="deeper"):
        written(payload_for(Order), deeper)


def test_an_attribute_that_raises_is_a_refusal_not_a_foreign_error() -> None:
    line = Line(1.0)
    del line.price

    with pytest.raises(PayloadError, match="looking at it raised AttributeError"):
        written(payload_for(Line), line)


@dataclass
class Ended:
    price: float

    def __getattribute__(self, name: str) -> Any:
        if name == "price":
            raise StopIteration
        return super().__getattribute__(name)


def test_an_item_that_raises_stop_iteration_does_not_end_its_list() -> None:
    with pytest.raises(PayloadError, match="looking at it raised StopIteration"):
        written(payload_for(list[Ended]), [Ended(1.0), Ended(2.0)])


class Raising:
    @property  # type: ignore[misc]  # mypy wants __class__ to be the class it is
    def __class__(self) -> type[str]:  # type: ignore[override]
        raise ValueError("a secret")


@pytest.mark.parametrize(
    ("annotation", "value", "cause"),
    [
        (int, "a secret", type(None)),
        (list[UUID], ["a secret"], type(None)),
        (UUID | int, "a secret", type(None)),
        (Suit | None, "a secret", type(None)),
        (Line, Line("a secret"), type(None)),  # type: ignore[arg-type]  # the mistake under test
        (Any, Raising, ValueError),
        (UUID, Raising, ValueError),
    ],
)
def test_a_refusal_does_not_show_the_value(annotation: Any, value: Any, cause: Any) -> None:
    given = Raising() if value is Raising else value

    with pytest.raises((ArgumentsError, PayloadError)) as refused:
        written(payload_for(annotation), given)

    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__
    assert type(refused.value.__cause__) is cause


def test_a_value_that_lies_about_its_class_is_refused() -> None:
    with pytest.raises(ArgumentsError, match="must be a str, not Pretender"):
        written(payload_for(str), Pretender())


def test_a_payload_may_be_exactly_as_large_as_the_limit() -> None:
    payload = payload_for(str)
    frame = len('{"value":""}')

    fits = written(payload, "x" * (MAX_PAYLOAD_BYTES - frame))

    assert len(fits) == MAX_PAYLOAD_BYTES
    with pytest.raises(PayloadError, match=r"262,145 bytes .* 262,144; the largest is 'value'"):
        written(payload, "x" * (MAX_PAYLOAD_BYTES - frame + 1))


def test_the_size_limit_can_be_given() -> None:
    with pytest.raises(PayloadError, match="over the limit of 10"):
        payload_for(str).dumps({"value": "x"}, max_bytes=10)
