"""How the values of one annotation travel."""

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
    """What to pass, in words that follow "must be"."""

    encode: Convert
    decode: Convert

    natives: frozenset[type] = frozenset()
    """Values of exactly these types travel unchanged, both ways, without a call."""

    is_unbounded: bool = False
    """The annotation does not say how deep a value may nest."""


def each_of(convert: Convert, values: Iterable[Any]) -> list[Any]:
    """Convert the items of an array; a refusal learns the index of its item.

    Not by ``map``: a StopIteration of the application's code would end it without a word.
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
    """Convert the values of an object; a refusal learns the key of its value."""
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
    """One part of unknown depth makes the whole of unknown depth."""
    return any(codec.is_unbounded for codec in codecs)


_UNCHANGED = PLAIN_TYPES - {float}

ANY = Codec(
    PLAIN, lambda value: JsonCopy(_UNCHANGED).of(value), lambda value: value, _UNCHANGED, True
)
"""What a parameter without annotation, or with ``Any``, takes."""
