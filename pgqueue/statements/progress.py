"""What running handlers report of their progress."""

from functools import cache

from sqlalchemy import (
    BigInteger,
    Executable,
    SmallInteger,
    Uuid,
    and_,
    column,
    not_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.statements.tables import AS_IT_STANDS, document, jobs, leases

REPORT = (
    column("job_id", BigInteger),
    column("message_id", BigInteger),
    column("attempt", SmallInteger),
    column("worker_id", Uuid),
    column("progress", JSONB),
)


@cache
def write_progress() -> Executable:
    """Write the progress of several jobs; returns the jobs that were written.

    Skips a job whose row is locked: this statement must wait for no handler's transaction.  Skips
    an attempt whose job has a later one, by its lease or by the number of attempts it has used.
    An attempt that has just ended has no lease, and its last progress is still written.
    """
    given = document("reports", *REPORT)
    is_own = and_(
        leases.c.message_id == given.c.message_id,
        leases.c.attempt == given.c.attempt,
        leases.c.worker_id == given.c.worker_id,
    )
    # A scalar sub-query: as an anti-join, all leases might be read.
    later = select(leases.c.target_id).where(leases.c.target_id == given.c.job_id, not_(is_own))
    unlocked = (
        select(jobs.c.id)
        .where(jobs.c.id == given.c.job_id, jobs.c.attempts <= given.c.attempt)
        .with_for_update(key_share=True, skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("unlocked")
    )
    job = (
        select(unlocked.c.id, given.c.progress)
        .select_from(given.join(unlocked, true()))
        .where(later.scalar_subquery().is_(None))
        .cte("job")
    )
    return (
        update(jobs)
        .where(jobs.c.id == job.c.id)
        .values(progress=job.c.progress)
        .returning(jobs.c.id)
    )
