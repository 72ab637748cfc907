"""A copy of a value as plain JSON data."""

import math
import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, ClassVar

from pgqueue.arguments.refusals import MAX_DEPTH, TOO_DEEP, Refusal, WrongType

PLAIN = "plain JSON (str, int, float, bool, None, list, or dict with str keys)"
PLAIN_TYPES: frozenset[type] = frozenset({str, int, float, bool, NoneType})

_TEXT = frozenset[type]({str})


class JsonCopy:
    """Copies a value, so that later changes to the value do not change the job.

    A subclass of str, int, list and so on is converted by the methods of its base, because its own
    may run any code.  Values of exactly the ``unchecked`` types are copied without checks.
    """

    __slots__ = ("_depth", "_unchecked")

    writers: ClassVar[Mapping[type, Callable[[Any, Any], Any]]]

    def __init__(self, unchecked: frozenset[type] = frozenset()) -> None:
        self._unchecked = unchecked
        self._depth = 0

    def of(self, value: Any) -> Any:
        if type(value) in self._unchecked:
            return value
        write = self.writers.get(type(value))
        if write is None:
            kinds = (kind for kind in self.writers if isinstance(value, kind))
            write = self.writers.get(next(kinds, object), type(self).other)
        return write(self, value)

    def other(self, value: Any) -> Any:
        raise WrongType.of(f"must be {PLAIN}", value)

    def text(self, value: str) -> str:
        value = str.__str__(value)
        if str in self._unchecked:
            return value
        if "\0" in value:
            raise Refusal(
                "holds a NUL character, which PostgreSQL cannot keep: remove it, or pass bytes"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refusal(
                "holds half a surrogate pair, which is not a character: decode the text again"
            ) from None
        return value

    def integer(self, value: int) -> int:
        value = int.__int__(value)
        try:
            if value.bit_length() > 2000:  # the lowest limit that Python allows is 640 digits
                str(value)
        except ValueError:
            digits = sys.get_int_max_str_digits()
            raise Refusal(f"is an int of more than {digits:,} digits: pass it as bytes") from None
        return value

    def number(self, value: float) -> float | int:
        value = float.__float__(value)
        if not math.isfinite(value):
            raise Refusal(
                f"is {value}, which JSON has no number for: pass None, or a finite number"
            )
        return exact_if_whole(value)

    def array(self, values: list[Any]) -> list[Any]:
        self._enter()
        copy: list[Any] = []
        unchecked = self._unchecked
        try:
            for value in values:
                copy.append(value if type(value) in unchecked else self.of(value))
        except Refusal as refusal:
            refusal.steps.insert(0, len(copy))
            raise
        self._depth -= 1
        return copy

    def mapping(self, values: dict[Any, Any]) -> dict[str, Any]:
        self._enter()
        unchecked = self._unchecked
        if str not in unchecked or not _TEXT.issuperset(map(type, values)):
            values = {self.key(key): value for key, value in values.items()}
        copy: dict[str, Any] = {}
        name = ""
        try:
            for name, value in values.items():
                copy[name] = value if type(value) in unchecked else self.of(value)
        except Refusal as refusal:
            refusal.steps.insert(0, name)
            raise
        self._depth -= 1
        return copy

    def key(self, key: Any) -> str:
        if not isinstance(key, str):
            name = type(key).__name__
            raise WrongType(f"must have only str keys, not {name}: convert its keys")
        try:
            return self.text(key)
        except Refusal as refusal:
            raise Refusal(f"has a key that {refusal.reason}") from None

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refusal(TOO_DEEP)


JsonCopy.writers = {
    str: JsonCopy.text,
    bool: lambda copy, value: value,
    NoneType: lambda copy, value: value,
    int: JsonCopy.integer,
    float: JsonCopy.number,
    list: lambda copy, value: copy.array(list.copy(value)),
    dict: lambda copy, value: copy.mapping(dict.copy(value)),
}


def exact_if_whole(value: float) -> float | int:
    """Return the equal int for a float that PostgreSQL would write without its point.

    From 1e16 on, jsonb writes a float as the integer of its shortest digits, not of its value.  If
    the parameter also allows an int, another number would be read back.
    """
    return int(value) if 1e16 <= abs(value) < math.inf else value


def nests_too_deep(value: Any) -> bool:
    """Whether lists and dicts nest deeper than an argument may; checks level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for some in parts for part in some if isinstance(part, list | dict)]
        if not level:
            return False
    return True
