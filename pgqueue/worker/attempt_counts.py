"""Counts in memory how attempts begin and end, for the statistics.

The threads that settle attempts add one number a task and batch, and nothing is written here:
:mod:`pgqueue.worker.duties.minutes` writes every ten seconds what was counted.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from operator import attrgetter
from random import random
from threading import Lock
from typing import Any

from pgqueue.events import AttemptOutcome
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.ended import error_of
from pgqueue.outcomes import (
    ErrorReport,
    Exhausted,
    Expired,
    Interrupted,
    Outcome,
    Released,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued
from pgqueue.repository.tables import CRASH, INTERRUPTION
from pgqueue.repository.task_minutes import DURATIONS, ENDED, MINUTE
from pgqueue.rules.histogram import bucket_of
from pgqueue.worker.server_clock import ServerClock

MOST_MEASURED = 8
"""Attempts of one claim whose times are measured, on average: each takes some microseconds.
To measure all of them costs a tenth of the speed of a drain."""
MOST_TASKS = 1000
"""Tasks that are counted by name; the others are counted together."""
MOST_ERRORS = 500
"""Kinds of errors that are counted apart between two writes; the others are counted together."""
MOST_COUNTERS = 20_000
"""Numbers that are kept while they cannot be written; what is new then is not counted."""
OTHER = "other"
"""The task, and the error, of those that are counted together."""
LONGEST_MESSAGE = 500

NOT_STARTED = (Released, Unreadable, Exhausted, Expired)
"""Outcomes of attempts whose handlers were not called."""

Key = tuple[int, str, str, int]
"""Minute since 1970, task, column, and for a duration its bucket."""


def attempts_to_skip(one_in: int) -> int:
    """Draw how many attempts to skip before one is measured, if one of so many is, by chance.

    As if each were drawn alone, so that a new number may be drawn at any time; a thousand quick
    jobs need eight draws.
    """
    if one_in == 1:
        return 0
    return int(log(1.0 - random()) / log(1.0 - 1.0 / one_in))  # noqa: S311  # no secret


@dataclass(frozen=True, slots=True)
class LastError:
    """The last error of a group."""

    error: ErrorReport
    job_id: int
    at: float


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted and is not written yet."""

    numbers: Counter[Key] = field(default_factory=Counter)
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Failed attempts by fingerprint and task."""
    started: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Claimed jobs by minute and queue."""
    last_errors: dict[tuple[int, str], LastError] = field(default_factory=dict)

    def minutes(self) -> list[dict[str, Any]]:
        """The numbers as rows, one for each minute and task."""
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        for (minute, task, column, bucket), number in self.numbers.items():
            row = rows.setdefault(
                (minute, task),
                {"minute": minute, "task": task}
                | dict.fromkeys(ENDED, 0)
                | {name: [] for name in DURATIONS},
            )
            if column in DURATIONS:
                counts = row[column]
                counts.extend([0] * (bucket + 1 - len(counts)))
                counts[bucket] += number
            else:
                row[column] += number
        return list(rows.values())

    def queues(self) -> list[dict[str, Any]]:
        """The claimed jobs as rows, one for each minute and queue."""
        return [
            {"minute": minute, "queue": queue, "started": number}
            for (minute, queue), number in self.started.items()
        ]

    def groups(self) -> list[dict[str, Any]]:
        """The errors as rows, one for each group."""
        return [
            {
                "fingerprint": fingerprint,
                "task": task,
                "error_type": last.error.type,
                "place": last.error.place,
                "attempts": self.errors[fingerprint, task],
                "at": last.at,
                "job_id": last.job_id,
                "message": last.error.message[:LONGEST_MESSAGE],
            }
            for (fingerprint, task), last in self.last_errors.items()
        ]


