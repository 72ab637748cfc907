"""What the doctor says of one thing it has looked at."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

SHOWN = 20
"""Broken rows to name one by one; as many tasks, queues and sessions."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and somebody should look at it."""
    WRONG = "wrong"
    """The exit code is 1 because of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor has looked at."""

    level: Level
    subject: str
    detail: str


def age(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name}"
    return f"{seconds} s"
