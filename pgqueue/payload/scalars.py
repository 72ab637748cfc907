"""Single values: those JSON has, and those it must spell."""

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any
from uuid import UUID

from pgqueue.payload.codec import Codec
from pgqueue.payload.refusals import BadValue, wrong_type

_DURATION = re.compile(
    r"(?P<minus>-?)P(?:(?P<days>\d+)D)?"
    r"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+)(?:\.(?P<fraction>\d{1,6}))?S)?)?",
    re.ASCII,
)


def _native(kind: type, expects: str, reduce: Callable[[Any], Any]) -> Codec:
    """A type JSON has; a value of a subclass becomes its base value."""

    def encode(value: Any) -> Any:
        # bool is a subclass of int, and an id that is True is a mistake, not a number.
        if isinstance(value, kind) and not isinstance(value, bool):
            return reduce(value)
        if isinstance(value, bool) and kind is bool:
            return value
        raise wrong_type(expects, value)

    def decode(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise wrong_type(expects, value)

    return Codec(expects, encode, decode, natives=frozenset({kind}))


def _encode_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type("a float", value)
    if isinstance(value, float):
        return float.__float__(value)
    try:
        exact = int(float(value)) == value
    except OverflowError:
        exact = False
    if not exact:
        raise BadValue("is an int that no float holds exactly: annotate the parameter as int")
    return float(value)


def _decode_float(value: Any) -> float:
    # PostgreSQL writes 1e16 as 10000000000000000, so a float may come back without its point.
    if type(value) is float:
        return value
    if type(value) is not int:
        raise wrong_type("a float", value)
    try:
        return float(value)
    except OverflowError:
        raise BadValue("is a number too large for a float") from None


def _spelled(
    kind: type, expects: str, write: Callable[[Any], str], read: Callable[[str], Any]
) -> Codec:
    """A type JSON has no word for, written as text."""

    def encode(value: Any) -> str:
        if not isinstance(value, kind):
            raise wrong_type(expects, value)
        return write(value)

    def decode(value: Any) -> Any:
        if type(value) is not str:
            raise wrong_type(f"{expects}, written as text", value)
        try:
            return read(value)
        except (ValueError, ArithmeticError):
            raise BadValue(f"holds text that is not {expects}") from None

    return Codec(expects, encode, decode)


def _write_datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        raise BadValue(
            "is a naive datetime, which means another instant on every machine: "
            "give it a time zone, for example datetime.now(UTC)"
        )
    return datetime.isoformat(value)


def _read_datetime(text: str) -> datetime:
    value = datetime.fromisoformat(text)
    if value.utcoffset() is None:
        raise ValueError("no time zone")
    return value


def _write_date(value: date) -> str:
    if isinstance(value, datetime):
        raise wrong_type("a date", value)
    return date.isoformat(value)


def _write_time(value: time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise BadValue("is a time in a zone whose offset depends on the day: pass a datetime")
    return time.isoformat(value)


def write_duration(value: timedelta) -> str:
    """Write a duration as ISO 8601 does: ``P1DT2.5S`` is a day and two and a half seconds."""
    size = abs(value)
    fraction = f".{size.microseconds:06}" if size.microseconds else ""
    sign = "-" if value < timedelta(0) else ""
    return f"{sign}P{size.days}DT{size.seconds}{fraction}S"


def read_duration(text: str) -> timedelta:
    """Read an ISO 8601 duration of days, hours, minutes and seconds."""
    match = _DURATION.fullmatch(text)
    if match is None or text.endswith(("P", "T")):
        raise ValueError("not an ISO 8601 duration")
    part = match.groupdict(default="")
    size = timedelta(
        days=int(part["days"] or 0),
        hours=int(part["hours"] or 0),
        minutes=int(part["minutes"] or 0),
        seconds=int(part["seconds"] or 0),
        microseconds=int(part["fraction"].ljust(6, "0")),
    )
    return -size if part["minus"] else size


def _write_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise BadValue("is not a finite Decimal: pass None, or a number")
    return Decimal.__str__(value)


def _read_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise ValueError("not finite")
    return value


def _write_bytes(value: bytes) -> str:
    return b64encode(value).decode("ascii")


def _read_bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


SCALAR_CODECS: dict[Any, Codec] = {
    str: _native(str, "a str", str.__str__),
    int: _native(int, "an int", int.__int__),
    bool: _native(bool, "a bool", bool),
    float: Codec("a float", _encode_float, _decode_float, natives=frozenset({float})),
    NoneType: _native(NoneType, "None", lambda value: value),
    UUID: _spelled(UUID, "a UUID", UUID.__str__, UUID),
    datetime: _spelled(datetime, "a datetime with a time zone", _write_datetime, _read_datetime),
    date: _spelled(date, "a date", _write_date, date.fromisoformat),
    time: _spelled(time, "a time", _write_time, time.fromisoformat),
    timedelta: _spelled(timedelta, "a timedelta", write_duration, read_duration),
    Decimal: _spelled(Decimal, "a finite Decimal", _write_decimal, _read_decimal),
    bytes: _spelled(bytes, "bytes", _write_bytes, _read_bytes),
}
