"""The restart of a workflow from a job on: a new workflow with copies of this job and of all jobs
of the workflow that follow it.

A copy waits for the copies of what its job has waited for, and for the old jobs otherwise, so it
reads their results.  A group of which a job is copied is copied too: the new one has the copies,
and its other jobs as they are.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.meta import COPY_OF, workflow_in
from pgqueue.repository.batches import Batches, NewBatchRow
from pgqueue.repository.blocked import LAST, WORKFLOW, ZERO, workflow_of
from pgqueue.repository.tables import (
    Executor,
    among,
    array_of,
    batch_jobs,
    batches,
    blocked,
    clock,
    dependencies,
    document,
    jobs,
    pg,
)
from pgqueue.repository.workflows import batches_that_follow, is_key_taken, what_follows

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
SOURCE = sa.cast(sa.literal_column(f"'{COPY_OF}'", sa.Text), sa.Text)
KEPT = ("queue", "task", "args", "priority", "max_attempts", "unique_key", "limit_keys", "tags")
"""The columns of a job that its copy has too."""


@cache
def meta_of_job() -> sa.Executable:
    return sa.select(sa.cast(jobs.c.meta, sa.Text)).where(jobs.c.id == JOB)


@cache
def workflow() -> sa.Executable:
    """A workflow, and whether a job is one of its jobs.

    Locked: neither a requeue opens the workflow again, nor is it deleted, before this transaction
    ends.
    """
    is_member = sa.exists().where(batch_jobs.c.batch_id == batches.c.id, batch_jobs.c.job_id == JOB)
    found = sa.select(
        *(batches.c.id, batches.c.name, sa.cast(batches.c.meta, sa.Text)),
        *(batches.c.application, batches.c.ended_at.is_not(None), is_member),
    ).where(batches.c.id == sa.bindparam("workflow_id", type_=sa.BigInteger))
    return found.with_for_update(read=True, of=batches)


@cache
def following() -> sa.Executable:
    """The nodes of a workflow that follow a job: the job itself, others, and groups."""
    workflow = sa.cast(sa.bindparam("workflow_id", type_=sa.BigInteger), sa.BigInteger)
    is_taken = sa.or_(is_key_taken(), jobs.c.held_unique_key.is_not(None))  # or by the job itself
    own = sa.select(jobs.c.id, jobs.c.unique_key, is_taken).where(
        jobs.c.id == among(what_follows()), workflow_of() == sa.cast(workflow, sa.Text)
    )
    groups = sa.select(-batches.c.id, batches.c.name, sa.false()).where(
        batches.c.id == among(batches_that_follow()), batches.c.workflow_id == workflow
    )
    return sa.union_all(own, groups)


@cache
def copy_jobs() -> sa.Executable:
    """Insert the copies, in the order of the jobs; each names its job in its meta."""
    workflow = sa.cast(sa.bindparam("workflow_id", type_=sa.BigInteger), sa.BigInteger)
    noted = pg.jsonb_build_object(WORKFLOW, workflow, SOURCE, jobs.c.id)
    # The one argument of a callback is the id of its workflow.
    is_callback = sa.exists().where(
        dependencies.c.job_id == jobs.c.id,
        dependencies.c.after_id == -sa.cast(workflow_of(), sa.BigInteger),
    )
    name = pg.jsonb_object_keys(jobs.c.args, type_=sa.Text).column_valued("name")
    args = sa.select(pg.jsonb_object_agg(name, workflow, type_=JSONB)).scalar_subquery()
    kept: dict[str, sa.ColumnElement[Any]] = {name: jobs.c[name] for name in KEPT}
    kept["args"] = sa.case((is_callback, args), else_=jobs.c.args)
    rows = (
        sa.select(
            *kept.values(),
            jobs.c.unique_key.label("held_unique_key"),
            clock().label("run_at"),
            jobs.c.meta.op("||")(noted).label("meta"),
        )
        .where(jobs.c.id == sa.any_(sa.cast(sa.bindparam("job_ids"), sa.ARRAY(sa.BigInteger))))
        .order_by(jobs.c.id)
    )
    copy = sa.insert(jobs).from_select([*KEPT, "held_unique_key", "run_at", "meta"], rows)
    source = pg.jsonb_extract_path_text(jobs.c.meta, SOURCE, type_=sa.Text)
    return copy.returning(sa.cast(source, sa.BigInteger), jobs.c.id)


@cache
def connect_copies() -> sa.Executable:
    """Put the copies into the new workflow and its groups, and let them wait."""
    node = document("nodes", sa.column("old", sa.BigInteger), sa.column("new", sa.BigInteger))
    batch, member, before = node.alias("batch"), node.alias("member"), node.alias("before")
    is_group = sa.exists().where(batches.c.id == batch_jobs.c.batch_id, ~batches.c.is_workflow)
    members = (
        sa.select(-batch.c.new, sa.func.coalesce(member.c.new, batch_jobs.c.job_id))
        .select_from(batch)
        .join(batch_jobs, batch_jobs.c.batch_id == -batch.c.old)
        .outerjoin(member, member.c.old == batch_jobs.c.job_id)
        .where(batch.c.old < ZERO, sa.or_(member.c.new.is_not(None), is_group))
    )
    edges = (
        sa.select(member.c.new, sa.func.coalesce(before.c.new, dependencies.c.after_id))
        .select_from(member)
        .join(dependencies, dependencies.c.job_id == member.c.old)
        .outerjoin(before, before.c.old == dependencies.c.after_id)
    )
    newest = (
        sa.select(pg.max(before.c.new))
        .select_from(dependencies)
        .join(before, before.c.old == dependencies.c.after_id)
        .where(dependencies.c.job_id == member.c.old)
        .scalar_subquery()
    )
    # One that waits for no copy watches nothing until the next sweep.
    watches = sa.select(member.c.new, sa.func.coalesce(newest, LAST)).where(member.c.old > ZERO)
    return (
        sa.insert(blocked)
        .from_select(["node_id", "waits_for"], watches)
        .add_cte(
            sa.insert(batch_jobs).from_select(["batch_id", "job_id"], members).cte("members"),
            sa.insert(dependencies).from_select(["job_id", "after_id"], edges).cte("edges"),
        )
    )


class Restartable(NamedTuple):
    """The workflow of a job."""

    id: int
    name: str | None
    meta: str | None
    application: str
    has_ended: bool
    is_member: bool
    """Whether the job is one of its jobs, and no callback."""


class Restarts:
    """Restarts workflows behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def workflow_of(self, job_id: int) -> Restartable | None:
        """The workflow of a job; None if it has none any more."""
        meta = self._executor.execute(meta_of_job(), {"job_id": job_id}).scalar()
        given = {"job_id": job_id, "workflow_id": workflow_in(meta)}
        row = self._executor.execute(workflow(), given).first()
        return None if row is None else Restartable(*row)

    def following(self, job_id: int, workflow: Restartable) -> tuple[Mapping[int, Any], list[int]]:
        """The nodes of a workflow that follow a job, each with its unique key or its name, and the
        jobs of these whose unique keys are held, by themselves or by others."""
        given = {"job_ids": array_of([str(job_id)]), "workflow_id": workflow.id}
        rows = self._executor.execute(following(), given).all()
        return {row[0]: row[1] for row in rows}, [row[0] for row in rows if row[2]]

    def restart(self, workflow: Restartable, nodes: Mapping[int, Any]) -> int:
        """Make a new workflow with copies of these nodes; returns its id."""
        rows = Batches(self._executor)
        new = NewBatchRow(
            workflow.name, workflow.meta, of_application=workflow.application, as_workflow=True
        )
        new_id = rows.add(new)
        copies = {-workflow.id: -new_id}
        for node, name in nodes.items():
            if node < 0:
                copies[node] = -rows.add(NewBatchRow(name, group_of=new_id))
        given = {"workflow_id": new_id, "job_ids": [node for node in nodes if node > 0]}
        copies.update(dict(tuple(row) for row in self._executor.execute(copy_jobs(), given)))
        pairs = json.dumps([{"old": old, "new": copy} for old, copy in copies.items()])
        self._executor.execute(connect_copies(), {"nodes": pairs})
        return new_id
