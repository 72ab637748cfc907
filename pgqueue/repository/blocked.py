"""Blocked nodes: which have nothing more to wait for, and the release of jobs.

A *node* is a job, named by its id, or a batch, named by its id with a minus sign.  A row of
``blocked`` says that a node has not ended its waiting, and which unfinished node it *watches*: a
batch one of its jobs, a callback its batch.  A settle knows nothing of this, and nothing is
counted.  When the watched node has ended, a worker *looks*: the blocked node watches another
unfinished one, or it is released.

What makes this safe: who writes, commits, and reads then.  Of an end and a new watch, the second
sees the first::

    end     commits the end of a job, then reads whether the watch of the job's batch is over
    watch   commits that a node watches the job, then reads whether the job has ended

A worker that dies in between leaves a node whose watch is over.  Upkeep reads these (the *sweep*),
and also those of jobs that were cancelled, deleted or claimed by the application.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from pgqueue.repository.enqueue import NewJob
from pgqueue.repository.messages import (
    DISPATCHED,
    UNDER_LIMITS,
    labels,
    message_of,
    waiting_message_of,
)
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    Executor,
    array_of,
    array_parameter,
    batches,
    blocked,
    clock,
    count_rows,
    delete_unlocked,
    deleted_records,
    jobs,
    json_parameter,
    pg,
    sees_all,
    text_parameter,
    wake_up_call,
)

NOTHING = 2**63 - 1
"""What a batch watches that has no job so far.  No job has this id, and a sweep sees it first."""
WINDOW = 1000
"""The rows that a sweep reads of the newest watches, and again of the others."""

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
JOBS = sa.any_(array_parameter("job_ids", sa.BigInteger))
WATCHED = sa.bindparam("waits_for", type_=sa.BigInteger)
LAST = sa.literal_column(str(NOTHING), sa.BigInteger)


def is_unfinished(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """One probe by key for each row: the OFFSET keeps the planner from reading all jobs."""
    unfinished = sa.select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
    return unfinished.offset(AS_IT_STANDS).correlate_except(jobs).exists()


def is_over(watched: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a watched node has ended, or is gone."""
    batch = sa.select(batches.c.id).where(batches.c.id == -watched, batches.c.ended_at.is_(None))
    is_open = batch.offset(AS_IT_STANDS).correlate_except(batches).exists()
    is_job = watched > sa.literal_column("0")
    return ~sa.case((is_job, is_unfinished(watched)), else_=is_open)


def sweep() -> tuple[sa.ColumnElement[Any], sa.ColumnElement[Any]]:
    """The watches that are over, of the newest rows and of a window of the others; and up to where
    the window has come, NULL behind the last row.

    So no read grows with the number of blocked nodes.  The newest are those that watch the newest
    jobs.
    """
    swept_to = sa.func.coalesce(sa.bindparam("swept_to", type_=sa.BigInteger), LAST)
    rows = sa.select(blocked.c.waits_for).order_by(blocked.c.waits_for.desc())
    newest = rows.limit(WINDOW).subquery("newest")
    window = rows.where(blocked.c.waits_for < swept_to).limit(WINDOW).cte("swept")
    read = sa.union(sa.select(newest), sa.select(window)).subquery("read")
    over = sa.select(read.c.waits_for).where(is_over(read.c.waits_for))
    is_full = count_rows() == sa.literal_column(str(WINDOW))
    up_to = sa.select(sa.case((is_full, pg.min(window.c.waits_for))))
    return sa.func.array(over.scalar_subquery()), up_to.scalar_subquery()


@cache
def swept() -> sa.Executable:
    return sa.select(*sweep())


@cache
def batches_to_look_at() -> sa.Executable:
    """The batches that watch one of these nodes, or whose callbacks do, or that are one of them;
    each if its watch is over."""
    is_batch = blocked.c.node_id < sa.literal_column("0")
    batch_id = sa.case((is_batch, -blocked.c.node_id), else_=-blocked.c.waits_for).label("id")
    given = sa.any_(array_parameter("node_ids", sa.BigInteger))
    # A branch for each index.
    over = sa.select(batch_id).where(is_over(blocked.c.waits_for))
    branches = (over.where(column == given) for column in (blocked.c.waits_for, blocked.c.node_id))
    return sa.union(*branches).order_by("id")


