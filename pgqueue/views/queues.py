"""The queues: how much waits, what goes in and out, and who serves them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection

from pgqueue.checks import ALL_QUEUES
from pgqueue.filter_line import STATUSES, line_of
from pgqueue.models import JobStatus
from pgqueue.operations import Operations
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.health import Health
from pgqueue.repository.pauses import Pauses
from pgqueue.repository.queue_minutes import DepthPoint as DepthPoint
from pgqueue.repository.queue_minutes import FirstDue, QueueCount, QueueFlow, QueueMinutes
from pgqueue.repository.queue_minutes import LastCount as LastCount
from pgqueue.repository.workers import HeldJob as HeldJob
from pgqueue.repository.workers import WorkerState as WorkerState
from pgqueue.rules.served_queues import is_pattern, serves
from pgqueue.tasks import queues_of

NONE = QueueCount(0, 0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue."""

    name: str
    count: QueueCount
    """Of the last count of a worker; zeros for a queue that is not in it."""
    oldest_due: timedelta | None
    """How long the next job to start has been due, now."""
    flow: QueueFlow | None
    """What goes in and out; None if that is not known."""
    workers: int
    """How many live workers serve it."""
    paused_at: datetime | None
    jobs: Mapping[JobStatus, int | None] | None = None
    """Its jobs by status, if they were counted now; None for a status that was not."""

    @property
    def line(self) -> str:
        """The filter for its jobs: those that are due, or else those that wait."""
        wait = STATUSES["due"] if self.count.due else STATUSES["pending"]
        return line_of(JobFilter(queue=self.name, **(wait if self.count.waiting else {})))

    @property
    def empty_in(self) -> timedelta | None:
        """When no job is due if this goes on; None if that is not known, or none is due."""
        return self.flow.empty_in(self.count.backlog) if self.flow and self.count.backlog else None

    @property
    def is_growing(self) -> bool:
        return self.flow is not None and self.flow.in_per_minute > 1.05 * self.flow.out_per_minute


@dataclass(frozen=True, slots=True)
class QueueViews:
    """Queues, when their jobs were counted last, and all workers."""

    queues: Sequence[QueueView]
    counted: LastCount | None
    first_due: Sequence[FirstDue]
    workers: Sequence[WorkerState]
    all_paused_at: datetime | None
    """When all queues were paused; the ``paused_at`` of a queue is that of its own pause."""

    def busiest(self, most: int) -> "QueueViews":
        """Return the queues with the largest backlogs.

        Args:
            most: How many at most.

        Returns:
            These queues, in the order of their names.
        """
        first = sorted(self.queues, key=lambda row: (-row.count.backlog, row.name))[:most]
        return replace(self, queues=sorted(first, key=lambda row: row.name))

    def counted_now(self, connection: Connection, *, succeeded: bool) -> "QueueViews":
        """The queues that have jobs or are paused, with their jobs counted now.

        The oldest due job may be one that a limit blocks.  Only with ``succeeded`` the succeeded
        jobs are counted, which reads all jobs.
        """
        health = Health(connection)
        uncounted = {} if succeeded else {JobStatus.SUCCEEDED: None}
        jobs: dict[str, dict[JobStatus, int | None]] = {}
        for count in health.counts(succeeded=succeeded):
            jobs.setdefault(count.queue, {})[JobStatus(count.status)] = count.jobs
        oldest: dict[str, timedelta] = {}
        for depth in health.depths():
            if depth.oldest_due is not None:
                oldest[depth.queue] = max(depth.oldest_due, oldest.get(depth.queue, timedelta(0)))
        known = {one.name: one for one in self.queues}
        wanted = {*jobs, *(one.name for one in self.queues if one.paused_at is not None)}
        found = [
            replace(
                known.get(name) or QueueView(name, NONE, None, None, 0, None),
                oldest_due=oldest.get(name),
                jobs={status: jobs.get(name, {}).get(status, 0) for status in JobStatus}
                | uncounted,
            )
            for name in sorted(wanted)
        ]
        return replace(self, queues=found)


def read_queues(
    queue: Operations, connection: Connection, names: Collection[str] | None
) -> QueueViews:
    """All queues that have or lately had jobs, or that are declared, served or paused."""
    minutes = QueueMinutes(connection)
    counted, flows, first_due = minutes.latest(), minutes.flows(), minutes.first_due()
    counts = {} if counted is None else counted.queues
    oldest = {one.queue: one.since for one in reversed(first_due)}
    paused = Pauses(connection).queues()
    all_paused_at = paused.pop(ALL_QUEUES, None)
    workers = queue.workers(connection)
    served = {name for worker in workers for name in worker.queues if not is_pattern(name)}
    declared = queues_of(queue.tasks.values())
    found = {*counts, *flows, *oldest, *paused, *served, *declared}
    return QueueViews(
        [
            QueueView(
                name,
                counts.get(name, NONE),
                oldest.get(name),
                flows.get(name),
                sum(serves(worker.queues, name) for worker in workers if worker.is_live),
                paused.get(name),
            )
            for name in sorted(found if names is None else found & {*names})
        ],
        counted,
        first_due,
        workers,
        all_paused_at,
    )
