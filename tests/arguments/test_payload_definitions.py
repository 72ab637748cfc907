"""A task whose arguments cannot travel is refused when it is defined."""

import collections.abc
import enum
import subprocess
import sys
from dataclasses import InitVar, dataclass, field
from datetime import date
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

import pytest
from payloads import payload_for, payload_of, travelled, written
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeAliasType

from pgqueue.arguments import Payload
from pgqueue.errors import ArgumentsError, PayloadError, TaskDefinitionError

T = TypeVar("T")


class Mapped:
    __mapper__ = "as SQLAlchemy sets it"


class Session: ...


class Point(NamedTuple):
    x: int


class Odd(enum.Enum):
    ONE = (1, 2)


class Endless(enum.Enum):
    ONE = float("inf")


@dataclass
class Holder:
    inner: Mapped


@dataclass
class Seeded:
    seed: InitVar[int]
    value: int = 0


@dataclass
class Unresolved:
    value: "NoSuchType"  # type: ignore[name-defined]  # noqa: F821  # the mistake under test


@dataclass
class Checked:
    value: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        if self.value < 0:
            raise RuntimeError("not of this world")
        self.double = self.value * 2


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (object, "object"),
        (collections.abc.Callable[[], None], "Callable"),
        (Mapped, "ORM class Mapped.*primary key"),
        (list[Mapped], "ORM class Mapped"),
        (Session, "injected: put it first"),
        (Point, "Point"),
        (dict[int, str], "keys of int"),
        (Odd, "member ONE"),
        (Endless, "member ONE"),
        (enum.Enum, "without members"),
        (Literal[b"x"], "bytes literal"),
        (T, "~T"),
        (type[int], "type"),
        (Holder, "field Holder.inner, which is the ORM class Mapped"),
        (Seeded, "constructor"),
        (Unresolved, "NoSuchType"),
        ("int", "int"),
        ([int], "int"),
    ],
    ids=str,
)
def test_an_annotation_that_cannot_travel_is_refused_by_name(annotation: Any, said: str) -> None:
    with pytest.raises(TaskDefinitionError, match=f"task mail.welcome: parameter 'value' .*{said}"):
        payload_for(annotation)


def test_an_injected_parameter_may_be_positional_only_and_of_any_type() -> None:
    def task(session: Session, /, user_id: int) -> None: ...

    assert payload_of(task, injected=1).names == ("user_id",)


def test_a_parameter_without_annotation_takes_plain_json() -> None:
    def task(value, other=None): ...  # type: ignore[no-untyped-def]  # what is under test

    assert written(payload_of(task), [1, {"a": None}]) == '{"value":[1,{"a":null}]}'


def test_a_builtin_that_hides_its_signature_is_refused() -> None:
    with pytest.raises(TaskDefinitionError, match=r"task mail\.welcome: .*plain function"):
        Payload(type, task_name="mail.welcome", injected=0, hints={})


Ids = TypeAliasType("Ids", list[UUID])


def test_what_a_constructor_derives_is_derived_again() -> None:
    assert travelled(Checked, Checked(2)).double == 4


def test_a_constructor_that_raises_is_a_damaged_argument() -> None:
    with pytest.raises(PayloadError, match="Checked: its constructor raised RuntimeError"):
        payload_for(Checked).loads('{"value": {"value": -1}}')


class Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    sku: str = Field(alias="SKU")
    bought: date
    price: float | None = None


class Rich(Line):
    extra: int = 0


class Forgetful(BaseModel):
    secret: str = Field(exclude=True)


def test_a_pydantic_model_that_would_change_is_refused() -> None:
    line = Line(SKU="x", bought=date(2024, 1, 1))

    with pytest.raises(ArgumentsError, match="must be a Line, not Rich"):
        written(payload_for(Line), Rich(SKU="x", bought=date(2024, 1, 1)))
    with pytest.raises(PayloadError, match="does not validate as a Forgetful"):
        written(payload_for(Forgetful), Forgetful(secret="x"))
    with pytest.raises(PayloadError, match="NUL"):
        written(payload_for(Line), line.model_copy(update={"sku": "a\0b"}))


def test_a_damaged_pydantic_model_is_refused() -> None:
    with pytest.raises(PayloadError, match="stored argument value does not validate as a Line"):
        payload_for(Line).loads('{"value": {"SKU": 7}}')


def test_pydantic_is_imported_by_the_application_only() -> None:
    script = "import sys, pgqueue.arguments; sys.exit('pydantic' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
