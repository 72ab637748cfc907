"""The stored form of each kind of value, as a schema of pydantic-core.

A schema works in two directions.  In strict mode it *writes*: it takes a Python value of the
declared type and returns plain JSON data.  Otherwise it *reads*: it takes plain JSON data and
returns a value of the declared type.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from types import NoneType
from typing import Any
from uuid import UUID

from pydantic_core import SchemaValidator, ValidationError
from pydantic_core import core_schema as core

from pgqueue.arguments.json_copy import PLAIN_TYPES, JsonCopy, exact_if_whole
from pgqueue.arguments.refusals import CannotTravel, NotDeclared, Refusal, WrongType, refusal_of

Schema = core.CoreSchema
Compile = Callable[[Schema], SchemaValidator]
after = core.no_info_after_validator_function
before = core.no_info_before_validator_function
with_function = core.no_info_plain_validator_function


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written and read."""

    schema: Schema

    natives: frozenset[type] = frozenset()
    """Values of exactly these types are stored and read unchanged, without a call."""


def _two_ways(write: Schema, read: Schema) -> Form:
    return Form(core.lax_or_strict_schema(lax_schema=read, strict_schema=write))


def _write_duration(value: timedelta) -> str:
    """Write a duration in ISO 8601: ``P1DT2.5S`` is a day and two and a half seconds."""
    size = abs(value)
    fraction = f".{size.microseconds:06}" if size.microseconds else ""
    sign = "-" if value < timedelta(0) else ""
    return f"{sign}P{size.days}DT{size.seconds}{fraction}S"


# A datetime is also a date, so it comes first.
SPELLED: dict[type, Callable[[Any], str]] = {
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: _write_duration,
    UUID: UUID.__str__,
    Decimal: Decimal.__str__,
    bytes: lambda value: b64encode(value).decode("ascii"),
}
"""How types without a JSON form are written, in arguments and in results."""


def _with_zone(value: datetime) -> datetime:
    if value.utcoffset() is None:
        raise Refusal(
            "is a naive datetime, which means another instant on every machine: "
            "give it a time zone, for example datetime.now(UTC)"
        )
    return value


def _not_datetime(value: date) -> date:
    if isinstance(value, datetime):
        raise WrongType.of("must be a date", value)
    return value


def _same_every_day(value: time) -> time:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Refusal("is a time in a zone whose offset depends on the day: pass a datetime")
    return value


def _finite(value: Decimal) -> Decimal:
    if not value.is_finite():
        raise Refusal("is not a finite Decimal: pass None, or a number")
    return value


def _exact(value: Any) -> Any:
    if not isinstance(value, int | float):  # pydantic would accept every object with __float__
        raise WrongType.of("must be a float", value)
    try:
        if isinstance(value, float) or float(value) == value:
            return value
    except OverflowError:
        pass
    raise Refusal("is an int that no float holds exactly: annotate the parameter as int")


def _spelled(kind: type, read: Schema, check: Callable[[Any], Any] | None = None) -> Form:
    """A type that is written as text; ``check`` refuses some values of the type."""
    given, spell = core.is_instance_schema(kind), SPELLED[kind]
    if check is None:
        return _two_ways(after(spell, given), read)
    # In one function, because each call from pydantic-core into Python takes time.
    return _two_ways(after(lambda value: spell(check(value)), given), after(check, read))


_TEXT = core.str_schema(strict=True)
_FLOAT = core.float_schema(strict=True)
NONE = Form(core.none_schema(), frozenset({NoneType}))
SCALARS: dict[Any, Form] = {
    NoneType: NONE,
    str: Form(_TEXT, frozenset({str})),
    int: Form(core.int_schema(strict=True), frozenset({int})),
    bool: Form(core.bool_schema(strict=True), frozenset({bool})),
    float: replace(_two_ways(before(_exact, _FLOAT), _FLOAT), natives=frozenset({float})),
    datetime: _spelled(datetime, after(datetime.fromisoformat, _TEXT), _with_zone),
    date: _spelled(date, after(date.fromisoformat, _TEXT), _not_datetime),
    time: _spelled(time, after(time.fromisoformat, _TEXT), _same_every_day),
    timedelta: _spelled(timedelta, core.chain_schema([_TEXT, core.timedelta_schema()])),
    UUID: _spelled(UUID, core.chain_schema([_TEXT, core.uuid_schema()])),
    Decimal: _spelled(Decimal, core.chain_schema([_TEXT, core.decimal_schema()]), _finite),
    bytes: _spelled(bytes, after(partial(b64decode, validate=True), _TEXT)),
}
_UNCHANGED = PLAIN_TYPES - {float}
ANY = replace(
    _two_ways(with_function(lambda value: JsonCopy(_UNCHANGED).of(value)), core.any_schema()),
    natives=_UNCHANGED,
)


