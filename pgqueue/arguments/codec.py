"""How the values of one annotation are converted."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgqueue.arguments.json_copy import PLAIN, PLAIN_TYPES, JsonCopy
from pgqueue.arguments.refusals import Refusal

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Codec:
    """Two functions between a Python value and JSON data; both raise Refusal."""

    expects: str
    """What to pass, as words that follow "must be"."""

    encode: Convert
    decode: Convert

    natives: frozenset[type] = frozenset()
    """Values of exactly these types are stored and read unchanged, without a call."""

    is_unbounded: bool = False
    """The annotation does not limit how deep a value may nest."""


def each_of(convert: Convert, values: Iterable[Any]) -> list[Any]:
    """Convert the items of an array; adds the index of an item to its refusal.

    Not by ``map``: a StopIteration raised by the application's code would end it silently.
    """
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value))
    except Refusal as refusal:
        refusal.steps.insert(0, len(converted))
        raise
    return converted


def each_named(converts: Mapping[str, Convert], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of an object; adds the key of a value to its refusal."""
    converted: dict[str, Any] = {}
    name = ""
    try:
        for name, value in values.items():
            converted[name] = converts[name](value)
    except Refusal as refusal:
        refusal.steps.insert(0, name)
        raise
    return converted


def any_unbounded(codecs: Iterable[Codec]) -> bool:
    """Whether any part has unlimited depth, and so the whole."""
    return any(codec.is_unbounded for codec in codecs)


_UNCHANGED = PLAIN_TYPES - {float}

ANY = Codec(
    PLAIN, lambda value: JsonCopy(_UNCHANGED).of(value), lambda value: value, _UNCHANGED, True
)
"""The codec of a parameter without annotation, or with ``Any``."""
