"""Codecs for one of several: unions, literals and enums."""

from collections.abc import Sequence
from enum import Enum, Flag
from types import NoneType
from typing import Any

from pgqueue.arguments.codec import Codec, any_unbounded
from pgqueue.arguments.json_copy import PLAIN_TYPES, exact_if_whole
from pgqueue.arguments.refusals import CannotTravel, NotDeclared, Refusal, WrongType


class Union:
    """A value of one of several types.

    JSON does not record the type: ``UUID | str`` is a text either way.  So a value is written only
    after a check that it would be read back unchanged.
    """

    def __init__(self, members: Sequence[Codec]) -> None:
        self.members = members
        self.expects = " or ".join(member.expects for member in members)
        self.natives = frozenset[type]().union(*(member.natives for member in members))

    def codec(self) -> Codec:
        natives = self.natives - {float} if int in self.natives else self.natives
        # An exact type decides only if every member is native.
        if not all(member.natives for member in self.members):
            natives &= {NoneType}
        return Codec(self.expects, self.encode, self.decode, natives, any_unbounded(self.members))

    def encode(self, value: Any) -> Any:
        for member in self._exact_first(value):
            try:
                encoded = member.encode(value)
            except WrongType:
                continue
            reader, decoded = self._read(encoded)
            if reader is not member and not (type(decoded) is type(value) and decoded == value):
                raise Refusal(
                    f"would come back as {reader.expects}: JSON writes both alike, "
                    "so give the parameter one type"
                )
            is_number = type(encoded) is float and int in self.natives
            return exact_if_whole(encoded) if is_number else encoded
        raise WrongType(self.expects, value)

    def decode(self, value: Any) -> Any:
        return self._read(value)[1]

    def _exact_first(self, value: Any) -> list[Codec]:
        return sorted(self.members, key=lambda member: type(value) not in member.natives)

    def _read(self, value: Any) -> tuple[Codec, Any]:
        # Types with a form of their own come first: for str, every text is valid.
        refusal: Refusal = WrongType(self.expects, value)
        for member in sorted(self._exact_first(value), key=lambda member: bool(member.natives)):
            try:
                return member, member.decode(value)
            except NotDeclared:
                refusal = NotDeclared(refusal.reason)
            except Refusal:
                continue
        raise refusal


def literal_of(literals: Sequence[Any]) -> Codec:
    """A literal: one of a few given values, which are distinguished by value and type."""
    plain = [each.value if isinstance(each, Enum) else each for each in literals]
    if not PLAIN_TYPES.issuperset(map(type, plain)):
        raise CannotTravel("has a bytes literal: use str, int, bool, None or enum literals")
    written = {(type(each), each): value for each, value in zip(literals, plain, strict=True)}
    read = {(type(value), value): each for each, value in zip(literals, plain, strict=True)}
    if len(read) < len(written):
        raise CannotTravel("has two literals that JSON writes alike: keep one of them")
    return _by_table("one of " + ", ".join(map(str, plain)), written, read)


def member_of(kind: type[Enum]) -> Codec:
    """An enum member, written as its value, so that renaming a member breaks no stored job."""
    expects = f"a {kind.__name__}"
    if not kind.__members__:
        raise CannotTravel(f"is {kind.__name__}, an enum without members: annotate the one you use")
    for member in kind:
        _check_member(member)
    members = {(type(member.value) is bool, member.value): member for member in kind}

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            raise WrongType(expects, value)
        return value.value

    def decode(value: Any) -> Any:
        if type(value) not in PLAIN_TYPES:
            raise WrongType(f"the value of {expects}", value)
        try:
            if issubclass(kind, Flag) and type(value) is int:
                return kind(value)
            return members[type(value) is bool, value]
        except (KeyError, ValueError):
            raise NotDeclared(f"holds a value that no {kind.__name__} has") from None

    return Codec(expects, encode, decode)


def _by_table(expects: str, written: dict[Any, Any], read: dict[Any, Any]) -> Codec:
    def encode(value: Any) -> Any:
        try:
            return written[type(value), value]
        except (KeyError, TypeError):
            raise WrongType(expects, value, f"must be {expects}") from None

    def decode(value: Any) -> Any:
        try:
            return read[type(value), value]
        except (KeyError, TypeError):
            raise NotDeclared(f"must be {expects}") from None

    return Codec(expects, encode, decode)


def _check_member(member: Enum) -> None:
    value = member.value
    if type(value) not in PLAIN_TYPES or (type(value) is float and not abs(value) < 1e16):
        raise CannotTravel(
            f"is an enum whose member {member.name} has a value JSON cannot keep: "
            "give its members str or int values"
        )
