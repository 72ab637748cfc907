"""Stored arguments that are not what the signature says fail their own job, with a reason."""

import sys
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pytest
from payloads import payload_for

from pgqueue.errors import PayloadError


class Suit(Enum):
    HEARTS = "hearts"


@dataclass
class Line:
    price: float


@dataclass
class Order:
    lines: list[Line]
    parent: "Order | None" = None


@pytest.mark.parametrize(
    "stored",
    [
        "null",
        "7",
        '"text"',
        "[]",
        "",
        "{",
        '{"value": 1}{}',
        "{}",
        '{"value": 1, "other": 2}',
        '{"value": "1"}',
        '{"value": true}',
        '{"value": 1.0}',
        '{"value": null}',
        '{"value": NaN}',
        '{"value": Infinity}',
        '{"value": 1e400}',
        '{"value": ' + "1" * 5000 + "}",
        '{"value": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"value": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda stored: stored[:30],
)
def test_damaged_stored_arguments_are_refused(stored: str) -> None:
    with pytest.raises(PayloadError, match=r"task mail\.welcome: (the )?stored argument"):
        payload_for(int).loads(stored)


@pytest.mark.parametrize(
    ("annotation", "stored"),
    [
        (UUID, '"x"'),
        (datetime, '"2024-01-01T00:00:00"'),
        (datetime, "7"),
        (date, '"2024-13-01"'),
        (Decimal, '"x"'),
        (Decimal, '"NaN"'),
        (bytes, '"é"'),
        (bytes, '"abc"'),
        (float, "1" + "0" * 400),
        (float, "NaN"),
        (float, "1e400"),
        (Any, "[1e400]"),
        (Suit, '"spades"'),
        (Suit, "[]"),
        (Literal["a"], '"b"'),
        (set[Any], "[[]]"),
        (tuple[int, int], "[1]"),
        (list[int], '[1, "2"]'),
        (dict[str, int], "[]"),
        (int | None, '"x"'),
        (Line, "[]"),
        (Line, '{"price": 1.0, "__class__": "os.system"}'),
        (Line, "{}"),
        (Any, "[" * 65 + "]" * 65),
        (Order, '{"lines": [], "parent": ' * 70 + "null" + "}" * 70),
    ],
)
def test_a_stored_value_that_is_not_of_its_type_is_refused(annotation: Any, stored: str) -> None:
    with pytest.raises(PayloadError, match="stored argument"):
        payload_for(annotation).loads(f'{{"value": {stored}}}')


def test_stored_text_that_is_no_text_is_refused() -> None:
    missing: Any = None

    with pytest.raises(PayloadError, match="not JSON"):
        payload_for(int).loads(missing)


def test_nothing_is_imported_by_a_payload() -> None:
    before = set(sys.modules)

    payload_for(Any).loads('{"value": {"py/object": "antigravity", "module": "this"}}')

    assert set(sys.modules) == before
