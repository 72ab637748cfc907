"""A loop that has several duties, each at its own time, on one connection."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from threading import Event

from sqlalchemy import Connection, Engine

from pgqueue.worker.loop import NEVER, Loop
from pgqueue.worker.outage import Outage


class Duty(ABC):
    """Something that a worker does now and then."""

    def __init__(self, *, first_in: float = 0.0, repeat_after: float) -> None:
        """
        Args:
            first_in: Seconds until the first step.
            repeat_after: Seconds until a step that has failed is repeated.
        """
        self.due_at = time.monotonic() + first_in
        """When the next step is due.  Other threads change it by :meth:`DutyList.wake_for`."""
        self.repeat_after = repeat_after

    def puts_off(self) -> float:
        """Seconds by which a step that is due is put off; 0.0 if it is not.

        Asked before each step.  A step that asks the database nothing would look like an answer.
        """
        return 0.0

    @abstractmethod
    def step(self, connection: Connection) -> float:
        """Do what is to be done; returns the seconds until the next step."""


class Every(Duty):
    """Calls a function of the connection every so many seconds."""

    def __init__(self, seconds: float, function: Callable[[Connection], object]) -> None:
        super().__init__(first_in=seconds, repeat_after=seconds)
        self._function = function

    def step(self, connection: Connection) -> float:
        self._function(connection)
        return self.repeat_after


class DutyList(Loop):
    """A step of the loop is a step of the duty that has been due for the longest time.

    A duty that fails is left alone until its ``repeat_after`` has passed, and stops no other.  One
    that takes long delays the others, so a list has duties that may wait for each other.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Mapping[str, str],
        outage: Outage,
        duties: Sequence[Duty],
        *,
        name: str,
        stopping: Event | None = None,
        patience: float = NEVER,
    ) -> None:
        self._duties = duties
        super().__init__(
            engine,
            settings,
            outage,
            name=name,
            stopping=stopping,
            first_in=self._seconds_to_next(),
            patience=patience,
        )

    def wait_for_step(self) -> bool:
        """Wait until a duty is due, and not put off."""
        while super().wait_for_step():
            duty = self._next()
            if duty.due_at <= time.monotonic():
                due_at, duty.due_at = duty.due_at, NEVER
                if not (seconds := duty.puts_off()):
                    duty.due_at = due_at
                    return True
                self.wake_for(duty, seconds)  # a wake meanwhile wins
            self.wake(self._seconds_to_next())
        return False

    def step(self, connection: Connection) -> float:
        duty = self._next()
        if duty.due_at <= time.monotonic():
            seconds, duty.due_at = duty.repeat_after, NEVER
            try:
                seconds = duty.step(connection)
            finally:
                self.wake_for(duty, seconds)  # a wake during the step that is sooner wins
        return self._seconds_to_next()

    def seconds_after_failure(self) -> float:
        return self._seconds_to_next()

    def wake_for(self, duty: Duty, seconds: float = 0.0) -> None:
        """Run the next step of a duty in so many seconds, or sooner.  Any thread may call it."""
        with self._changed:
            duty.due_at = min(duty.due_at, time.monotonic() + seconds)
        self.wake(seconds)

    def _next(self) -> Duty:
        return min(self._duties, key=attrgetter("due_at"))

    def _seconds_to_next(self) -> float:
        return self._next().due_at - time.monotonic()
