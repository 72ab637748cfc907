"""Objects with named fields: dataclasses, typed dicts and pydantic models."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pgqueue.payload.codec import Codec, any_unbounded
from pgqueue.payload.plain import text_key
from pgqueue.payload.refusals import BadValue, Refusal, key_step, wrong_type


class Fields:
    """The named fields of a record, and which of them may be missing."""

    def __init__(self, codecs: Mapping[str, Codec], *, required: frozenset[str]) -> None:
        self._codecs = dict(codecs)
        self._required = required
        self.is_unbounded = any_unbounded(codecs.values())

    def encode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(values)
        return self._converted(values, lambda codec: codec.encode)

    def decode(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type("a JSON object", value)
        self._check_names(value)
        return self._converted(value, lambda codec: codec.decode)

    def _converted(
        self, values: Mapping[str, Any], side: Callable[[Codec], Callable[[Any], Any]]
    ) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        name = ""
        try:
            for name, value in values.items():
                converted[name] = side(self._codecs[name])(value)
        except Refusal as refusal:
            refusal.found_under(key_step(name))
            raise
        return converted

    def _check_names(self, values: Mapping[str, Any]) -> None:
        for name in self._required - values.keys():
            raise BadValue(f"has no field {name!r}")
        for name in values.keys() - self._codecs.keys():
            raise BadValue(f"has {name[:60]!a}, which its type does not declare")


def dataclass_of(kind: type, names: tuple[str, ...], fields: Fields) -> Codec:
    """A dataclass, written as an object of the fields its constructor takes."""
    expects = f"a {kind.__name__}"

    def encode(value: Any) -> dict[str, Any]:
        # A subclass would come back as its base, without the fields it adds.
        if type(value) is not kind:
            raise wrong_type(expects, value)
        return fields.encode({name: getattr(value, name) for name in names})

    def decode(value: Any) -> Any:
        return _built(kind, fields.decode(value))

    return Codec(expects, encode, decode, is_unbounded=fields.is_unbounded)


def typed_dict_of(kind: type, fields: Fields) -> Codec:
    """A typed dict, with exactly the keys it declares."""
    expects = f"a {kind.__name__} (a dict)"

    def encode(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(expects, value)
        return fields.encode({text_key(key): each for key, each in dict.items(value)})

    return Codec(expects, encode, fields.decode, is_unbounded=fields.is_unbounded)


def pydantic_model_of(kind: Any) -> Codec:
    """A pydantic model, written and read by pydantic itself."""
    expects = f"a {kind.__name__}"

    def read(value: Any) -> Any:
        # As JSON text, for there pydantic takes a text for a date even in a strict model.
        try:
            return kind.model_validate_json(json.dumps(value))
        except ValueError as error:
            raise BadValue(f"does not validate as {expects}") from error

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            raise wrong_type(expects, value)
        encoded = value.model_dump(mode="json", by_alias=True, round_trip=True)
        read(encoded)
        return encoded

    return Codec(expects, encode, read, is_unbounded=True)


def _built(kind: type, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except Exception as error:  # the constructor is the application's code, and may check anything
        raise BadValue(
            f"cannot be made a {kind.__name__}: its constructor raised {type(error).__name__}"
        ) from error
