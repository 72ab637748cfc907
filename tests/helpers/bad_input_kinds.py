"""The kinds of bad input, by the way it comes in, with what is expected of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, eq=False)
class Damaged:
    """A row changed behind our back, beside good jobs, and how its job ends.

    ``refused`` is the constraint that does not take the change, and ``found`` the rules that the
    check reports as broken until somebody does what the doctor says.  A job without an outcome
    waits.  What is ``late`` befalls a job that has ended; ``jobs`` counts it and its copies.
    """

    way: ClassVar[str] = "R"
    name: str
    change: str = ""
    args: str = ""
    outcome: str | None = "succeeded"
    said: str = ""
    result: int | None = 1
    refused: str = ""
    found: frozenset[str] = frozenset()
    late: bool = False
    jobs: int = 1


@dataclass(frozen=True, eq=False)
class Ending:
    """What a handler does wrong, beside one that does not, and what is recorded of it.

    ``said`` matches the error of each attempt that went wrong, ``hidden`` no word of it, and
    ``logged`` a line of the log.
    """

    way: ClassVar[str] = "H"
    name: str
    handler: Callable[..., Any]
    outcome: str | None = "failed"
    attempts: int = 1
    said: str = ""
    result: Any = None
    hidden: str = ""
    logged: str = ""
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
