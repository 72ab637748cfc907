"""Codecs for single values: JSON's own types, and those written as text."""

import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any
from uuid import UUID

from pgqueue.arguments.codec import Codec
from pgqueue.arguments.refusals import Refusal, WrongType

_DURATION = re.compile(
    r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,6}))?S)?)?(?<![PT])", re.ASCII
)


def _write_duration(value: timedelta) -> str:
    """Write a duration in ISO 8601: ``P1DT2.5S`` is a day and two and a half seconds."""
    size = abs(value)
    fraction = f".{size.microseconds:06}" if size.microseconds else ""
    sign = "-" if value < timedelta(0) else ""
    return f"{sign}P{size.days}DT{size.seconds}{fraction}S"


def _read_duration(text: str) -> timedelta:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("not an ISO 8601 duration")
    minus, days, hours, minutes, seconds, fraction = match.groups(default="")
    size = timedelta(
        days=int(days or 0),
        hours=int(hours or 0),
        minutes=int(minutes or 0),
        seconds=int(seconds or 0),
        microseconds=int(fraction.ljust(6, "0")),
    )
    return -size if minus else size


# A datetime is also a date, so it comes first.
SPELLED: dict[type, Callable[[Any], str]] = {
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: _write_duration,
    UUID: UUID.__str__,
    Decimal: Decimal.__str__,
    bytes: lambda value: b64encode(value).decode("ascii"),
}
"""How types without a JSON form are written, in arguments and in results."""


def _native(kind: type, expects: str, reduce: Callable[[Any], Any]) -> Codec:
    """A JSON type; a value of a subclass is converted to the base type."""

    def encode(value: Any) -> Any:
        # bool is a subclass of int, but True as an id is a mistake.
        if not isinstance(value, kind) or (type(value) is bool and kind is not bool):
            raise WrongType(expects, value)
        return reduce(value)

    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise WrongType(expects, value)
        return value

    return Codec(expects, encode, decode, natives=frozenset({kind}))


def _spelled(
    kind: type,
    expects: str,
    read: Callable[[str], Any],
    check: Callable[[Any], object] = lambda value: None,
) -> Codec:
    """A type written as text; ``check`` refuses values that no argument may have."""
    write = SPELLED[kind]

    def encode(value: Any) -> str:
        if not isinstance(value, kind):
            raise WrongType(expects, value)
        check(value)
        return write(value)

    def decode(value: Any) -> Any:
        if type(value) is not str:
            raise WrongType(f"{expects}, written as text", value)
        try:
            read_value = read(value)
        except (ValueError, ArithmeticError):
            raise Refusal(f"holds text that is not {expects}") from None
        check(read_value)
        return read_value

    return Codec(expects, encode, decode)


def _check_datetime(value: datetime) -> None:
    if value.utcoffset() is None:
        raise Refusal(
            "is a naive datetime, which means another instant on every machine: "
            "give it a time zone, for example datetime.now(UTC)"
        )


def _check_date(value: date) -> None:
    if isinstance(value, datetime):
        raise WrongType("a date", value)


def _check_time(value: time) -> None:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Refusal("is a time in a zone whose offset depends on the day: pass a datetime")


def _check_decimal(value: Decimal) -> None:
    if not value.is_finite():
        raise Refusal("is not a finite Decimal: pass None, or a number")


def _encode_float(value: Any) -> float:
    if type(value) is bool or not isinstance(value, int | float):
        raise WrongType("a float", value)
    if isinstance(value, int) and _decode_float(int.__int__(value)) != value:
        raise Refusal("is an int that no float holds exactly: annotate the parameter as int")
    return float.__float__(value) if isinstance(value, float) else float(value)


def _decode_float(value: Any) -> float:
    # PostgreSQL writes 1e16 as 10000000000000000, so a float may be read without its point.
    if type(value) is float:
        return value
    if type(value) is not int:
        raise WrongType("a float", value)
    try:
        return float(value)
    except OverflowError:
        raise Refusal("is too large for a float: annotate the parameter as int") from None


SCALAR_CODECS: dict[Any, Codec] = {
    str: _native(str, "a str", str.__str__),
    int: _native(int, "an int", int.__int__),
    bool: _native(bool, "a bool", bool),
    float: Codec("a float", _encode_float, _decode_float, natives=frozenset({float})),
    NoneType: _native(NoneType, "None", lambda value: value),
    UUID: _spelled(UUID, "a UUID", UUID),
    datetime: _spelled(
        datetime, "a datetime with a time zone", datetime.fromisoformat, _check_datetime
    ),
    date: _spelled(date, "a date", date.fromisoformat, _check_date),
    time: _spelled(time, "a time", time.fromisoformat, _check_time),
    timedelta: _spelled(timedelta, "a timedelta", _read_duration),
    Decimal: _spelled(Decimal, "a finite Decimal", Decimal, _check_decimal),
    bytes: _spelled(bytes, "bytes", lambda text: b64decode(text, validate=True)),
}
