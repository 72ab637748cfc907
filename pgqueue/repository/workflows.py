"""Workflows: what is brought back by a requeue, and what is added before successors."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.blocked import NOTHING, is_skipped
from pgqueue.repository.tables import (
    AS_IF_NEW,
    SUCCEEDED,
    Executor,
    among,
    array_of,
    array_parameter,
    batch_jobs,
    batches,
    blocked,
    dead_letters,
    dependencies,
    document,
    is_key_across_queues,
    jobs,
    pg,
)

RESULTS_IN_A_READ = 1000

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
JOB_IDS = pg.unnest(array_parameter("job_ids", sa.BigInteger))


@cache
def lock_successors() -> sa.Executable:
    """Lock the rows of those jobs that wait for a job, or for a group in which it is, so that none
    is released before this transaction ends.  A look leaves them out."""
    groups = (
        sa.select(-batch_jobs.c.batch_id)
        .join_from(batch_jobs, batches, batches.c.id == batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == JOB, batches.c.workflow_id.is_not(None))
    )
    return (
        sa.select(blocked.c.node_id)
        .join_from(dependencies, blocked, blocked.c.node_id == dependencies.c.job_id)
        .where(sa.or_(dependencies.c.after_id == JOB, dependencies.c.after_id.in_(groups)))
        .order_by(blocked.c.node_id)
        .with_for_update(read=True, of=blocked)
    )


@cache
def add_dependencies() -> sa.Executable:
    """Let each of these jobs wait for each of the others."""
    node, other = (
        pg.unnest(array_parameter(name, sa.BigInteger))
        .table_valued(sa.column("id", sa.BigInteger))
        .render_derived(name=name)
        for name in ("nodes", "others")
    )
    # A job that held the unique key of an enqueue may be there twice, or be a successor itself.
    rows = sa.select(node.c.id, other.c.id).select_from(node.join(other, node.c.id != other.c.id))
    edges = pg_insert(dependencies).from_select(["job_id", "after_id"], rows)
    return edges.on_conflict_do_nothing()


@cache
def reached() -> sa.Executable:
    """What comes back with these requeued jobs: each node, and an unfinished one that it waits for.

    A job comes back that was skipped, and the callback of a workflow that is opened again; a
    workflow or a group, if it has ended.
    """
    via = sa.cast(sa.null(), sa.BigInteger).label("via")
    given = sa.select(JOB_IDS.column_valued("node_id"), via)
    found: sa.CTE = given.cte("found", recursive=True)
    whole = sa.alias(batches, "whole")
    is_callback = sa.exists().where(whole.c.id == -found.c.node_id, whole.c.is_workflow)
    successors = (
        sa.select(dependencies.c.job_id.label("node_id"))
        .join_from(dependencies, jobs, jobs.c.id == dependencies.c.job_id)
        .where(dependencies.c.after_id == found.c.node_id, jobs.c.outcome.is_not(None))
        .where(sa.or_(is_skipped(), is_callback.correlate_except(whole)))
    )
    groups = (
        sa.select(-batch_jobs.c.batch_id)
        .join_from(batch_jobs, batches, batches.c.id == batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == found.c.node_id, batches.c.ended_at.is_not(None))
        .where(sa.or_(batches.c.is_workflow, batches.c.workflow_id.is_not(None)))
    )
    following = sa.union_all(successors.correlate(found), groups.correlate(found))
    following_of = following.lateral("following")
    found = found.union(
        sa.select(following_of.c.node_id, found.c.node_id).select_from(
            found.join(following_of, sa.true())
        )
    )
    return (
        sa.select(found.c.node_id, pg.max(found.c.via))
        .group_by(found.c.node_id)
        .having(pg.bool_and(found.c.via.is_not(None)))
        .order_by(found.c.node_id)
    )


def is_key_taken() -> sa.ColumnElement[bool]:
    """Whether another job holds the unique key of a job."""
    held = sa.alias(jobs, "held")
    same = sa.and_(held.c.held_unique_key == jobs.c.unique_key, held.c.held_unique_key.is_not(None))
    in_scope = sa.or_(held.c.queue == jobs.c.queue, is_key_across_queues(held))
    return sa.exists().where(same, in_scope).correlate_except(held)


@cache
def restore_jobs(*, skipped: bool) -> sa.Executable:
    """Block these jobs again, as if new, and return them; ``skipped``: those that were skipped.

    A job whose unique key another job holds stays as it is.
    """
    node = document("nodes", sa.column("id", sa.BigInteger), sa.column("via", sa.BigInteger))
    job = (
        sa.update(jobs)
        .where(jobs.c.id == node.c.id, jobs.c.outcome.is_not(None), ~is_key_taken())
        .where(*([is_skipped()] if skipped else []))
        .values(**AS_IF_NEW, last_error=sa.null())
        .returning(jobs.c.id, node.c.via)
        .cte("job")
    )
    letters = sa.delete(dead_letters).where(dead_letters.c.job_id == among(sa.select(job.c.id)))
    again = _blocked_again(sa.select(job.c.id, job.c.via)).add_cte(letters.cte("letters"))
    return again.returning(blocked.c.node_id)


@cache
def open_again() -> sa.Executable:
    """Open these batches again."""
    node = document("nodes", sa.column("id", sa.BigInteger), sa.column("via", sa.BigInteger))
    names = ("outcome", "total", "failed", "cancelled", "callback_id", "ended_at")
    batch = (
        sa.update(batches)
        .where(batches.c.id == -node.c.id, batches.c.ended_at.is_not(None))
        .values(dict.fromkeys(names, sa.null()))
        .returning((-batches.c.id).label("id"), node.c.via)
        .cte("batch")
    )
    return _blocked_again(sa.select(*batch.c))


def _blocked_again(rows: sa.Select[Any]) -> Insert:
    node = pg_insert(blocked).from_select(["node_id", "waits_for"], rows)
    return node.on_conflict_do_update(
        index_elements=[blocked.c.node_id], set_={"waits_for": node.excluded.waits_for}
    )


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

    def let_successors_wait(self, job_id: int, for_ids: Sequence[int]) -> None:
        """Let all that waits for a job wait for others too.

        Locks the rows of its successors: a look that has begun leaves them no more, and one that
        begins later leaves them out.  A successor that was released meanwhile has ended its waiting
        for ``job_id``, which then is not running any more.
        """
        successors = self._executor.execute(lock_successors(), {"job_id": job_id}).scalars().all()
        if successors:
            arrays = {"nodes": successors, "others": for_ids}
            given = {name: array_of(map(str, ids)) for name, ids in arrays.items()}
            self._executor.execute(add_dependencies(), given)

    def restore(self, job_ids: Iterable[int]) -> None:
        """Let what was skipped because of these jobs wait for them again, after their requeue.

        Their workflows and groups are open again.
        """
        given = {"job_ids": array_of(map(str, job_ids))}
        found = self._executor.execute(reached(), given).all()
        if job_nodes := [(id, via) for id, via in found if id > 0]:
            self._executor.execute(restore_jobs(skipped=False), _nodes(job_nodes))
        if batch_nodes := [(id, via) for id, via in found if id < 0]:
            self._executor.execute(open_again(), _nodes(batch_nodes))

    def block_again(self, job_ids: Iterable[int]) -> set[int]:
        """Let those of these jobs that were skipped wait again for what comes before them; returns
        them.  A look follows, and skips a job again if that has failed still."""
        nodes = _nodes((job_id, NOTHING) for job_id in job_ids)
        done = set(self._executor.execute(restore_jobs(skipped=True), nodes).scalars())
        if done:
            self.restore(done)
        return done

    def results(self, job_id: int, tasks: Iterable[str]) -> Iterator[Any]:
        """The results of the jobs with these names of a task for which a job waited."""
        parameters = {"job_id": job_id, "tasks": array_of(tasks)}
        options = {"yield_per": RESULTS_IN_A_READ}
        found = self._executor.execute(results(), parameters, execution_options=options)
        yield from found.scalars()


def _nodes(pairs: Iterable[tuple[int, int]]) -> dict[str, str]:
    return {"nodes": json.dumps([{"id": id, "via": via} for id, via in pairs])}
