"""The state of one job, for a page that asks often: one statement, plain columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.errors import JobNotFound
from pgqueue.models import ENDED, Job, JobStatus
from pgqueue.repository.nodes import job_not_found
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import Executor, batch_jobs, batches, jobs, leases, pg
from pgqueue.repository.waits import jobs_ahead


@cache
def state_of_job() -> sa.Executable:
    """A job with its status, its attempt and its position; no row if it does not exist."""
    lease = leases.alias("lease")
    waits = sa.and_(
        jobs.c.outcome.is_(None),
        lease.c.attempt.is_(None),
        jobs.c.run_at <= pg.statement_timestamp(),
    )
    return (
        sa.select(
            jobs.c.id,
            Job.status.expression,
            jobs.c.attempts,
            jobs.c.max_attempts,
            jobs.c.progress,
            jobs.c.result,
            jobs.c.last_error,
            jobs.c.cancel_requested_at.is_not(None),
            sa.case((waits, jobs_ahead())),
            lease.c.attempt,
            *(moment(jobs.c[name]) for name in ("run_at", "started_at", "finished_at")),
        )
        .select_from(jobs)
        .outerjoin(lease, lease.c.target_id == jobs.c.id)
        .where(jobs.c.id == sa.bindparam("job_id", type_=sa.BigInteger))
    )


@cache
def jobs_of_batch() -> sa.Executable:
    """The jobs of a batch, in the order of their ids, and how many they were at its end; of a job
    that has been deleted, the id."""
    columns = (jobs.c.task, jobs.c.outcome, jobs.c.result, jobs.c.last_error)
    return (
        sa.select(batches.c.total, batch_jobs.c.job_id, *columns)
        .select_from(batches)
        .join(batch_jobs, batch_jobs.c.batch_id == batches.c.id)
        .outerjoin(jobs, jobs.c.id == batch_jobs.c.job_id)
        .where(batches.c.id == sa.bindparam("batch_id", type_=sa.BigInteger))
        .order_by(batch_jobs.c.job_id)
    )


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job, as read by :meth:`PgQueue.job_state`."""

    id: int
    status: JobStatus
    attempt: int
    """The attempt that runs, or the number of attempts that have run."""
    max_attempts: int
    progress: Any
    """What the handler last reported: ``done``, ``total`` and ``note``; None if nothing."""
    result: Any
    error: str | None
    """The error of the attempt that failed last."""
    is_cancel_requested: bool
    position: int | None
    """How many jobs of its queue are claimed before this one, at most 1000; None if it is not due,
    does not wait, or waits for room in a limit."""
    run_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class GatheredJob:
    """A job for whose end a handler has waited by :meth:`JobContext.gather`."""

    id: int
    task: str
    status: JobStatus | None
    """Its outcome; None if it has not ended."""
    result: Any
    error: str | None
    """The error of the attempt that failed last."""

    def __str__(self) -> str:
        error = f": {self.error}" if self.error else ""
        return f"job {self.id} {self.task} {self.status}{error}"


class GatheredBatch(NamedTuple):
    """A batch for whose end a handler waits."""

    has_ended: bool
    """Once; a job may have been requeued since."""
    jobs: Sequence[GatheredJob]
    """In the order of their ids."""


class JobStates:
    """The states of jobs behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def of(self, job_id: int) -> JobState:
        """Raises JobNotFound."""
        row = self._executor.execute(state_of_job(), {"job_id": job_id}).one_or_none()
        if row is None:
            raise job_not_found(self._executor, job_id)
        id, status, attempts, most, progress, result, error, cancel, position, running, *times = row
        if status != JobStatus.PENDING:
            position = None
        return JobState(
            id,
            JobStatus(status),
            running or attempts,
            most,
            progress,
            result,
            error,
            cancel,
            position,
            *times,
        )

    def of_batch(self, batch_id: int) -> GatheredBatch:
        """The jobs of a batch that has some.

        Raises:
            JobNotFound: They, or some of them, have been deleted.
        """
        found = []
        rows = self._executor.execute(jobs_of_batch(), {"batch_id": batch_id}).all()
        for _, id, task, outcome, result, error in rows:
            if task is None:
                raise JobNotFound(
                    f"job {id} of batch {batch_id} has been deleted, and its result with it; let "
                    "its task keep its jobs longer"
                )
            status = None if outcome is None else JobStatus(outcome)
            found.append(GatheredJob(id, task, status, result, error))
        total = rows[0][0] if rows else None
        if not rows or total not in (None, len(rows)):  # it is deleted in portions
            raise JobNotFound(f"the jobs of batch {batch_id} have been deleted; keep jobs longer")
        return GatheredBatch(total is not None, found)
