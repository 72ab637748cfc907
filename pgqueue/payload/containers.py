"""Lists, dicts, tuples and sets, each of a declared item type."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pgqueue.payload.codec import Codec, any_unbounded, convert_each, convert_values
from pgqueue.payload.plain import text_key
from pgqueue.payload.refusals import BadValue, Refusal, wrong_type


def list_of(item: Codec) -> Codec:
    def encode(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type("a list", value)
        return convert_each(item.encode, list.copy(value), item.natives)

    def decode(value: Any) -> list[Any]:
        return convert_each(item.decode, _array(value), item.natives)

    return Codec("a list", encode, decode, is_unbounded=item.is_unbounded)


def dict_of(item: Codec) -> Codec:
    def encode(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type("a dict", value)
        named = {text_key(key): each for key, each in dict.items(value)}
        return convert_values(item.encode, named, item.natives)

    def decode(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type("a dict, written as a JSON object", value)
        return convert_values(item.decode, value, item.natives)

    return Codec("a dict with str keys", encode, decode, is_unbounded=item.is_unbounded)


def tuple_of(item: Codec) -> Codec:
    """A tuple of any length, all items of one type."""

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            raise wrong_type("a tuple", value)
        return convert_each(item.encode, list(tuple.__iter__(value)), item.natives)

    def decode(value: Any) -> tuple[Any, ...]:
        return tuple(convert_each(item.decode, _array(value), item.natives))

    return Codec("a tuple", encode, decode, is_unbounded=item.is_unbounded)


def tuple_with(items: Sequence[Codec]) -> Codec:
    """A tuple of a fixed length, each item of its own type."""
    expects = f"a tuple of {len(items)}"

    def each(converts: list[Callable[[Any], Any]], values: list[Any]) -> list[Any]:
        if len(values) != len(converts):
            raise BadValue(f"must be {expects}, not of {len(values)}")
        converted: list[Any] = []
        try:
            for convert, value in zip(converts, values, strict=True):
                converted.append(convert(value))
        except Refusal as refusal:
            refusal.found_under(f"[{len(converted)}]")
            raise
        return converted

    encoders = [item.encode for item in items]
    decoders = [item.decode for item in items]

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            raise wrong_type(expects, value)
        return each(encoders, list(tuple.__iter__(value)))

    def decode(value: Any) -> tuple[Any, ...]:
        return tuple(each(decoders, _array(value)))

    return Codec(expects, encode, decode, is_unbounded=any_unbounded(items))


def set_of(item: Codec, kind: type[set[Any]] | type[frozenset[Any]]) -> Codec:
    expects = f"a {kind.__name__}"
    iterate: Callable[[Any], Iterator[Any]] = kind.__iter__

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, kind):
            raise wrong_type(expects, value)
        encoded = convert_each(item.encode, list(iterate(value)), item.natives)
        return _in_one_order(encoded)

    def decode(value: Any) -> set[Any] | frozenset[Any]:
        items = convert_each(item.decode, _array(value), item.natives)
        try:
            return kind(items)
        except TypeError:
            raise BadValue("holds an item that cannot be in a set") from None

    return Codec(expects, encode, decode, is_unbounded=item.is_unbounded)


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise wrong_type("a JSON array", value)
    return value


def _in_one_order(items: list[Any]) -> list[Any]:
    """Give equal sets equal JSON where the items can be compared."""
    try:
        return sorted(items)
    except TypeError:
        return items
