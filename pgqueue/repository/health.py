"""Queries the server for problems around the tables."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.models import JobStatus
from pgqueue.repository.rows import StatusCount
from pgqueue.statements import counts, health

LIMITS = ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout")
"""Settings by which the server ends long statements and transactions."""


class Waiting(NamedTuple):
    """Due jobs that no worker runs, by task or by queue."""

    name: str
    jobs: int
    since: timedelta


class Unreadable(NamedTuple):
    """Jobs of a task that wait because no worker could read their arguments so far."""

    task: str
    jobs: int
    since: timedelta
    """How long ago a worker has met the first of them."""
    reason: str
    """What this worker has reported of the other."""


class QueueDepth(NamedTuple):
    """The waiting jobs of a queue."""

    queue: str
    waiting: int
    due: int
    oldest_due: timedelta | None
    """How long the oldest due job has been due; None if no job is due."""


class Setting(NamedTuple):
    name: str
    value: str
    source: str
    """Where the value was set: a file, the database, the role, the session."""


class RoleSetting(NamedTuple):
    role: str
    name: str
    value: str


class OldTransaction(NamedTuple):
    """A transaction that keeps vacuum from removing newer dead rows, in every table."""

    who: str
    state: str
    seconds: float
    remedy: str


class TableHealth(NamedTuple):
    """The statistics of a table."""

    name: str
    live: int
    dead: int
    vacuumed_at: datetime | None


class Health:
    """The server behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def counts_but_succeeded(self) -> list[StatusCount]:
        """The number of jobs by queue and status, without succeeded jobs."""
        rows = self._executor.execute(counts.count_jobs_but_succeeded())
        return [StatusCount(queue, JobStatus(status), count) for queue, status, count in rows]

    def about_jobs(self) -> int:
        """The approximate number of jobs, from the server's statistics."""
        return max(0, int(self._executor.execute(counts.estimate_jobs()).scalar_one()))

    def unknown_tasks(self, known: Iterable[str]) -> list[Waiting]:
        """Due jobs whose tasks are not in ``known``."""
        parameters = {"known": sorted(known)}
        rows = self._executor.execute(health.due_jobs_of_unknown_tasks(), parameters)
        return [Waiting(*row) for row in rows]

    def unreadable(self) -> list[Unreadable]:
        """Jobs whose arguments no worker could read so far, by task."""
        return [Unreadable(*row) for row in self._executor.execute(health.unreadable())]

    def unpruned_tasks(self, known: Iterable[str]) -> dict[str, int]:
        """Tasks not in ``known``, and the number of their ended jobs."""
        parameters = {"known": sorted(known)}
        rows = self._executor.execute(health.ended_jobs_of_unknown_tasks(), parameters)
        return {row[0]: row[1] for row in rows}

    def depths(self) -> list[QueueDepth]:
        """The queues in which jobs wait."""
        return [QueueDepth(*row) for row in self._executor.execute(health.depths())]

    def unserved_queues(self) -> list[Waiting]:
        """Due jobs in queues that no live worker serves."""
        rows = self._executor.execute(health.due_jobs_nobody_serves())
        return [Waiting(*row) for row in rows]

    def settings(self, names: Iterable[str]) -> dict[str, Setting]:
        rows = self._executor.execute(health.settings(), {"names": list(names)})
        return {row[0]: Setting(*row) for row in rows}

    def settings_of_other_roles(self, names: Iterable[str]) -> list[RoleSetting]:
        rows = self._executor.execute(health.settings_of_others(), {"names": list(names)})
        return [RoleSetting(*row) for row in rows]

    def old_transactions(self, age: timedelta) -> list[OldTransaction]:
        """What keeps vacuum from removing rows that have been dead for ``age``."""
        rows = self._executor.execute(health.old_transactions(), {"age": age})
        return [OldTransaction(row[0], row[1], float(row[2]), row[3]) for row in rows]

    def tables_without_autovacuum(self) -> list[str]:
        return [row[0] for row in self._executor.execute(health.tables_without_autovacuum())]

    def tables(self) -> list[TableHealth]:
        rows = self._executor.execute(health.tables())
        return [TableHealth(*row) for row in rows]

    def notification_queue_usage(self) -> float:
        return float(self._executor.execute(health.notification_queue_usage()).scalar_one())

    def is_standby(self) -> bool:
        return bool(self._executor.execute(health.is_standby()).scalar())
