"""The progress of jobs, as their handlers report it."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.repository.fast_path import fetch
from pgqueue.repository.tables import AS_IT_STANDS, Executor, document, jobs, leases

REPORT = (
    sa.column("job_id", sa.BigInteger),
    sa.column("message_id", sa.BigInteger),
    sa.column("attempt", sa.SmallInteger),
    sa.column("worker_id", sa.Uuid),
    sa.column("progress", JSONB),
)


@cache
def write_progress() -> sa.Executable:
    """Write the progress of several jobs; returns the jobs that were written.

    Skips a job whose row is locked: this statement must wait for no handler's transaction.  Skips
    an attempt whose job has a later one, by its lease or by the number of attempts it has used.
    An attempt that has just ended has no lease, and its last progress is still written.
    """
    given = document("reports", *REPORT)
    is_own = sa.and_(
        leases.c.message_id == given.c.message_id,
        leases.c.attempt == given.c.attempt,
        leases.c.worker_id == given.c.worker_id,
    )
    # A scalar sub-query: as an anti-join, all leases might be read.
    later = sa.select(leases.c.target_id).where(
        leases.c.target_id == given.c.job_id, sa.not_(is_own)
    )
    unlocked = (
        sa.select(jobs.c.id)
        .where(jobs.c.id == given.c.job_id, jobs.c.attempts <= given.c.attempt)
        .with_for_update(key_share=True, skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("unlocked")
    )
    job = (
        sa.select(unlocked.c.id, given.c.progress)
        .select_from(given.join(unlocked, sa.true()))
        .where(later.scalar_subquery().is_(None))
        .cte("job")
    )
    return (
        sa.update(jobs)
        .where(jobs.c.id == job.c.id)
        .values(progress=job.c.progress)
        .returning(jobs.c.id)
    )


class ProgressReports:
    """What handlers report of their jobs, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def write(self, reports: Sequence[dict[str, Any]]) -> set[int]:
        """Write the progress of some jobs; returns those that were written."""
        parameters = {"reports": json.dumps(reports)}
        return {row[0] for row in fetch(self._executor, write_progress(), parameters)}