def array_of(kind: Any, item: Form) -> Form:
    """A list, tuple, set or frozenset of any length, all items of one type."""
    stored = core.list_schema(item.schema, strict=True, fail_fast=True)
    if kind is list:
        return Form(stored)
    # The __iter__ of the base type: that of a subclass may run any code.
    items = after(lambda value: list(kind.__iter__(value)), core.is_instance_schema(kind))
    write: Schema = core.chain_schema([items, stored])
    if kind in (set, frozenset):
        write = after(_sorted, write)
    return _two_ways(write, after(kind, stored))


def tuple_of(items: Sequence[Form]) -> Form:
    """A tuple of a fixed length, each item of its own type."""
    stored = core.tuple_schema([item.schema for item in items], strict=False)
    given = core.chain_schema([core.is_instance_schema(tuple), stored])
    return _two_ways(after(list, given), stored)


def dict_of(item: Form) -> Form:
    return Form(core.dict_schema(_TEXT, item.schema, strict=True))


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)  # equal sets have equal JSON
    except TypeError:
        return items


def typed_dict_of(fields: Mapping[str, Form], required: Set[str]) -> Form:
    declared = {
        name: core.typed_dict_field(form.schema, required=name in required)
        for name, form in fields.items()
    }
    return Form(core.typed_dict_schema(declared, strict=True, extra_behavior="forbid"))


def dataclass_of(kind: Any, fields: Mapping[str, Form], required: Set[str]) -> Form:
    stored = typed_dict_of(fields, required).schema

    def parts_of(value: Any) -> dict[str, Any]:
        # A subclass would be read back as its base, without the fields it adds.
        if type(value) is not kind:
            raise WrongType.of(f"must be a {kind.__name__}", value)
        return {name: getattr(value, name) for name in fields}

    def made(values: dict[str, Any]) -> Any:
        try:
            return kind(**values)
        except Exception as error:  # the constructor is the application's code
            what = f"cannot be made a {kind.__name__}: its constructor raised"
            raise Refusal(f"{what} {type(error).__name__}") from error

    return _two_ways(before(parts_of, stored), after(made, stored))


@dataclass(frozen=True, slots=True)
class Encoder:
    """How the application writes and reads values of a type of its own."""

    write: Callable[[Any], Any]
    """Returns plain JSON data."""
    read: Callable[[Any], Any]
    """Makes the value of this data."""


def own_type_of(kind: type, encoder: Encoder) -> Form:
    """A type of the application, which its encoder writes and reads."""

    def write(value: Any) -> Any:
        # A subclass would be read back as its base.
        if type(value) is not kind:
            raise WrongType.of(f"must be a {kind.__name__}", value)
        return JsonCopy().of(_called(encoder.write, value, kind, "written"))

    def read(value: Any) -> Any:
        return _called(encoder.read, value, kind, "read")

    return _two_ways(with_function(write), with_function(read))


def _called(function: Callable[[Any], Any], value: Any, kind: type, how: str) -> Any:
    try:
        return function(value)
    except Exception as error:  # the application's code
        what = f"cannot be {how} as a {kind.__name__}: its encoder raised"
        raise Refusal(f"{what} {type(error).__name__}") from error


def model_of(kind: Any) -> Form:
    """A pydantic model, which pydantic writes and reads by its own rules."""

    def read(value: Any) -> Any:
        # As JSON text: pydantic accepts a text for a date in JSON even in a strict model.
        try:
            return kind.model_validate_json(json.dumps(value))
        except ValueError as error:
            raise Refusal(f"does not validate as a {kind.__name__}") from error

    def write(value: Any) -> Any:
        if type(value) is not kind:
            raise WrongType.of(f"must be a {kind.__name__}", value)
        encoded = value.model_dump(mode="json", by_alias=True, round_trip=True)
        read(encoded)
        return encoded

    return _two_ways(with_function(write), with_function(read))


