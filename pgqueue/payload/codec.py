"""How one annotation travels."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgqueue.payload.refusals import Refusal, key_step


@dataclass(frozen=True, slots=True)
class Codec:
    """A pair of functions between a Python value and plain JSON data.

    Both raise :class:`~pgqueue.payload.refusals.Refusal` for what they cannot take.
    """

    expects: str
    """What to pass, in words that follow "must be"."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    natives: frozenset[type] = frozenset()
    """Values of exactly these types travel unchanged, both ways, without a call."""

    is_unbounded: bool = False
    """The annotation does not say how deep a value may nest."""


def convert_each(
    convert: Callable[[Any], Any], values: list[Any], natives: frozenset[type]
) -> list[Any]:
    """Convert the items of a list; a refusal learns the index of its item."""
    if natives.issuperset(map(type, values)):
        return values.copy()
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value))
    except Refusal as refusal:
        refusal.found_under(f"[{len(converted)}]")
        raise
    return converted


def convert_values(
    convert: Callable[[Any], Any], values: Mapping[str, Any], natives: frozenset[type]
) -> dict[str, Any]:
    """Convert the values of a mapping; a refusal learns the key of its value."""
    if natives.issuperset(map(type, values.values())):
        return dict(values)
    converted: dict[str, Any] = {}
    key = ""
    try:
        for key, value in values.items():
            converted[key] = convert(value)
    except Refusal as refusal:
        refusal.found_under(key_step(key))
        raise
    return converted


def any_unbounded(codecs: Iterable[Codec]) -> bool:
    """One part of unknown depth makes the whole of unknown depth."""
    return any(codec.is_unbounded for codec in codecs)