@cache
def block_new_job(*, labelled: bool, limited: bool) -> sa.Executable:
    """Insert a job that has no message before its watch is over."""
    values = {
        "queue": sa.bindparam("queue", type_=sa.Text),
        "task": sa.bindparam("task", type_=sa.Text),
        "args": json_parameter("args"),
        "priority": sa.bindparam("priority", type_=sa.SmallInteger),
        "max_attempts": sa.bindparam("max_attempts", type_=sa.SmallInteger),
        "run_at": clock(),
        **(labels() if labelled else {}),
        **({"limit_keys": sa.bindparam("limit_keys", type_=sa.Text)} if limited else {}),
    }
    job = sa.insert(jobs).values(values).returning(jobs.c.id).cte("job")
    row = sa.select(job.c.id, sa.cast(WATCHED, sa.BigInteger), array_parameter("outcomes", sa.Text))
    return sa.insert(blocked).from_select(["node_id", "waits_for", "runs_when"], row)


@cache
def lock_jobs() -> sa.Executable:
    """Lock the unfinished jobs that watch a node, and their rows in ``blocked``: the id, whether
    the job is under limits, and whether it runs with this outcome.

    A job that another transaction has locked, for example to cancel it, is left out.
    """
    runs = text_parameter("outcome") == sa.any_(blocked.c.runs_when)
    return (
        sa.select(jobs.c.id, jobs.c.limit_keys.is_not(None), runs)
        .join_from(blocked, jobs, jobs.c.id == blocked.c.node_id)
        .where(blocked.c.waits_for == WATCHED, jobs.c.outcome.is_(None))
        .order_by(jobs.c.id)
        .with_for_update(key_share=True, skip_locked=True)
    )


@cache
def release_job(*, limited: bool, notify: bool) -> sa.Executable:
    """Give a job its message, now: claims would find an earlier one behind their cursors late."""
    job = (
        sa.update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None))
        .values(run_at=sa.func.greatest(jobs.c.run_at, clock()))
        .returning(*(UNDER_LIMITS if limited else DISPATCHED))
        .cte("job")
    )
    message = (waiting_message_of if limited else message_of)(job).cte("message")
    woken = wake_up_call() if notify else sa.true()
    return sa.select(job.c.id, woken).add_cte(message)


@cache
def delete_jobs() -> sa.Executable:
    """Delete jobs that will never run, with their records."""
    gone = sa.delete(jobs).where(jobs.c.id == JOBS).returning(jobs.c.id).cte("gone")
    return sa.select(gone.c.id).add_cte(*deleted_records(gone))


@cache
def unblock_jobs() -> sa.Executable:
    """Delete the rows of these jobs, and those that jobs which have ended have left."""
    is_left = sa.and_(~is_unfinished(blocked.c.node_id), sees_all(jobs))
    is_meant = sa.or_(blocked.c.node_id == JOBS, is_left)
    return delete_unlocked(blocked, blocked.c.waits_for == WATCHED, is_meant)


@cache
def unblock_job() -> sa.Executable:
    """Delete the row of a job that is cancelled or deleted.  Never waits for a look."""
    return delete_unlocked(blocked, blocked.c.node_id == JOB)


class BlockedNodes:
    """The blocked nodes behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def swept(self, swept_to: int | None) -> tuple[list[int], int | None]:
        """The watched nodes that are over, and up to where they were read, None at the end."""
        over, swept_to = self._executor.execute(swept(), {"swept_to": swept_to}).one()
        return over, swept_to

    def batches_to_look_at(self, node_ids: Iterable[int]) -> list[int]:
        """The batches to look at, of these nodes and of those for which their end counts."""
        given = {"node_ids": array_of(map(str, node_ids))}
        return list(self._executor.execute(batches_to_look_at(), given).scalars())

    def add_job(
        self, new: NewJob, args: str, limit_keys: str | None, *, waits_for: int, when: Sequence[str]
    ) -> None:
        """Enqueue a job that starts after a node, if the node ends with one of these outcomes."""
        limited = limit_keys is not None
        parameters = {**new.parameters(), "args": args, "waits_for": waits_for}
        parameters["outcomes"] = array_of(when)
        if limited:
            parameters["limit_keys"] = limit_keys
        statement = block_new_job(labelled=new.is_labelled, limited=limited)
        self._executor.execute(statement, parameters)

    def release(self, waits_for: int, outcome: str, *, notify: bool) -> int | None:
        """Release the job that a node with this outcome lets run, and delete the others; returns
        the job that is released."""
        watching = {"waits_for": waits_for}
        found = self._executor.execute(lock_jobs(), {**watching, "outcome": outcome}).all()
        released = None
        for job_id, limited, runs in found:
            if runs:
                statement = release_job(limited=limited, notify=notify)
                released = self._executor.execute(statement, {"job_id": job_id}).scalar()
        if unwanted := [job_id for job_id, _, runs in found if not runs]:
            self._executor.execute(delete_jobs(), {"job_ids": array_of(map(str, unwanted))})
        ids = array_of(str(row[0]) for row in found)
        self._executor.execute(unblock_jobs(), {**watching, "job_ids": ids})
        return released
