"""Arguments go in as a call and come out as the handler's keyword arguments."""

import enum
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal, NewType, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from payloads import Access, Address, Basket, Colour, Item, payload_for, travelled, written

UserId = NewType("UserId", int)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=15,
)
# One that its zone has twice equals none of another zone, be it the same moment (PEP 495).
moments = st.datetimes(timezones=st.timezones() | st.just(UTC), allow_imaginary=False).filter(
    lambda moment: moment == moment.astimezone(UTC)
)
durations = st.timedeltas()
decimals = st.decimals(allow_nan=False, allow_infinity=False)
items = st.builds(Item, text, decimals, st.frozensets(text, max_size=3))
baskets = st.builds(Basket, st.lists(items, max_size=3), st.none() | moments)


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (str, text),
        (int, st.integers()),
        (float, st.floats(allow_nan=False, allow_infinity=False)),
        (UUID, st.uuids()),
        (date, st.dates()),
        (time, st.times()),
        (timedelta, durations),
        (Decimal, decimals),
        (bytes, st.binary()),
        (Colour, st.sampled_from(Colour)),
        (Access, st.sampled_from([Access.READ, Access.READ | Access.WRITE, Access(0)])),
        (list[UUID], st.lists(st.uuids(), max_size=4)),
        (dict[str, Decimal], st.dictionaries(text, decimals, max_size=4)),
        (tuple[int, str], st.tuples(st.integers(), text)),
        (tuple[date, ...], st.lists(st.dates(), max_size=4).map(tuple)),
        (set[int], st.sets(st.integers(), max_size=4)),
        (frozenset[date], st.frozensets(st.dates(), max_size=4)),
        (int | None, st.none() | st.integers()),
        (UUID | int | None, st.none() | st.integers() | st.uuids()),
        (Literal["a", 1, True, None], st.sampled_from(["a", 1, True, None])),
        (Item, items),
        (list[Basket], st.lists(baskets, max_size=2)),
    ],
    ids=lambda part: None if isinstance(part, st.SearchStrategy) else str(part),
)
def test_a_value_comes_back_as_it_went_in(annotation: Any, values: Any) -> None:
    payload = payload_for(annotation)

    @given(values)
    def comes_back(value: Any) -> None:
        returned = payload.loads(written(payload, value))["value"]

        assert returned == value
        assert type(returned) is type(value)

    comes_back()


@given(plain)
def test_a_plain_value_comes_back_equal(value: Any) -> None:
    assert travelled(Any, value) == value


@given(moments)
def test_a_datetime_comes_back_as_the_same_instant(moment: datetime) -> None:
    returned = travelled(datetime, moment)

    assert returned.utcoffset() == moment.utcoffset()
    assert returned.replace(tzinfo=None) == moment.replace(tzinfo=None)


def test_an_int_for_a_float_is_stored_as_a_float() -> None:
    assert written(payload_for(float), 3) == '{"value":3.0}'


@pytest.mark.parametrize(
    ("annotation", "stored", "value"),
    [
        (float, "10000000000000000", 1e16),
        (timedelta, '"PT1H30M"', timedelta(minutes=90)),
        (datetime, '"2024-02-03T04:05:00Z"', datetime(2024, 2, 3, 4, 5, tzinfo=UTC)),
        (Item, '{"name": "x", "price": "1"}', Item("x", Decimal(1))),
    ],
)
def test_what_postgresql_or_people_write_is_read_too(
    annotation: Any, stored: str, value: Any
) -> None:
    assert payload_for(annotation).loads(f'{{"value": {stored}}}\n') == {"value": value}


@pytest.mark.parametrize("annotation", [Any, list[Any], int | float, float | int | None])
def test_a_float_that_postgresql_writes_without_its_point_keeps_its_value(annotation: Any) -> None:
    number = 7.205759403792138e16  # jsonb would write 72057594037921380, another number
    value: Any = [number] if annotation == list[Any] else number

    returned = travelled(annotation, value)

    assert returned == value
    assert str(number) not in written(payload_for(annotation), value)


def test_a_key_given_twice_counts_as_its_last() -> None:
    assert payload_for(int).loads('{"value": 1, "value": 2}') == {"value": 2}


def test_a_typed_dict_may_leave_out_what_is_not_required() -> None:
    assert travelled(Address, {"street": "x"}) == {"street": "x"}
    assert travelled(Address, {"street": "x", "moved_at": date(2024, 1, 1)}) == {
        "street": "x",
        "moved_at": date(2024, 1, 1),
    }


def test_the_member_of_a_union_is_found_again() -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC)

    assert travelled(datetime | date, moment) == moment
    assert travelled(datetime | date, date(2024, 1, 1)) == date(2024, 1, 1)
    assert travelled(UUID | str, "not a uuid") == "not a uuid"
    assert type(travelled(float | int, 3)) is int
    assert travelled(Address | Town, {"town": "x"}) == {"town": "x"}


class Town(TypedDict):
    town: str


class Text(str):
    def __str__(self) -> str:
        raise RuntimeError("foreign code")


class Number(enum.IntEnum):
    ONE = 1


class Pairs(dict[str, int]):
    def __iter__(self) -> Any:
        raise RuntimeError("foreign code")


@pytest.mark.parametrize(
    ("annotation", "value", "base"),
    [
        (str, Text("x"), "x"),
        (Any, Text("x"), "x"),
        (Any, {Text("k"): Text("x")}, {"k": "x"}),
        (int, Number.ONE, 1),
        (Any, [Number.ONE], [1]),
        (Any, Pairs(a=1), {"a": 1}),
        (dict[str, int], Pairs(a=1), {"a": 1}),
    ],
)
def test_a_subclass_travels_as_its_base(annotation: Any, value: Any, base: Any) -> None:
    returned = travelled(annotation, value)

    assert returned == base
    assert type(returned) is type(base)


def test_an_argument_changed_after_the_call_does_not_change_the_job() -> None:
    payload = payload_for(Any)
    given_list = [[1]]

    encoded = payload.encode(payload.bind((given_list,), {}))
    given_list[0].append(2)

    assert encoded == {"value": [[1]]}
