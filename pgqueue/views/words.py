"""Values in words, and the sentences that more than one face says about jobs, each written once."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from shlex import quote
from typing import NamedTuple

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
UNKNOWN = "–"  # noqa: RUF001
LONGEST_ERROR = 200
"""Characters of an error in a sentence."""


def span(value: timedelta | float | None) -> str:
    """A duration in its largest unit, with two digits; a dash for one that is unknown."""
    if value is None:
        return UNKNOWN
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if abs(seconds) < 1:
        return f"{float(f'{seconds * 1000:.2g}'):g} ms"
    size, unit = next((size, unit) for size, unit in UNITS if abs(seconds) >= size)
    amount = seconds / size
    digits = 1 if abs(amount) < 10 and unit != "min" else 0
    return f"{amount:.{digits}f} {unit}"


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
    """The sentence.  Times and spans are for the reader to write as it writes others."""
    remedy: str | None = None
    """The command that changes this; None if there is none."""

    def __str__(self) -> str:
        return "".join(map(in_words, self.words))

    def more(self, *words: Part) -> "Reason":
        """The same with the rest of the sentence."""
        return Reason((*self.words, *words), self.remedy)


def in_words(part: Part) -> str:
    """Write a part of a sentence; a time in UTC."""
    match part:
        case datetime():
            return part.astimezone(UTC).isoformat(sep=" ", timespec="seconds")
        case timedelta():
            return span(part)
    return str(part)


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
