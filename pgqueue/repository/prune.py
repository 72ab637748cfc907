"""Prune: delete ended jobs whose time is over.

No index shows which jobs have ended: it would have to change at each end, which would then not be a
HOT update.  So a round walks over ``jobs`` by id, and ends at the first young ones: ids grow with
time.  Failed and cancelled jobs may stay longer or shorter; ``dead_letters`` lists them.
"""

from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.models.job_status import status_of
from pgqueue.repository.batches import is_awaited
from pgqueue.repository.references import Reference, is_free, read_references
from pgqueue.repository.tables import (
    CANCELLED,
    Executor,
    among,
    batch_jobs,
    batches,
    blocked,
    clock,
    count_rows,
    dead_letters,
    delete_unlocked,
    deleted_records,
    dependencies,
    jobs,
    json_parameter,
    leases,
    lock_key,
    message_queue,
    pg,
    seconds,
    sees_all,
    waiting_messages,
)
from pgqueue.rules.retention import Retention

AFTER = sa.bindparam("after", type_=sa.BigInteger)


@cache
def try_lock() -> sa.Executable:
    """Only one worker prunes at a time.  The lock saves work; SKIP LOCKED makes two safe."""
    return sa.select(
        pg.pg_try_advisory_xact_lock(sa.literal_column(str(lock_key("prune")), sa.BigInteger))
    )


@cache
def prune(references: tuple[Reference, ...], *, dead: bool) -> sa.Executable:
    """Delete the jobs of one stretch whose time is over, and their records.

    ``dead``: a stretch of the failed and cancelled jobs, otherwise of all jobs.

    Returns the last id of the stretch, whether all of its jobs are too young, and how many were
    deleted.  NULL as the id: there are no more jobs.  A job that is requeued or referred to by
    another transaction meanwhile is skipped.
    """
    youth = clock() - seconds(sa.cast(sa.bindparam("shortest", type_=sa.Float), sa.Float))
    id = dead_letters.c.job_id if dead else jobs.c.id
    is_young = sa.false() if dead else jobs.c.created_at > youth
    first = (
        sa.select(id.label("id"), is_young.label("is_young"))
        .where(id > AFTER)
        .order_by(id)
        .limit(sa.bindparam("size", type_=sa.Integer))
        .cte("first")
    )
    ids = among(sa.select(first.c.id))
    due = delete_unlocked(jobs, jobs.c.id == ids, _is_due(references))
    gone = due.returning(jobs.c.id).cte("gone")
    deleted = sa.select(count_rows()).select_from(gone).scalar_subquery()
    are_young = pg.bool_and(first.c.is_young)
    return sa.select(pg.max(first.c.id), are_young, deleted).add_cte(*deleted_records(gone))


@cache
def count_due(references: tuple[Reference, ...]) -> sa.Executable:
    """The jobs that pruning would delete now, by task and outcome.  Reads all jobs."""
    return (
        sa.select(jobs.c.task, jobs.c.outcome, count_rows())
        .where(_is_due(references))
        .group_by(jobs.c.task, jobs.c.outcome)
        .order_by(jobs.c.task, jobs.c.outcome)
    )


@cache
def next_job(*, dead: bool) -> sa.Executable:
    """The first id after another."""
    id = dead_letters.c.job_id if dead else jobs.c.id
    return sa.select(id).where(id > AFTER).order_by(id).limit(1)


def _is_due(references: tuple[Reference, ...]) -> sa.ColumnElement[bool]:
    """Whether a job has ended, its time is over, and no other row needs it.

    A cancelled job may still have a lease or a message: the cancel came while a worker was about to
    start the job.  The job stays until that worker has given it up.
    """
    of_task = _rules("keep_of_tasks").op("->")(jobs.c.task)
    of_queue = _rules("keep_of_queues").op("->")(jobs.c.queue)
    kept = (of_task, of_queue, _rules("keep_of_others"))
    of_outcome = (keep.op("->>")(jobs.c.outcome) for keep in kept)
    span = sa.cast(sa.func.coalesce(*of_outcome), sa.Float)
    waits_as = status_of(
        jobs.c.id, sa.null(), jobs.c.queue, jobs.c.priority, jobs.c.run_at, jobs.c.limit_keys
    )
    return sa.and_(
        jobs.c.outcome.is_not(None),
        of_task.is_not(None),
        span >= sa.literal_column("0::double precision", sa.Float),
        jobs.c.finished_at <= pg.statement_timestamp() - seconds(span),
        sa.or_(jobs.c.outcome != CANCELLED, waits_as == sa.literal_column("'blocked'")),
        ~is_awaited(),
        sees_all(batches, batch_jobs, blocked, dependencies),
        sees_all(leases, message_queue, waiting_messages),
        *is_free(references, jobs),
    )


def _rules(name: str) -> sa.ColumnElement[Any]:
    """A document, in a sub-select: a generic plan would read a parameter again for each row."""
    return sa.select(json_parameter(name)).scalar_subquery()


class Pruned(NamedTuple):
    """Some jobs with consecutive ids, and what pruning has done to them."""

    up_to: int | None
    """The last of their ids; None if there were no more jobs."""
    are_young: bool | None
    """Whether all of them are too young to be deleted; then so are those that follow."""
    deleted: int


class DueJobs(NamedTuple):
    """The jobs of a task with the same outcome whose time is over."""

    task: str
    outcome: str
    jobs: int


class Pruning:
    """The ended jobs behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def try_lock(self) -> bool:
        """Take the lock of this transaction; False if another one prunes."""
        return bool(self._executor.execute(try_lock()).scalar())

    def references(self) -> tuple[Reference, ...]:
        """The columns of the application whose rows keep jobs or batches from being deleted."""
        return read_references(self._executor)

    def prune(
        self,
        retention: Retention,
        references: tuple[Reference, ...],
        *,
        dead: bool,
        after: int,
        size: int,
    ) -> Pruned:
        """Delete the jobs whose time is over among the next ``size`` jobs after this id.

        ``dead``: among the next failed and cancelled ones.
        """
        parameters: dict[str, Any] = {**retention.parameters(), "after": after, "size": size}
        if not dead:
            parameters["shortest"] = retention.shortest
        statement = prune(references, dead=dead)
        return Pruned(*self._executor.execute(statement, parameters).one())

    def next_job(self, after: int, *, dead: bool) -> int | None:
        """The first id after another."""
        statement = next_job(dead=dead)
        found: int | None = self._executor.execute(statement, {"after": after}).scalar()
        return found

    def due(self, retention: Retention, references: tuple[Reference, ...]) -> list[DueJobs]:
        """The jobs whose time is over.  Reads all jobs."""
        statement = count_due(references)
        rows = self._executor.execute(statement, retention.parameters())
        return [DueJobs(*row) for row in rows]
