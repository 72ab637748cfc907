"""Arguments that earlier versions stored stay readable.

``stored_arguments.json`` holds one row for every kind of annotation: the text that commit 07db76f
wrote, and the text that PostgreSQL returned for it.  It is never written anew: whoever changes how
an argument is stored adds rows.
"""

import enum
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pytest
from payloads import Access, Address, Basket, Colour, Item, payload_for, written
from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType
from typing_extensions import TypedDict as ExtendedTypedDict

from pgqueue import Secret

STORED: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "stored_arguments.json").read_text()
)


class Suit(enum.StrEnum):
    HEARTS = "hearts"


class Level(enum.IntEnum):
    LOW = 1


class Place(ExtendedTypedDict, total=False):
    town: str


class Line(BaseModel):
    sku: str = Field(alias="SKU")
    bought: date
    price: float | None = None


UserId = NewType("UserId", int)
Ids = TypeAliasType("Ids", list[UUID])

ID = UUID("12345678-1234-5678-1234-567812345678")
MOMENT = datetime(2024, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
BEFORE_ZONES = timezone(timedelta(minutes=53, seconds=28))
ITEM = Item("x", Decimal("1.50"), frozenset({"b", "a"}))

VALUES: Mapping[str, tuple[Any, Any]] = {
    "str": (str, 'é "\\u0000" \U0001f600'),
    "int": (int, 10**30),
    "float": (float, 0.1),
    "float, whole": (float, 3.0),
    "float, large": (float, 7.205759403792138e16),
    "bool": (bool, True),
    "None": (None, None),
    "Any": (Any, [1, 2.5, 1e16, "x", None, {"k": [True]}]),
    "list without items": (list, [1, "x"]),
    "dict without items": (dict, {"a": [1]}),
    "UUID": (UUID, ID),
    "datetime in UTC": (datetime, MOMENT),
    "datetime in a zone": (datetime, MOMENT.astimezone(timezone(timedelta(hours=2)))),
    "datetime with an offset of seconds": (datetime, datetime(1890, 1, 1, tzinfo=BEFORE_ZONES)),
    "date": (date, date(2024, 2, 3)),
    "time": (time, time(4, 5, 6, 7)),
    "time with an offset": (time, time(4, 5, tzinfo=UTC)),
    "timedelta": (timedelta, timedelta(days=1, seconds=2.5)),
    "timedelta, negative": (timedelta, timedelta(seconds=-1)),
    "Decimal": (Decimal, Decimal("1.50")),
    "Decimal with an exponent": (Decimal, Decimal("1E+3")),
    "bytes": (bytes, b"\x00\xff\xfe>?"),
    "Enum": (Colour, Colour.RED),
    "Enum of int": (Colour, Colour.DEEP),
    "Enum of float": (Colour, Colour.HALF),
    "Enum of bool": (Colour, Colour.YES),
    "Enum of None": (Colour, Colour.NONE),
    "StrEnum": (Suit, Suit.HEARTS),
    "IntEnum": (Level, Level.LOW),
    "Flag": (Access, Access.READ | Access.WRITE),
    "Flag without members": (Access, Access(0)),
    "list": (list[UUID], [ID]),
    "dict": (dict[str, Decimal], {"a": Decimal("0.1")}),
    "tuple": (tuple, (1, "x")),
    "tuple of one type": (tuple[date, ...], (date(2024, 2, 3),)),
    "tuple of a length": (tuple[int, str], (1, "x")),
    "set": (set[int], {2, 1}),
    "frozenset": (frozenset[date], frozenset({date(2024, 2, 3)})),
    "union with None": (int | None, None),
    "union": (UUID | int | None, ID),
    "union of texts": (UUID | str, "not a UUID"),
    "union of a datetime and a date": (datetime | date, date(2024, 2, 3)),
    "union of numbers": (int | float, 3),
    "union of dataclasses": (Basket | Item, ITEM),
    "union of lists": (list[int] | list[str], ["x"]),
    "Literal": (Literal["a", 1, True, None], True),
    "Literal of an enum": (Literal[Suit.HEARTS], Suit.HEARTS),
    "Annotated": (Annotated[UserId, "of the payer"], UserId(7)),
    "NewType": (UserId, UserId(7)),
    "type alias": (Ids | None, [ID]),
    "Secret": (Secret[str], "x"),
    "dataclass": (Item, ITEM),
    "dataclass in itself": (Basket, Basket([ITEM], MOMENT, Basket([]))),
    "TypedDict": (Address, {"street": "x"}),
    "TypedDict of typing_extensions": (Place, {"town": "x"}),
    "pydantic model": (Line, Line(SKU="x", bought=date(2024, 2, 3))),
    "pydantic models": (list[Line] | None, [Line(SKU="x", bought=date(2024, 2, 3), price=1.0)]),
}


def test_there_is_a_row_for_every_kind_of_annotation() -> None:
    assert STORED.keys() == VALUES.keys()


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("text", ["written", "returned"])
def test_a_stored_argument_is_read(kind: str, text: str) -> None:
    annotation, value = VALUES[kind]

    read = payload_for(annotation).loads(STORED[kind][text])["value"]

    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("kind", VALUES)
def test_an_argument_is_stored_in_the_same_words(kind: str) -> None:
    annotation, value = VALUES[kind]

    assert written(payload_for(annotation), value) == STORED[kind]["written"]