class AttemptCounts:
    """Told by the ledger; the slots, the claimer, the settler and upkeep call it at once."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._counted = Counted()
        self._tasks: set[str] = set()
        self._one_in = 1
        """Of so many attempts one is measured, chosen by chance."""
        self.to_skip = 0
        """How many attempts come before the next one that is measured; the ledger counts down."""

    def claimed(self, jobs: Sequence[Claimed]) -> None:
        """Count the jobs of a claim, by queue.  Of many, some are measured."""
        one_in = max(len(jobs) // MOST_MEASURED, 1)
        if one_in != self._one_in:
            self._one_in, self.to_skip = one_in, attempts_to_skip(one_in)
        by_queue = Counter(map(attrgetter("queue"), jobs))
        minute = int(self._clock.now() // MINUTE)
        with self._lock:
            started = self._counted.started
            for queue, number in by_queue.items():
                if (minute, queue) in started or len(started) < MOST_COUNTERS:
                    started[minute, queue] += number

    def succeeded(self, tasks: Iterable[str]) -> None:
        """Count a batch of attempts that have succeeded, by their tasks."""
        by_task = Counter(tasks)
        minute = int(self._clock.now() // MINUTE)
        with self._lock:
            for task, number in by_task.items():
                self._add(minute, task, "succeeded", 0, number)

    def ended(self, claimed: Claimed, outcome: Outcome, recorded: AttemptOutcome) -> None:
        """Count one attempt; ``recorded``: its outcome as the tables have it."""
        if recorded is AttemptOutcome.RELEASED:
            return
        error = None
        if recorded in (AttemptOutcome.RETRIED, AttemptOutcome.FAILED):
            error = INTERRUPTION if isinstance(outcome, Interrupted) else error_of(outcome)
        self._count(claimed.task, claimed.job_id, recorded, error)

    def rescued(self, attempts: Iterable[Rescued]) -> None:
        """Count the crashes of other workers that this worker has recorded."""
        for attempt in attempts:
            recorded = AttemptOutcome(attempt.outcome or AttemptOutcome.RETRIED)
            self._count(attempt.task, attempt.job_id, recorded, CRASH)

    def ran(self, run: RunningAttempt, outcome: Outcome | None) -> None:
        """Measure how long an attempt ran and how long its job waited.

        ``outcome``: None if it is settled already.
        """
        counts_for = self._one_in
        self.to_skip = attempts_to_skip(counts_for)
        if isinstance(outcome, NOT_STARTED):
            return
        claimed, (started_at, ended_at) = run.claimed, run.times
        minute = int(self._clock.now() // MINUTE)
        waited = self._clock.waited(claimed, started_at)
        with self._lock:
            self._add(minute, claimed.task, "ran", bucket_of(ended_at - started_at), counts_for)
            if waited is not None:
                self._add(minute, claimed.task, "waited", bucket_of(waited), counts_for)

    def take(self) -> Counted:
        """Take what was counted, to write it; what is counted from now on is apart."""
        with self._lock:
            counted, self._counted = self._counted, Counted()
        return counted

    def give_back(self, counted: Counted) -> None:
        """Put back what could not be written."""
        with self._lock:
            self._counted.numbers.update(counted.numbers)
            self._counted.errors.update(counted.errors)
            self._counted.started.update(counted.started)
            for key, last in counted.last_errors.items():
                self._counted.last_errors.setdefault(key, last)

    def _count(
        self, task: str, job_id: int, recorded: AttemptOutcome, error: ErrorReport | None
    ) -> None:
        now = self._clock.now()
        column = recorded.value if recorded.value in ENDED else "other"
        with self._lock:
            self._add(int(now // MINUTE), task, column, 0, 1)
            if error is None:
                return
            key, errors = (error.fingerprint, task), self._counted.errors
            if key not in errors and len(errors) >= MOST_ERRORS:
                error = ErrorReport(OTHER, error.message, "")
                key = (error.fingerprint, OTHER)
            errors[key] += 1
            self._counted.last_errors[key] = LastError(error, job_id, now)

    def _add(self, minute: int, task: str, column: str, bucket: int, number: int) -> None:
        if task not in self._tasks:
            if len(self._tasks) < MOST_TASKS:
                self._tasks.add(task)
            else:
                task = OTHER
        key, numbers = (minute, task, column, bucket), self._counted.numbers
        if key in numbers or len(numbers) < MOST_COUNTERS:
            numbers[key] += number
