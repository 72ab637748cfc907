"""Payloads for tests: of a function, or of one parameter of any annotation."""

import typing
from collections.abc import Callable
from typing import Any

from pgqueue.arguments import Payload


def payload_of(function: Callable[..., Any], *, injected: int = 0) -> Payload:
    hints = typing.get_type_hints(function)
    return Payload.of(function, task_name="mail.welcome", injected=injected, hints=hints)


def payload_for(annotation: Any) -> Payload:
    def task(value: Any) -> None: ...

    hints = {"value": annotation}
    return Payload.of(task, task_name="mail.welcome", injected=0, hints=hints)


def written(payload: Payload, *args: Any, **kwargs: Any) -> str:
    return payload.dumps(payload.encode(payload.bind(args, kwargs)))


def travelled(annotation: Any, value: Any) -> Any:
    """What a handler gets for a value of an annotated parameter."""
    payload = payload_for(annotation)
    return payload.loads(written(payload, value))["value"]
