"""One of several: unions, literals and enums."""

from collections.abc import Sequence
from enum import Enum, Flag
from types import NoneType
from typing import Any

from pgqueue.payload.codec import Codec, any_unbounded
from pgqueue.payload.plain import SCALARS, exact_if_whole
from pgqueue.payload.refusals import BadValue, CannotTravel, Refusal, WrongType, wrong_type


class Union:
    """A value of one of several types.

    JSON does not say which: ``UUID | str`` is a text either way.  So a value is written only
    after checking that it would be read back as what it is.
    """

    def __init__(self, members: Sequence[Codec]) -> None:
        self.expects = " or ".join(member.expects for member in members)
        # A type of its own form goes first: to str, every text is a str.
        self._readers = sorted(members, key=lambda member: bool(member.natives))
        self._natives = frozenset[type]().union(*(member.natives for member in members))

    def codec(self) -> Codec:
        # Only where every member is native does an exact type settle the matter.
        natives = self._natives
        if not all(reader.natives for reader in self._readers):
            natives &= {NoneType}
        if int in natives:
            natives -= {float}
        return Codec(
            self.expects,
            self.encode,
            self.decode,
            natives=natives,
            is_unbounded=any_unbounded(self._readers),
        )

    def encode(self, value: Any) -> Any:
        for member in self._exact_first(type(value)):
            try:
                encoded = member.encode(value)
            except WrongType:
                continue
            self._check_return(value, member, encoded)
            if type(encoded) is float and int in self._natives:
                return exact_if_whole(encoded)
            return encoded
        raise wrong_type(self.expects, value)

    def decode(self, value: Any) -> Any:
        return self._read(value)[1]

    def _exact_first(self, kind: type) -> list[Codec]:
        return sorted(self._readers, key=lambda member: kind not in member.natives)

    def _read(self, value: Any) -> tuple[Codec, Any]:
        typed = [reader for reader in self._readers if not reader.natives]
        native = [reader for reader in self._exact_first(type(value)) if reader.natives]
        for reader in [*typed, *native]:
            try:
                return reader, reader.decode(value)
            except Refusal:
                continue
        raise wrong_type(self.expects, value)

    def _check_return(self, value: Any, member: Codec, encoded: Any) -> None:
        reader, decoded = self._read(encoded)
        if reader is member or (type(decoded) is type(value) and decoded == value):
            return
        raise BadValue(
            f"would come back as {reader.expects}: JSON writes both alike, "
            "so give the parameter one type"
        )


def one_of(values: Sequence[Any]) -> Codec:
    """A literal: one of a few spelled-out values."""
    written = {}
    for value in values:
        if isinstance(value, Enum):
            written[_key(value)] = value.value
        elif type(value) in SCALARS:
            written[_key(value)] = value
        else:
            raise CannotTravel("has a bytes literal: use str, int, bool, None or enum literals")
    read = {_key(plain): key[1] for key, plain in written.items()}
    if len(read) < len(written):
        raise CannotTravel("has two literals that JSON writes alike: keep one of them")
    expects = "one of " + ", ".join(str(plain) for plain in written.values())

    def encode(value: Any) -> Any:
        try:
            return written[_key(value)]
        except (KeyError, TypeError):
            raise WrongType(f"must be {expects}") from None

    def decode(value: Any) -> Any:
        try:
            return read[_key(value)]
        except (KeyError, TypeError):
            raise BadValue(f"must be {expects}") from None

    return Codec(expects, encode, decode)


def member_of(kind: type[Enum]) -> Codec:
    """An enum member, written as its value, so that renaming a member breaks no stored job."""
    expects = f"a {kind.__name__}"
    if not kind.__members__:
        raise CannotTravel(f"is {kind.__name__}, an enum without members: annotate the one you use")
    for member in kind:
        _check_member(member)
    by_value = {(type(member.value) is bool, member.value): member for member in kind}

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong_type(expects, value)
        return value.value

    def decode(value: Any) -> Any:
        if type(value) not in SCALARS:
            raise wrong_type(f"the value of {expects}", value)
        if issubclass(kind, Flag) and type(value) is int:
            return _flag(kind, value)
        try:
            return by_value[type(value) is bool, value]
        except KeyError:
            raise BadValue(f"holds a value that no {kind.__name__} has") from None

    return Codec(expects, encode, decode)


def _check_member(member: Enum) -> None:
    value = member.value
    if type(value) not in SCALARS or (type(value) is float and not abs(value) < 1e16):
        raise CannotTravel(
            f"is an enum whose member {member.name} has a value JSON cannot keep: "
            "give its members str or int values"
        )


def _flag(kind: type[Flag], value: int) -> Flag:
    try:
        return kind(value)
    except ValueError:
        raise BadValue(f"holds a value that no {kind.__name__} has") from None


def _key(value: Any) -> tuple[type, Any]:
    # With the type, since 1 == True == 1.0 in a dict.
    return type(value), value
