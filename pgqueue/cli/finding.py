"""The doctor's findings."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

SHOWN = 20
"""How many broken rows, tasks, queues and sessions are named individually."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but needs attention."""
    WRONG = "wrong"
    """Makes the exit code 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of the doctor."""

    level: Level
    subject: str
    detail: str


def age(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name}"
    return f"{seconds} s"
