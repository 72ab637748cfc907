"""Types of arguments, and payloads of a function or of one parameter of any annotation."""

import enum
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NotRequired, TypedDict

from pgqueue.arguments import Payload


class Colour(enum.Enum):
    RED = "red"
    DEEP = 3
    HALF = 0.5
    YES = True
    NONE = None


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal
    tags: frozenset[str] = frozenset()


@dataclass
class Basket:
    items: list[Item]
    bought_at: datetime | None = None
    parent: "Basket | None" = None
    count: int = field(init=False, default=0)


class Address(TypedDict):
    street: str
    moved_at: NotRequired[date]


def payload_of(function: Callable[..., Any], *, injected: int = 0) -> Payload:
    hints = typing.get_type_hints(function)
    return Payload(function, task_name="mail.welcome", injected=injected, hints=hints)


def payload_for(annotation: Any) -> Payload:
    def task(value: Any) -> None: ...

    hints = {"value": annotation}
    return Payload(task, task_name="mail.welcome", injected=0, hints=hints)


def written(payload: Payload, *args: Any, **kwargs: Any) -> str:
    return payload.dumps(payload.encode(payload.bind(args, kwargs)))


def travelled(annotation: Any, value: Any) -> Any:
    """What a handler gets for a value of an annotated parameter."""
    payload = payload_for(annotation)
    return payload.loads(written(payload, value))["value"]
