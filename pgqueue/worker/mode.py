"""What the two modes do differently: their interface to the supervisor."""

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
"""An attempt whose thread does not return, and its outcome."""


class Slot(WorkerThread):
    """A thread that runs handlers, one at a time."""

    def __init__(self) -> None:
        super().__init__(name="slot")
        self.current: RunningAttempt | None = None


class WorkerMode(Protocol):
    """How slots get jobs, and how outcomes are written."""

    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def threads(self) -> Sequence[WorkerThread]:
        """The threads of this mode besides the slots."""

    @property
    def finished(self) -> Event:
        """Set when no job is left, in a worker that was asked to end then."""

    def use_isolation(self, level: IsolationLevel) -> None:
        """Run transactional handlers at this level, which is that of the application's engine."""

    def start(self) -> None:
        """Start slots and threads."""

    def replace_slot(self, place: int) -> Slot:
        """Replace a slot that does not return with a new slot; returns the old one."""

    def end_claims(self) -> None:
        """Stop claiming, and end a claim that waits for a lock on a table."""

    def end_attempts(self, ended: Sequence[Ended], *, seconds: float) -> list[Ended]:
        """End the transactions of attempts; returns attempts whose transactions did not end."""

    def settle(self, ended: Sequence[Ended]) -> None:
        """Settle attempts whose transactions were ended, if ending them has not done so."""

    def close(self, *, seconds: float) -> None:
        """Write what is left, within ``seconds``, and close all connections."""