def literal_of(literals: Sequence[Any]) -> Form:
    """One of the given values.  ``1`` and ``True`` are different: the type counts too."""
    plain = [each.value if isinstance(each, Enum) else each for each in literals]
    if not PLAIN_TYPES.issuperset(map(type, plain)):
        raise CannotTravel("has a bytes literal: use str, int, bool, None or enum literals")
    written = {(type(each), each): value for each, value in zip(literals, plain, strict=True)}
    read = {(type(value), value): each for each, value in zip(literals, plain, strict=True)}
    if len(read) < len(written):
        raise CannotTravel("has two literals that JSON writes alike: keep one of them")
    reason = "must be one of " + ", ".join(map(str, plain))

    def find(table: Mapping[Any, Any], refusal: type[Refusal], value: Any) -> Any:
        try:
            return table[type(value), value]
        except (KeyError, TypeError):
            raise refusal(reason) from None

    return _two_ways(
        with_function(partial(find, written, WrongType)),
        with_function(partial(find, read, NotDeclared)),
    )


def member_of(kind: type[Enum]) -> Form:
    """An enum member, written as its value, so that renaming a member breaks no stored job."""
    if not kind.__members__:
        raise CannotTravel(f"is {kind.__name__}, an enum without members: annotate the one you use")
    for member in kind:
        value = member.value
        if type(value) not in PLAIN_TYPES or (type(value) is float and not abs(value) < 1e16):
            raise CannotTravel(
                f"is an enum whose member {member.name} has a value JSON cannot keep: "
                "give its members str or int values"
            )

    def read(value: Any) -> Enum:
        if type(value) not in PLAIN_TYPES:
            raise WrongType.of(f"must be the value of a {kind.__name__}", value)
        try:
            member = kind(value)
            if (type(member.value) is bool) is not (type(value) is bool):  # 1 == True
                raise ValueError
        except ValueError:
            raise NotDeclared(f"holds a value that no {kind.__name__} has") from None
        return member

    return _two_ways(
        after(lambda member: member.value, core.is_instance_schema(kind)), with_function(read)
    )


def one_of(members: Sequence[Form], types: str, compiled: Compile) -> Form:
    """A value of one of several types."""
    others = [member for member in members if member is not NONE]
    natives = frozenset[type]().union(*(member.natives for member in members))
    has_numbers = natives >= {int, float}
    if len(others) == 1:
        form = Form(core.nullable_schema(others[0].schema))
    else:
        form = _union(members, types, compiled, has_numbers)
    # Values skip the schema by their exact type only if every member is native.
    if not all(member.natives for member in members):
        natives &= {NoneType}
    return replace(form, natives=natives - {float} if has_numbers else natives)


def _union(members: Sequence[Form], types: str, compiled: Compile, has_numbers: bool) -> Form:
    """A value of one of several types, where JSON does not show which: ``UUID | str`` is a text.

    So a value is written only after a check that it would be read back unchanged.
    """

    def any_of(choices: Iterable[tuple[int, Form]]) -> Schema:
        numbered = [
            after(partial(lambda number, value: (number, value), number), each.schema)
            for number, each in choices
        ]
        return core.union_schema(list(numbered), mode="left_to_right")

    # An int is a float too, and an enum may be a str.
    by_type = sorted(
        enumerate(members), key=lambda each: (not each[1].natives, float in each[1].natives)
    )
    # Native types are tried last: for str, every text is valid.
    reads = any_of(sorted(by_type, key=lambda each: bool(each[1].natives)))
    read_back = cache(lambda: compiled(reads).validate_python)

    def write(value: Any, choose: Any) -> Any:
        number, encoded = _chosen(types, value, choose)
        other, back = _chosen(types, encoded, read_back())
        if number != other and not (type(back) is type(value) and back == value):
            raise Refusal(
                f"would come back as a {type(back).__name__}: JSON writes both alike, "
                "so give the parameter one type"
            )
        return exact_if_whole(encoded) if type(encoded) is float and has_numbers else encoded

    def read(value: Any, choose: Any) -> Any:
        return _chosen(types, value, choose)[1]

    wrap = core.no_info_wrap_validator_function
    return _two_ways(wrap(write, any_of(by_type)), wrap(read, reads))


def _chosen(types: str, value: Any, choose: Callable[[Any], tuple[int, Any]]) -> tuple[int, Any]:
    """Return the number of the member that accepts a value, and the value that it returns."""
    try:
        return choose(value)
    except ValidationError as error:
        refusal = refusal_of(error)
        if isinstance(refusal, WrongType):
            raise WrongType.of(f"must be {types}", value) from None
        refusal.steps.clear()  # they name the members of the union
        raise refusal from refusal.__cause__
