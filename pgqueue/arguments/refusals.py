"""Why a value or an annotation has no JSON form, and where the value is in its argument."""

from typing import Any

from pgqueue.errors import PayloadError


class OtherVersion(PayloadError):
    """Stored arguments do not fit the signature: another version of the task may read them."""


class CannotTravel(Exception):
    """An annotation has no form in JSON; the message says what to write instead."""


class Refusal(Exception):
    """A value cannot be stored or read; the path is built as the exception propagates."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str | int] = []

    @property
    def path(self) -> str:
        """Write the path as in Python: ``.lines[1]['unit price']``."""
        return "".join(
            f".{step[:60]}" if isinstance(step, str) and step.isidentifier() else f"[{step!a:.62}]"
            for step in self.steps
        )


class NotDeclared(Refusal):
    """A field or a member that the declared type does not have; another version of it may."""


class WrongType(Refusal):
    """The value is not of the declared type.  Names types, never the value, which may be secret."""

    def __init__(self, expects: str, value: Any, reason: str = "") -> None:
        remedy = "convert the value, or annotate the parameter with the type it has"
        if hasattr(type(value), "__mapper__"):
            remedy = (
                "an ORM object belongs to its session; pass its primary key, load it in the task"
            )
        super().__init__(reason or f"must be {expects}, not {type(value).__name__}: {remedy}")
