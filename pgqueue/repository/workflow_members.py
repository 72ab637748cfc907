"""The jobs of a workflow as a graph, and the job whose failure has stopped it."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.models import Job, JobStatus
from pgqueue.repository.blocked import WHEN, is_skipped
from pgqueue.repository.tables import (
    FAILED,
    Executor,
    among,
    array_of,
    batch_jobs,
    batches,
    count_rows,
    dependencies,
    jobs,
    pg,
)
from pgqueue.repository.workflows import what_follows

BATCH = sa.bindparam("batch_id", type_=sa.BigInteger)


@cache
def members() -> sa.Executable:
    """The jobs of a workflow that still exist, each with the nodes for which it waits."""
    after = sa.select(dependencies.c.after_id).where(dependencies.c.job_id == jobs.c.id)
    return (
        sa.select(
            jobs.c.id,
            jobs.c.task,
            Job.status,
            pg.jsonb_extract_path_text(jobs.c.meta, WHEN),
            sa.func.array(after.scalar_subquery()),
        )
        .join_from(batches, batch_jobs, batch_jobs.c.batch_id == batches.c.id)
        .join(jobs, jobs.c.id == batch_jobs.c.job_id)
        .where(batches.c.id == BATCH, batches.c.is_workflow)
        .order_by(jobs.c.id)
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )


@cache
def group_members() -> sa.Executable:
    """The jobs of the groups of a workflow."""
    return (
        sa.select(-batch_jobs.c.batch_id, batch_jobs.c.job_id)
        .join_from(batches, batch_jobs, batch_jobs.c.batch_id == batches.c.id)
        .where(batches.c.workflow_id == BATCH)
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )


@cache
def first_failure() -> sa.Executable:
    """The job of a batch that has failed first.  Reads all of its jobs."""
    return (
        sa.select(jobs.c.id, jobs.c.task, jobs.c.last_error)
        .join_from(batch_jobs, jobs, jobs.c.id == batch_jobs.c.job_id)
        .where(batch_jobs.c.batch_id == BATCH, jobs.c.outcome == FAILED)
        .order_by(jobs.c.finished_at, jobs.c.id)
        .limit(sa.literal_column("1"))
    )


@cache
def number_of_skipped() -> sa.Executable:
    """How many of the jobs that follow these were skipped."""
    return sa.select(count_rows()).where(jobs.c.id == among(what_follows()), is_skipped())


class Member(NamedTuple):
    """A job of a workflow."""

    id: int
    task: str
    status: JobStatus
    when: str | None
    """The outcomes with which it runs, of what it waits for, as its meta notes them."""
    after: Sequence[int]
    """The nodes for which it waits: a job by its id, a group by its id with a minus sign."""


class FirstFailure(NamedTuple):
    """The job of a batch that has failed first, and what its requeue brings back."""

    job_id: int
    task: str
    error: str | None
    skipped: int
    """How many jobs were skipped that wait for it."""


class WorkflowMembers:
    """The jobs of workflows behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def members(self, workflow_id: int, *, limit: int) -> list[Member]:
        """The first jobs of a workflow; none of a batch that is no workflow."""
        return list(map(Member._make, self._read(members(), workflow_id, limit=limit)))

    def groups(self, workflow_id: int, *, limit: int) -> list[tuple[int, int]]:
        """The groups of a workflow as nodes, each with one of its jobs."""
        return [tuple(row) for row in self._read(group_members(), workflow_id, limit=limit)]

    def first_failure(self, batch_id: int) -> FirstFailure | None:
        """The job that has failed first; None if none is failed."""
        failed = self._read(first_failure(), batch_id).first()
        if failed is None:
            return None
        given = {"job_ids": array_of([str(failed.id)])}
        skipped = self._executor.execute(number_of_skipped(), given).scalar_one()
        return FirstFailure(failed.id, failed.task, failed.last_error, skipped)

    def _read(self, statement: sa.Executable, batch_id: int, **parameters: Any) -> sa.Result[Any]:
        return self._executor.execute(statement, {"batch_id": batch_id, **parameters})
