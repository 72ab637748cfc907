"""The rows that claims, settles and queries over all jobs return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pgqueue.models import JobStatus


class Claimed(NamedTuple):
    """A job that this worker may run.  Sorts in the order in which jobs start.

    Time and arguments are text as the database wrote it, not parsed yet.
    """

    priority: int
    run_at: str
    message_id: int
    job_id: int
    queue: str
    task: str
    args: str
    max_attempts: int
    attempt: int
    crashes: int
    meta: str | None = None
    """Read only if the worker asks for it."""

    @property
    def is_alone(self) -> bool:
        """Whether the job must not wait in the job buffer, as ``message_queue.alone`` says."""
        return self.crashes > 0 or self.max_attempts == 1


class ClaimCursor(NamedTuple):
    """A queue and a priority, and the key after which a claim looks."""

    queue: str
    priority: int
    run_at: str
    message_id: int


class Upcoming(NamedTuple):
    """The waiting messages, read without a lock."""

    is_due: bool
    """Whether a message is due; another transaction may hold it."""
    seconds: float | None
    """Seconds until the next one is due; None if there is none."""


class Ages(NamedTuple):
    """How long the first due jobs of some pairs have waited.  Times are as the database writes
    them."""

    oldest: Mapping[tuple[str, int], str]
    """When the first job of each (queue, priority) was due, if one is."""
    periods_ago: Sequence[str]
    """The times that lie one, two and more periods back."""


NOTHING = Upcoming(is_due=False, seconds=None)


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of one claim."""

    rows: list[Claimed]
    taken: int
    """Messages found: more than ``rows`` if some had no unfinished job and were dropped."""
    read_at: str
    quiet_until: str
    """One second before the claim, by the database's clock."""
    passed: Sequence[int] = ()
    """Priorities of the messages that a claim ahead has left, because their jobs must not wait."""


class Settled(NamedTuple):
    """An attempt that was ours to settle, and the outcome of its job if it has ended."""

    job_id: int
    outcome: str | None


class Rescued(NamedTuple):
    """An attempt of a dead worker that was recorded as crashed."""

    job_id: int
    outcome: str | None
    """How the job has ended; None if it goes on."""
    task: str
    queue: str
    attempt: int
    max_attempts: int


class StatusCount(NamedTuple):
    queue: str
    status: JobStatus
    jobs: int


@dataclass(frozen=True, slots=True)
class Violation:
    """A row that breaks an invariant."""

    rule: str
    job_id: int | None
    detail: str

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.rule}; {self.detail}"
