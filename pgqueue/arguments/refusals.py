"""Why a value or an annotation has no JSON form, and where the value is in its argument."""

from typing import Any

from pydantic_core import ErrorDetails, ValidationError

from pgqueue.errors import PayloadError

MAX_DEPTH = 64
"""How deep lists and dicts may nest within one argument."""

TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels, or contains itself: pass a flatter value"


class OtherVersion(PayloadError):
    """Stored arguments do not fit the signature: another version of the task may read them."""


class CannotTravel(Exception):
    """An annotation has no form in JSON; the message says what to write instead."""


class Refusal(ValueError):
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

    @classmethod
    def of(cls, what: str, value: Any) -> "WrongType":
        remedy = "convert the value, or annotate the parameter with the type it has"
        if (annotation := _ANNOTATIONS.get(type(value).__name__)) is not None:
            remedy += f", as {annotation}"
        if hasattr(type(value), "__mapper__"):
            remedy = (
                "an ORM object belongs to its session; pass its primary key, load it in the task"
            )
        return cls(f"{what}, not {type(value).__name__}: {remedy}")


def refusal_of(error: Exception) -> Refusal:
    """Say in our words why a value is refused: those of pydantic-core may quote the value."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ValidationError):
        found = map(_in_our_words, error.errors(include_url=False))
        return min(found, key=lambda refusal: _ORDER.index(type(refusal)))
    if isinstance(error, RecursionError):
        return Refusal(TOO_DEEP)
    refusal = Refusal(f"cannot be read: looking at it raised {type(error).__name__}")
    refusal.__cause__ = error
    return refusal


_ORDER = (NotDeclared, Refusal, WrongType)
"""The error gives the refusal whose type comes first here."""


def _in_our_words(found: ErrorDetails) -> Refusal:
    steps = list(found["loc"])
    raised = found.get("ctx", {}).get("error")
    # A type that cannot read a text raises a ValueError; any other is of the application's code.
    if isinstance(raised, Refusal) or (raised and type(found["input"]) is not str):
        refusal = refusal_of(raised)
    else:
        refusal = _refusal_at(steps, found)
    refusal.steps[:0] = steps
    return refusal


def _refusal_at(steps: list[int | str], found: ErrorDetails) -> Refusal:
    """Remove from the path what the words name."""
    match found["type"], steps[-1:]:
        case "missing", [str(name)]:
            steps.pop()
            return NotDeclared(f"has no field {name!r}")
        case "extra_forbidden", [name]:
            steps.pop()
            return NotDeclared(f"has {str(name)[:60]!a}, which its type does not declare")
        case "missing", _:
            return Refusal("is missing: the tuple is shorter than its annotation")
        case "too_long", _:
            return Refusal("is a tuple that is longer than its annotation")
        case "recursion_loop", _:
            return Refusal(TOO_DEEP)
        case (_, ["[key]"]) | ("invalid_key", _):
            del steps[-2 if steps[-1] == "[key]" else -1 :]
            name = type(found["input"]).__name__
            return WrongType(f"must have only str keys, not {name}: convert its keys")
        case "is_instance_of", _:
            return WrongType.of(f"must be a {found['ctx']['class']}", found["input"])
        case kind, _ if kind.endswith("_type") or kind == "none_required":
            what = _TYPES.get(kind) or found["msg"].removeprefix("Input should be ")
            return WrongType.of(f"must be {what}", found["input"])
    return Refusal("holds text that is not of the declared type")


_SCALARS = ("UUID", "datetime", "date", "time", "timedelta", "Decimal", "bytes")
_ANNOTATIONS = {
    "tuple": "tuple[int, str]",
    "set": "set[str]",
    "frozenset": "frozenset[str]",
    **{name: f"{name}, or list[{name}]" for name in _SCALARS},
}
"""What to write for a value whose type can travel, by the name of the type."""

_TYPES = {
    "string_type": "a str",
    "int_type": "an int",
    "float_type": "a float",
    "bool_type": "a bool",
    "list_type": "a list",
    "dict_type": "a dict",
}
