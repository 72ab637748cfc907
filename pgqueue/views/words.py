"""Values in words, and the sentences that more than one face says about jobs, each written once."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from math import inf
from shlex import quote
from typing import Any, NamedTuple

from pgqueue.workflows import OUTCOMES_OF

UNITS = (
    (0.001, "ms", 1000.0),
    (1.0, "s", 60.0),
    (60.0, "min", 60.0),
    (3600.0, "h", 24.0),
    (86400.0, "d", inf),
)
"""Of each unit, its seconds, its name, and how many of it are one of the next."""
UNKNOWN = "–"  # noqa: RUF001
LONGEST_ERROR = 200
"""Characters of an error in a sentence."""


def span(value: timedelta | float | None) -> str:
    """A duration in its largest unit, rounded to two digits or to a whole number; a dash if it is
    unknown."""
    if value is None:
        return UNKNOWN
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    for size, unit, next_unit in UNITS:
        amount = _rounded(seconds / size, unit)
        if abs(float(amount)) < next_unit:
            break
    return f"{amount} {unit}"


def _rounded(amount: float, unit: str) -> str:
    if unit == "ms":
        return f"{float(f'{amount:.2g}'):g}"
    return f"{amount:.0f}" if unit == "min" or abs(amount) >= 9.95 else f"{amount:.1f}"


def jobs_wait(number: int) -> str:
    return "1 job waits" if number == 1 else f"{number:,} jobs wait"


def jobs_are_due(number: int, since: timedelta) -> str:
    jobs = "1 job is due" if number == 1 else f"{number:,} jobs are due"
    return f"{jobs} (since {span(since)})"


class Kind(StrEnum):
    """What a name in a sentence is the name of."""

    JOB = "job"
    QUEUE = "queue"
    TASK = "task"
    WORKER = "worker"
    LIMIT = "limit"


class Name(NamedTuple):
    """A name in a sentence, to which a page may link."""

    kind: Kind
    name: str
    """The name; of a job or a worker, its id."""
    text: str
    """How the sentence says it."""

    def __str__(self) -> str:
        return self.text


Part = str | Name | datetime | timedelta


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a job does not run, or what happens to it."""

    words: tuple[Part, ...]
    """The parts of the sentence.  A page or a command writes times and spans in its own form."""
    remedy: str | None = None
    """The command that changes this; None if there is none."""

    def __str__(self) -> str:
        return "".join(map(in_words, self.words))

    def more(self, *words: Part) -> "Reason":
        """The reason, with more words at the end of its sentence."""
        return Reason((*self.words, *words), self.remedy)


def in_words(part: Part) -> str:
    """Write a part of a sentence; a time in UTC."""
    match part:
        case datetime():
            return part.astimezone(UTC).isoformat(sep=" ", timespec="seconds")
        case timedelta():
            return span(part)
    return str(part)


def when_in_words(outcomes: Sequence[Any]) -> str:
    """Return the ``when=`` of a job of a workflow, from the outcomes with which it runs."""
    named = set(map(str, outcomes))
    words = (when for when, of_it in OUTCOMES_OF.items() if set(of_it) == named)
    return next(words, ", ".join(map(str, outcomes)))


def nobody_serves(queue: str) -> Reason:
    words = ("no live worker serves queue ", Name(Kind.QUEUE, queue, queue))
    return Reason(words, f"pgqueue worker --queues {quote(queue)}")


def unknown_task(task: str) -> Reason:
    return Reason(("this application has no task ", Name(Kind.TASK, task, task)))


def undeclared(limit: str) -> Reason:
    name = Name(Kind.LIMIT, limit, limit)
    return Reason(("no worker has declared limit ", name, ": start one whose code does"))


def unreadable(error: str | None) -> Reason:
    return Reason(("no worker could read the arguments", *quoted(error)))


def quoted(error: str | None) -> tuple[Part, ...]:
    """The first line of an error, after a colon."""
    first = (error or "").strip().partition("\n")[0]
    cut = first if len(first) <= LONGEST_ERROR else f"{first[: LONGEST_ERROR - 3]}..."
    return (f": {cut}",) if cut else ()
