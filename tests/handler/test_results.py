"""A handler's return value is kept as JSON data, or a note of why it is not."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from payloads import payload_for
from pydantic import BaseModel
from sqlalchemy import Engine

from pgqueue import Job, PayloadError, PgQueue, Retry, Snooze, Worker
from pgqueue.handler.error_reports import MAX_RESULT_BYTES, storable_result


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@dataclass
class Receipt:
    id: UUID
    total: Decimal
    at: datetime | None = None


class Model(BaseModel):
    bought: date


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (1.5, 1.5),
        (7.205759403792138e16, 72057594037921376),
        ("x", "x"),
        (10**400, 10**400),
        ([1, (2, [3])], [1, [2, [3]]]),
        (OrderedDict(a=1), {"a": 1}),
        ({1}, [1]),
        (Level.LOW, 1),
        (Colour.RED, "red"),
        ("a\0b\ud800", "a\ufffdb\ufffd"),
        ({"k\0": "v\0"}, {"k\ufffd": "v\ufffd"}),
        (b"\x00", "AA=="),
        (date(2024, 1, 1), "2024-01-01"),
        (
            Receipt(UUID(int=7), Decimal("1.50")),
            {"id": str(UUID(int=7)), "total": "1.50", "at": None},
        ),
        (Model(bought=date(2024, 1, 1)), {"bought": "2024-01-01"}),
    ],
    ids=repr,
)
def test_a_result_is_kept_as_json_data(value: Any, kept: Any) -> None:
    result = storable_result(value)

    assert result == kept
    assert type(result) is type(kept)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2024, 1, 1, tzinfo=UTC),
        date(2024, 1, 1),
        timedelta(days=-1, microseconds=5),
        UUID(int=7),
        Decimal("1E+3"),
        b"\xff",
        Colour.RED,
        Receipt(UUID(int=7), Decimal(1), datetime(2024, 1, 1, tzinfo=UTC)),
    ],
    ids=repr,
)
def test_a_result_is_written_as_an_argument_of_its_type_is(value: Any) -> None:
    encoded = payload_for(type(value)).encode({"value": value})

    assert storable_result(value) == encoded["value"]


class Spiteful:
    def __repr__(self) -> str:
        raise RuntimeError("foreign code")

    __str__ = __iter__ = __repr__

    @property  # type: ignore[misc]  # mypy wants __class__ to be the class it is
    def __class__(self) -> Any:
        raise RuntimeError("foreign code")


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "object: object has no form in JSON"),
        ([threading.Lock()], "list: lock has no form in JSON"),
        ({1: 2}, "dict: must have only str keys, not int"),
        (float("nan"), "float: is nan"),
        ([float("inf")], "list: is inf"),
        (10**5000, "int: .*digits: pass it as bytes"),
        (circular(), "list: nests deeper"),
        ("x" * MAX_RESULT_BYTES, "str: larger than"),
        (["x" * 1000] * 1100, "list: larger than"),
        ("é" * (MAX_RESULT_BYTES // 2), "str: larger than"),
        ((number for number in range(3)), "generator: "),
        (Spiteful(), "Spiteful: looking at it raised RuntimeError"),
        (lambda: None, "function: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_a_result_cannot_be_stored_is_said(value: Any, said: str) -> None:
    with pytest.raises(PayloadError, match=f"^{said}"):
        storable_result(value)


def test_a_result_far_too_large_is_given_up_early() -> None:
    endless: dict[str, Any] = {}
    shared: Any = [1] * 10
    for _ in range(60):
        shared = [shared] * 10
    endless["shared"] = shared
    started = time.process_time()

    with pytest.raises(PayloadError, match="larger than"):
        storable_result(endless)

    assert time.process_time() - started < 5


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
        max_leaves=10,
    )
)
def test_any_result_is_strict_json(value: Any) -> None:
    try:
        result = storable_result(value)
    except PayloadError:
        return
    text = json.dumps(result, allow_nan=False, ensure_ascii=False)

    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")


async def _async_rows() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((n for n in range(3)), "returned a generator, none of which has run"),
        (_async_rows(), "returned a generator, none of which has run"),
        (Snooze, "returned the class Snooze, which says nothing of this job; return what it makes"),
    ],
)
def test_what_cannot_be_meant_as_a_result_fails_the_job(
    engine: Engine, returned: Any, words: str
) -> None:
    queue = PgQueue(engine)

    @queue.task(name="export", retry=Retry.never())
    def decorated() -> Any:
        return returned

    id = decorated.delay().id

    assert Worker(queue).run_until_empty(timeout=60) == {"failed": 1}
    with queue.session() as session:
        error = session.get_one(Job, id).last_error
    assert words in str(error)
