"""Workflows: what comes back by a requeue, what is added before successors, and results."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.batches import Batches, NewBatchRow
from pgqueue.repository.blocked import LAST, is_skipped, workflow_of
from pgqueue.repository.messages import has_message_or_lease, is_placed
from pgqueue.repository.tables import (
    AS_IF_NEW,
    CANCELLED,
    FAILED,
    SUCCEEDED,
    Executor,
    among,
    array_of,
    array_parameter,
    batch_jobs,
    batches,
    blocked,
    clock,
    dead_letters,
    dependencies,
    document,
    is_key_across_queues,
    job_steps,
    jobs,
    pg,
    sees_all,
)

RESULTS_IN_A_READ = 1000

JOB = sa.bindparam("job_id", type_=sa.BigInteger)


def _batches_of(job_id: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """The workflows and groups of a job, as nodes."""
    return (
        sa.select(-batch_jobs.c.batch_id)
        .join_from(batch_jobs, batches, batches.c.id == batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == job_id)
        .where(sa.or_(batches.c.is_workflow, batches.c.workflow_id.is_not(None)))
    )


def what_follows(name: str = "found") -> sa.Select[Any]:
    """All nodes that wait for these jobs, or for what waits for them, and the jobs themselves.

    ``name``: that of the CTE, of which a statement may have several.
    """
    given = pg.unnest(array_parameter("job_ids", sa.BigInteger)).column_valued("node_id")
    found: sa.CTE = sa.select(given).cte(name, recursive=True)
    successors = sa.select(dependencies.c.job_id.label("node_id")).where(
        dependencies.c.after_id == found.c.node_id
    )
    groups = _batches_of(found.c.node_id)
    following = sa.union_all(successors.correlate(found), groups.correlate(found))
    next_ones = following.lateral("following")
    step = sa.select(next_ones.c.node_id).select_from(found.join(next_ones, sa.true()))
    return sa.select(found.union(step).c.node_id)


def batches_that_follow() -> sa.Select[Any]:
    """The ids of the batches, workflows and groups among :func:`what_follows`."""
    node = what_follows("found_batches").subquery("follower")
    return sa.select(-node.c.node_id)


@cache
def lock_what_follows() -> sa.Executable:
    """Lock the rows of all that waits for these jobs, so that looks leave it out until this
    transaction ends."""
    rows = sa.select(blocked.c.node_id).where(blocked.c.node_id.in_(what_follows()))
    return rows.order_by(blocked.c.node_id).with_for_update(read=True, of=blocked)


@cache
def lock_ended_jobs() -> sa.Executable:
    """Lock the rows of the jobs that may come back, in the order in which all lock rows of jobs."""
    rows = sa.select(jobs.c.id).where(jobs.c.id == among(what_follows()))
    return (
        rows.where(jobs.c.outcome.is_not(None)).order_by(jobs.c.id).with_for_update(key_share=True)
    )


@cache
def restore_jobs() -> sa.Executable:
    """Block what has ended of that which follows these jobs again, as if new: what was skipped, and
    in their own workflows also what has run.

    Each watches nothing until the next sweep.  A job whose unique key another job holds stays as
    it is.
    """
    is_own = workflow_of() == sa.any_(array_parameter("workflows", sa.Text))
    follower = what_follows().subquery("follower")
    # Not one whose cancel was waiting for a worker.
    free = sa.select(follower.c.node_id).where(~has_message_or_lease(follower.c.node_id))
    return _blocked_again(
        jobs.c.id == among(free),  # an array: read once, then jobs by key
        jobs.c.id != sa.all_(array_parameter("job_ids", sa.BigInteger)),
        jobs.c.outcome.is_not(None),
        sa.or_(is_skipped(), is_own),
        ~is_key_taken(),
        keep_steps=False,  # what they have read may change
    )


@cache
def block_again() -> sa.Executable:
    """Let these failed and cancelled jobs, each of which has waited for others, wait for them
    again; returns them, with their workflows."""
    free = free_jobs()
    return _blocked_again(
        jobs.c.id == free.c.id,
        is_dead(),
        has_predecessors(),
        keep_steps=True,
        run_at=sa.func.greatest(free.c.run_at, clock()),  # ignores NULL
    )


def _blocked_again(
    *conditions: sa.ColumnElement[bool], keep_steps: bool, **values: Any
) -> sa.Executable:
    job = (
        sa.update(jobs)
        .where(*conditions, sees_all(jobs))
        .values(**AS_IF_NEW, last_error=sa.null(), **values)
        .returning(jobs.c.id, workflow_of().label("workflow"))
        .cte("job")
    )
    ids = among(sa.select(job.c.id))
    letters = sa.delete(dead_letters).where(dead_letters.c.job_id == ids)
    node = _watching_nothing(sa.select(job.c.id, LAST))
    written = [letters.cte("letters"), node.cte("node")]
    if not keep_steps:
        written.append(sa.delete(job_steps).where(job_steps.c.job_id == ids).cte("steps"))
    return sa.select(job).add_cte(*written)


@cache
def open_again() -> sa.Executable:
    """Open the workflows and groups again that have ended, and of which a job has come back.

    Without their deadlines, which may be over.
    """
    names = ("outcome", "total", "failed", "cancelled", "callback_id", "ended_at", "deadline_at")
    member = sa.select(batch_jobs.c.job_id).where(batch_jobs.c.batch_id == batches.c.id)
    unfinished = member.join(jobs, jobs.c.id == batch_jobs.c.job_id).where(jobs.c.outcome.is_(None))
    batch = (
        sa.update(batches)
        .where(batches.c.id == among(batches_that_follow()), batches.c.ended_at.is_not(None))
        .where(unfinished.exists())
        .values(dict.fromkeys(names, sa.null()))
        .returning((-batches.c.id).label("id"))
        .cte("batch")
    )
    return _watching_nothing(sa.select(batch.c.id, LAST))


def _watching_nothing(rows: sa.Select[Any]) -> sa.Insert:
    node = pg_insert(blocked).from_select(["node_id", "waits_for"], rows)
    return node.on_conflict_do_update(  # of a job whose cancel has left its row
        index_elements=[blocked.c.node_id], set_={"waits_for": node.excluded.waits_for}
    )


def is_key_taken() -> sa.ColumnElement[bool]:
    """Whether another job holds the unique key of a job, or the job itself since its success, as
    the key of a period."""
    held = sa.alias(jobs, "held")
    same = sa.and_(
        held.c.held_unique_key == jobs.c.unique_key,
        held.c.held_unique_key.is_not(None),
        sa.or_(held.c.id != jobs.c.id, held.c.outcome == SUCCEEDED),
    )
    in_scope = sa.or_(held.c.queue == jobs.c.queue, is_key_across_queues(held))
    return sa.exists().where(same, in_scope).correlate_except(held)


def free_jobs() -> sa.CTE:
    """The jobs to requeue that stand nowhere yet, each with the time when it is due, or NULL: now.

    Materialized: a condition of the join could be evaluated for each pair of rows.
    """
    run_at = sa.column("run_at", sa.DateTime(timezone=True))
    wanted = document("wanted", sa.column("id", sa.BigInteger), run_at)
    return sa.select(wanted).where(~is_placed(wanted.c.id)).cte("free").prefix_with("MATERIALIZED")


def is_dead() -> sa.ColumnElement[bool]:
    return jobs.c.outcome.in_([FAILED, CANCELLED])


def has_predecessors() -> sa.ColumnElement[bool]:
    """Whether a job has waited for others."""
    return sa.exists().where(dependencies.c.job_id == jobs.c.id)


def is_followed() -> sa.ColumnElement[bool]:
    """Whether others may wait for a job, or for its workflow or one of its groups."""
    waited_for = sa.exists().where(dependencies.c.after_id == jobs.c.id)
    return sa.or_(waited_for, _batches_of(jobs.c.id).exists())


@cache
def lock_successors() -> sa.Executable:
    """Lock the rows of those jobs that wait for a job, or for a group in which it is, so that none
    is released before this transaction ends.  A look leaves them out."""
    groups = _batches_of(JOB).where(batches.c.workflow_id.is_not(None))
    successor = sa.select(dependencies.c.job_id).where(
        sa.or_(dependencies.c.after_id == JOB, dependencies.c.after_id.in_(groups))
    )
    rows = sa.select(blocked.c.node_id).where(blocked.c.node_id.in_(successor))
    return rows.order_by(blocked.c.node_id).with_for_update(read=True, of=blocked)


@cache
def add_dependency() -> sa.Executable:
    """Let each of these jobs wait for one more node."""
    job_id = pg.unnest(array_parameter("job_ids", sa.BigInteger)).column_valued("job_id")
    after = sa.cast(sa.bindparam("after_id", type_=sa.BigInteger), sa.BigInteger)
    # A job that held the unique key of an enqueue may be a successor itself.
    rows = sa.select(job_id, after).where(job_id != after)
    edge = pg_insert(dependencies).from_select(["job_id", "after_id"], rows)
    return edge.on_conflict_do_nothing()


@cache
def results() -> sa.Executable:
    """The results of those jobs of a task that have succeeded and for which a job waited, itself or
    as one of a group, in the order of their ids."""
    after = sa.select(dependencies.c.after_id).where(dependencies.c.job_id == JOB)
    member = (
        sa.select(batch_jobs.c.job_id)
        .join_from(dependencies, batch_jobs, batch_jobs.c.batch_id == -dependencies.c.after_id)
        .where(dependencies.c.job_id == JOB)
    )
    return (
        sa.select(jobs.c.result)
        .where(jobs.c.id.in_(sa.union(after, member)), jobs.c.outcome == SUCCEEDED)
        .where(jobs.c.task == sa.any_(array_parameter("tasks", sa.Text)))
        .order_by(jobs.c.id)
    )


class Workflows:
    """The workflows behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def let_successors_wait(self, workflow_id: int, job_id: int, for_ids: Sequence[int]) -> None:
        """Let all that waits for a job wait for others too: for a group of these."""
        successors = self._executor.execute(lock_successors(), {"job_id": job_id}).scalars().all()
        if successors:
            groups = Batches(self._executor)
            group_id = groups.add(NewBatchRow(None, group_of=workflow_id))
            groups.add_jobs(group_id, for_ids)
            groups.watch(group_id, max(for_ids))
            given = {"job_ids": array_of(map(str, successors)), "after_id": -group_id}
            self._executor.execute(add_dependency(), given)

    def block_again(self, wanted: str) -> dict[int, str | None]:
        """Let requeued jobs that have waited for others wait for them again; returns these jobs,
        with their workflows.  ``wanted``: the document of the requeue."""
        found = self._executor.execute(block_again(), {"wanted": wanted})
        return dict(tuple(row) for row in found)

    def restore(self, requeued: dict[int, str | None]) -> None:
        """Bring back all that follows requeued jobs, which are given with their workflows, and open
        their workflows and groups again.

        Each statement after the lock sees what a look has committed that has met these rows before;
        one that comes later leaves them out until this transaction ends.
        """
        given = {"job_ids": array_of(map(str, requeued))}
        workflows = {workflow for workflow in requeued.values() if workflow is not None}
        self._executor.execute(lock_what_follows(), given)
        self._executor.execute(lock_ended_jobs(), given)
        self._executor.execute(restore_jobs(), {**given, "workflows": array_of(workflows)})
        self._executor.execute(open_again(), given)

    def results(self, job_id: int, tasks: Iterable[str]) -> Iterator[Any]:
        """The results of the jobs with these names of a task for which a job waited."""
        parameters = {"job_id": job_id, "tasks": array_of(tasks)}
        options = {"yield_per": RESULTS_IN_A_READ}
        found = self._executor.execute(results(), parameters, execution_options=options)
        yield from found.scalars()
