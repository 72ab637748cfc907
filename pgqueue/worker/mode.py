"""What the two modes do differently, as the supervisor sees it."""

from collections.abc import Sequence
from threading import Event
from typing import Protocol

from sqlalchemy.engine.interfaces import IsolationLevel

from pgqueue.outcomes import Outcome
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.threads import WorkerThread

LAST_CLAIM = 0.5
"""Seconds for a claim to end before it is cancelled."""

Ended = tuple[RunningAttempt, Outcome]
"""An attempt whose thread does not come back, and what has become of it."""


class Slot(WorkerThread):
    """A thread that runs handlers, one at a time."""

    def __init__(self) -> None:
        super().__init__(name="slot")
        self.current: RunningAttempt | None = None


class WorkerMode(Protocol):
    """How jobs come to the slots, and how what has become of them is written down."""

    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def threads(self) -> Sequence[WorkerThread]:
        """Those of this mode beside the slots."""

    @property
    def finished(self) -> Event:
        """Set when nothing is left to do, in a worker that was asked to end then."""

    def use_isolation(self, level: IsolationLevel) -> None:
        """Run transactional handlers at this level, that of the application's engine."""

    def start(self) -> None:
        """Start slots and threads."""

    def replace_slot(self, place: int) -> Slot:
        """Put a new slot into the place of one that does not return; returns the old one."""

    def end_claims(self) -> None:
        """Have no job claimed any more, also by a claim that waits for a lock on a table."""

    def end_attempts(self, ended: Sequence[Ended], *, seconds: float) -> list[Ended]:
        """End the transactions of attempts; returns those that the database did not let end."""

    def settle(self, ended: Sequence[Ended]) -> None:
        """Settle attempts whose transactions were ended, where that is a step of its own."""

    def close(self, *, seconds: float) -> None:
        """Write down what is left, within so long, and close all connections."""
