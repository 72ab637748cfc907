"""The due times of waiting jobs, for tests."""

from datetime import datetime

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.repository.rows import Upcoming
from pgqueue.statements import due_times


class DueTimes:
    """The due times of all waiting jobs, behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def waiting_queues(self) -> list[str]:
        """The names of all queues that have messages, also of jobs that wait to be admitted."""
        return [row[0] for row in self._executor.execute(due_times.waiting_queues())]

    def seconds_until(self, moment: datetime) -> float:
        """How many seconds a time is away."""
        parameters = {"moment": moment}
        return float(self._executor.execute(due_times.seconds_until(), parameters).scalar_one())

    def bring_forward(self, seconds: float) -> None:
        """Make the jobs that are not due yet due this much earlier."""
        self._executor.execute(due_times.bring_forward(), {"seconds": seconds})
        self._executor.execute(due_times.bring_admissions_forward(), {"seconds": seconds})

    def next_admission(self) -> Upcoming:
        """Whether a job that waits to be admitted is due, and when the next one will be."""
        return Upcoming(*self._executor.execute(due_times.next_admission()).one())
