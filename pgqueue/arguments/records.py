"""Codecs for values with parts: lists, tuples, sets, dicts, dataclasses, typed dicts, models."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from pgqueue.arguments.codec import Codec, Convert, any_unbounded, each_named, each_of
from pgqueue.arguments.json_copy import text_key
from pgqueue.arguments.refusals import NotDeclared, Refusal, WrongType


def array_of(kind: Any, item: Codec) -> Codec:
    """A list, tuple, set or frozenset of any length, all items of one type."""
    expects = f"a {kind.__name__}"
    is_set = kind in (set, frozenset)

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, kind):
            raise WrongType(expects, value)
        items = list(kind.__iter__(value))
        if not item.natives.issuperset(map(type, items)):
            items = each_of(item.encode, items)
        try:
            return sorted(items) if is_set else items  # equal sets have equal JSON
        except TypeError:
            return items

    def decode(value: Any) -> Any:
        items = _array(value)
        if not item.natives.issuperset(map(type, items)):
            items = each_of(item.decode, items)
        try:
            return items if kind is list else kind(items)
        except TypeError:
            raise Refusal("holds an item that cannot be in a set") from None

    return Codec(expects, encode, decode, is_unbounded=item.is_unbounded)


def tuple_with(items: Sequence[Codec]) -> Codec:
    """A tuple of a fixed length, each item of its own type."""
    expects = f"a tuple of {len(items)}"
    encoders = [item.encode for item in items]
    decoders = [item.decode for item in items]

    def checked(converts: list[Convert], values: list[Any]) -> Iterable[tuple[Convert, Any]]:
        if len(values) != len(items):
            raise Refusal(f"must be {expects}, not of {len(values)}")
        return zip(converts, values, strict=True)

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            raise WrongType(expects, value)
        return each_of(_called, checked(encoders, list(tuple.__iter__(value))))

    def decode(value: Any) -> tuple[Any, ...]:
        return tuple(each_of(_called, checked(decoders, _array(value))))

    return Codec(expects, encode, decode, is_unbounded=any_unbounded(items))


def dict_of(item: Codec) -> Codec:
    def converted(convert: Convert, values: dict[str, Any]) -> dict[str, Any]:
        if item.natives.issuperset(map(type, values.values())):
            return values
        return each_named(dict.fromkeys(values, convert), values)

    def encode(value: Any) -> dict[str, Any]:
        return converted(item.encode, _named("a dict", value))

    def decode(value: Any) -> dict[str, Any]:
        return converted(item.decode, _object(value))

    return Codec("a dict with str keys", encode, decode, is_unbounded=item.is_unbounded)


def record_of(kind: Any, fields: Mapping[str, Codec], required: Set[str]) -> Codec:
    """A dataclass or a typed dict, written as an object with exactly its declared fields."""
    is_dict = issubclass(kind, dict)
    expects = f"a {kind.__name__} (a dict)" if is_dict else f"a {kind.__name__}"
    encoders = {name: codec.encode for name, codec in fields.items()}
    decoders = {name: codec.decode for name, codec in fields.items()}

    def declared(values: dict[str, Any]) -> dict[str, Any]:
        if values.keys() != fields.keys():
            for name in required - values.keys():
                raise NotDeclared(f"has no field {name!r}")
            for name in values.keys() - fields.keys():
                raise NotDeclared(f"has {name[:60]!a}, which its type does not declare")
        return values

    def encode(value: Any) -> dict[str, Any]:
        if is_dict:
            return each_named(encoders, declared(_named(expects, value)))
        # A subclass would be read back as its base, without the fields it adds.
        if type(value) is not kind:
            raise WrongType(expects, value)
        return each_named(encoders, {name: getattr(value, name) for name in fields})

    def decode(value: Any) -> Any:
        values = each_named(decoders, declared(_object(value)))
        try:
            return kind(**values)
        except Exception as error:  # the constructor is the application's code
            raised = type(error).__name__
            raise Refusal(f"cannot be made {expects}: its constructor raised {raised}") from error

    return Codec(expects, encode, decode, is_unbounded=any_unbounded(fields.values()))


def model_of(kind: Any) -> Codec:
    """A pydantic model, written and read by pydantic itself."""
    expects = f"a {kind.__name__}"

    def decode(value: Any) -> Any:
        # As JSON text: pydantic accepts a text for a date in JSON even in a strict model.
        try:
            return kind.model_validate_json(json.dumps(value))
        except ValueError as error:
            raise Refusal(f"does not validate as {expects}") from error

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            raise WrongType(expects, value)
        encoded = value.model_dump(mode="json", by_alias=True, round_trip=True)
        decode(encoded)
        return encoded

    return Codec(expects, encode, decode, is_unbounded=True)


def _called(pair: tuple[Convert, Any]) -> Any:
    convert, value = pair
    return convert(value)


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise WrongType("a JSON array", value)
    return value


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise WrongType("a JSON object", value)
    return value


def _named(expects: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongType(expects, value)
    return {text_key(key): each for key, each in dict.items(value)}
