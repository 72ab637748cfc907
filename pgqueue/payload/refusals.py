"""Why a value or an annotation cannot travel as JSON."""

from typing import Any


class CannotTravel(Exception):
    """An annotation has no form in JSON; the message says what to write instead."""


class Refusal(Exception):
    """A value cannot travel; says why, and where inside the argument it sits.

    The path is built on the way out, so that a value that is accepted pays nothing for it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""

    def found_under(self, step: str) -> None:
        self.path = step + self.path


class WrongType(Refusal):
    """The value is not of the type the parameter declares."""


class BadValue(Refusal):
    """The value has the right type, but JSON or PostgreSQL cannot keep it."""


def wrong_type(expects: str, value: Any) -> WrongType:
    """Name the two types, never the value: it may be a secret, or unable to print itself."""
    return WrongType(f"must be {expects}, not {type(value).__name__}: {_remedy_for(value)}")


def key_step(key: str) -> str:
    """Write one key of a path as Python would: ``.price``, or ``['unit price']``."""
    if key.isidentifier():
        return f".{key[:60]}"
    return f"[{key[:60]!a}]"


def _remedy_for(value: Any) -> str:
    if hasattr(type(value), "__mapper__"):
        return "an ORM object belongs to its session; pass its primary key, load it in the task"
    return "convert the value, or annotate the parameter with the type it has"
