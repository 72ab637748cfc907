"""Plain JSON values: what a parameter without annotation, or with ``Any``, may carry."""

import math
from collections.abc import Iterable
from types import NoneType
from typing import Any

from pgqueue.payload.codec import Codec
from pgqueue.payload.refusals import BadValue, Refusal, WrongType, key_step, wrong_type

MAX_DEPTH = 64
"""How deep lists and dicts may nest within one argument."""

SCALARS: frozenset[type] = frozenset({str, int, float, bool, NoneType})

_UNCHANGED = SCALARS - {float}

TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels, or contains itself: pass a flatter value"

_PLAIN = "plain JSON (str, int, float, bool, None, list, or dict with str keys)"


def copied(value: Any, depth: int = 0) -> Any:
    """Copy a value that JSON can say as it is, and refuse any other.

    A copy, so that changing the argument after enqueueing does not change the job.  Subclasses
    are reduced to their base through the base's own methods: theirs are foreign code.
    """
    if type(value) in _UNCHANGED:
        return value
    if isinstance(value, list):
        return _copied_list(list.copy(value), depth + 1)
    if isinstance(value, dict):
        return _copied_dict(dict.copy(value), depth + 1)
    return _reduced(value)


def nests_too_deep(value: Any) -> bool:
    """Tell whether lists and dicts nest deeper than an argument may; looks level by level."""
    level = _containers_among((value,))
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _containers_in(parent)]
        if not level:
            return False
    return True


def exact_if_whole(value: float) -> float | int:
    """Make a float that PostgreSQL would write without its point the int it equals.

    From 1e16 on jsonb writes a float as an integer: of its shortest digits, not of its value.
    Where an int may stand too, it would come back as another number.
    """
    return int(value) if 1e16 <= abs(value) < math.inf else value


def text_key(key: Any) -> str:
    """Refuse a key that JSON would silently turn into text."""
    if not isinstance(key, str):
        raise WrongType(f"must have only str keys, not {type(key).__name__}: convert its keys")
    return str.__str__(key)


def _copied_list(values: list[Any], depth: int) -> list[Any]:
    if depth > MAX_DEPTH:
        raise BadValue(TOO_DEEP)
    copy: list[Any] = []
    try:
        for value in values:
            copy.append(copied(value, depth))
    except Refusal as refusal:
        refusal.found_under(f"[{len(copy)}]")
        raise
    return copy


def _copied_dict(values: dict[Any, Any], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise BadValue(TOO_DEEP)
    copy: dict[str, Any] = {}
    for key, value in values.items():
        name = text_key(key)
        try:
            copy[name] = copied(value, depth)
        except Refusal as refusal:
            refusal.found_under(key_step(name))
            raise
    return copy


def _reduced(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return exact_if_whole(float.__float__(value))
    raise wrong_type(_PLAIN, value)


def _containers_in(parent: list[Any] | dict[str, Any]) -> list[Any]:
    return _containers_among(parent.values() if isinstance(parent, dict) else parent)


def _containers_among(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, list | dict)]


ANY = Codec(
    expects=_PLAIN,
    encode=copied,
    decode=lambda value: value,
    natives=_UNCHANGED,
    is_unbounded=True,
)
