"""The fence: only the worker that still holds the lease may write an attempt's outcome.

The lease row is the fence.  It is deleted by all four of its keys: job, message, attempt and
worker.  Once another worker has the lease, or it was given back, no row matches them.
"""

from functools import cache
from typing import Any

import sqlalchemy as sa

from pgqueue.repository.tables import AS_IT_STANDS, CTID, among, jobs, leases, pg, sees_all

WORKER = sa.bindparam("worker_id", type_=sa.Uuid)
ONE = (
    sa.bindparam("job_id", type_=sa.BigInteger),
    sa.bindparam("of_message_id", type_=sa.BigInteger),
    sa.bindparam("of_attempt", type_=sa.SmallInteger),
)
"""The keys of one attempt, without its worker's."""
SEES_JOBS = sees_all(jobs)
"""A lease is not deleted if its job is hidden: the job would have neither lease nor message."""
LONGEST_WAIT = pg.set_config("lock_timeout", "1s", sa.true()).is_not(None)
"""How long the start of one job waits for another transaction that has the job's row locked.  Set
for the transaction, which must have no other statement."""


def deleted_lease() -> sa.CTE:
    """The fence for one attempt."""
    ours = sa.delete(leases).where(is_ours(*ONE), SEES_JOBS)
    return ours.returning(*lease_columns()).cte("gone")


@cache
def is_cancelled() -> sa.Executable:
    """Whether the job of an attempt is to be cancelled; no row if its lease is not ours."""
    asked = sa.select(jobs.c.cancel_requested_at.is_not(None))
    return asked.join_from(leases, jobs, jobs.c.id == leases.c.target_id).where(is_ours(*ONE))


@cache
def free_key_of_attempt(*, in_own_transaction: bool) -> sa.Executable:
    """Give back the unique key of a job whose handler is about to start.

    No row: the lease is not ours any more, or the job has ended.  A job whose key is free already
    is returned as well.
    """
    return (
        sa.update(jobs)
        .where(
            jobs.c.id == ONE[0],
            jobs.c.outcome.is_(None),
            sa.exists().where(is_ours(*ONE)),
            LONGEST_WAIT if in_own_transaction else sa.true(),
        )
        .values(held_unique_key=sa.null())
        .returning(jobs.c.id)
    )


def deleted_leases(given: Any) -> sa.CTE:
    """The fence: deletes the leases that still match the settled attempts exactly.

    Each is looked up by its key, in a sub-query that the planner cannot reorder: with the
    statistics of an empty table it would read all leases for each attempt.  The worker is compared
    again, because servers before 18, 17.7, 16.11 and 15.15 do not recheck a ctid.
    """
    lease = (
        sa.select(CTID)
        .select_from(leases)
        .where(is_ours(given.c.target_id, given.c.message_id, given.c.attempt), SEES_JOBS)
        .offset(AS_IT_STANDS)
        .lateral("lease")
    )
    ctids = sa.select(lease.c.ctid).select_from(given.join(lease, sa.true()))
    return (
        sa.delete(leases)
        .where(among(ctids) == CTID, leases.c.worker_id == WORKER)
        .returning(*lease_columns())
        .cte("gone")
    )


def is_ours(job_id: Any, message_id: Any, attempt: Any) -> sa.ColumnElement[bool]:
    """Whether a lease is that of this attempt, and of this worker."""
    return sa.and_(
        leases.c.target_id == job_id,
        leases.c.message_id == message_id,
        leases.c.attempt == attempt,
        leases.c.worker_id == WORKER,
    )


def lease_columns() -> list[sa.ColumnElement[Any]]:
    """The columns that a settle needs of the leases that were its own."""
    names = ("target_id", "message_id", "attempt", "crashes", "worker_id", "started_at")
    return [leases.c[name] for name in names]
