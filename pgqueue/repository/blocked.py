"""Blocked nodes: which have nothing more to wait for, and the release of jobs.

A *node* is a job, named by its id, or a batch, named by its id with a minus sign.  A row of
``blocked`` says that a node has not ended its waiting, and which unfinished node it *watches*: a
batch one of its jobs, a job one of the nodes that ``dependencies`` names.  A settle knows nothing
of this, and nothing is counted.  When the watched node has ended, a worker *looks*: the blocked
node watches another unfinished one, or it ends its waiting.  A batch ends then; a job is

* *released*, which gives it a message, if it runs with these outcomes,
* *skipped*, which ends it as cancelled, if it belongs to a workflow in which something has failed
  or was cancelled, and
* *dropped*, which deletes it, if it is the callback of a batch, or waits for a failure that has
  not come, or only for jobs that were dropped.

What makes this safe: who writes, commits, and reads then.  Of an end and a new watch, the second
sees the first::

    end     commits the end of a job, then reads whether the watch of the job's batch is over
    watch   commits that a node watches the job, then reads whether the job has ended

A worker that dies in between leaves a node whose watch is over.  Upkeep reads these (the *sweep*),
and also those of jobs that were cancelled, deleted or claimed by the application.
"""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.meta import OF_WORKFLOW, RUNS_WHEN
from pgqueue.models import JobStatus
from pgqueue.repository.messages import columns_for, dispatch_of
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    SUCCEEDED,
    Executor,
    array_of,
    array_parameter,
    batches,
    blocked,
    clock,
    count_rows,
    dead_letters,
    delete_unlocked,
    deleted_records,
    dependencies,
    document,
    jobs,
    pg,
    sees_all,
    wake_up_call,
)

NOTHING = 2**63 - 1
"""What a batch watches that has no job so far.  No job has this id, and a sweep sees it first."""
WINDOW = 1000
"""The rows that a sweep reads of the newest watches, and again of the others."""

JOBS_IN_A_LOOK = 1000
"""The jobs that one look releases, and skips."""

SKIPPED = "skipped: "
"""How the error of a skipped job begins."""

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
JOBS = sa.any_(array_parameter("job_ids", sa.BigInteger))
GIVEN = sa.any_(array_parameter("node_ids", sa.BigInteger))
ZERO: sa.ColumnElement[int] = sa.literal_column("0", sa.BigInteger)
WHEN, WORKFLOW = (
    sa.cast(sa.literal_column(f"'{key}'", sa.Text), sa.Text) for key in (RUNS_WHEN, OF_WORKFLOW)
)
LAST = sa.literal_column(str(NOTHING), sa.BigInteger)


def is_in_workflow() -> sa.ColumnElement[bool]:
    return sa.func.coalesce(pg.jsonb_exists(jobs.c.meta, WORKFLOW), sa.false())


def is_skipped() -> sa.ColumnElement[bool]:
    prefix = sa.cast(sa.literal_column(f"'{SKIPPED}'", sa.Text), sa.Text)
    return sa.and_(jobs.c.outcome == CANCELLED, pg.starts_with(jobs.c.last_error, prefix))


def is_unfinished(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """One probe by key for each row: the OFFSET keeps the planner from reading all jobs."""
    unfinished = sa.select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
    return unfinished.offset(AS_IT_STANDS).correlate_except(jobs).exists()


def is_over(watched: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a watched node has ended, or is gone."""
    batch = sa.select(batches.c.id).where(batches.c.id == -watched, batches.c.ended_at.is_(None))
    is_open = batch.offset(AS_IT_STANDS).correlate_except(batches).exists()
    is_job = watched > ZERO
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
def over() -> sa.Executable:
    """The batches to look at that watch one of these nodes or are one of them, and whether jobs
    do."""
    is_watch_over = is_over(blocked.c.waits_for)
    # A branch for each index.
    branches = (
        sa.select(-blocked.c.node_id).where(
            column == GIVEN, blocked.c.node_id < ZERO, is_watch_over
        )
        for column in (blocked.c.waits_for, blocked.c.node_id)
    )
    batch_ids = sa.func.array(sa.union(*branches).scalar_subquery())
    waiting = sa.select(blocked.c.node_id).where(blocked.c.waits_for == GIVEN)
    return sa.select(batch_ids, waiting.where(blocked.c.node_id > ZERO, is_watch_over).exists())


@cache
def lock_jobs(*, one: bool) -> sa.Executable:
    """Lock the first unfinished jobs whose watches are over, and their rows in ``blocked``; or
    ``one`` of them.

    A job that another transaction has locked, for example to cancel it or to let it wait for one
    more, is left out.
    """
    return (
        sa.select(
            jobs.c.id,
            jobs.c.limit_keys.is_not(None),
            is_in_workflow(),
            pg.jsonb_extract_path_text(jobs.c.meta, WHEN),
        )
        .join_from(blocked, jobs, jobs.c.id == blocked.c.node_id)
        .where(blocked.c.waits_for == GIVEN, is_over(blocked.c.waits_for))
        .where(*([jobs.c.id == JOB] if one else []))
        .where(jobs.c.outcome.is_(None), sees_all(jobs, batches, dependencies))
        .order_by(jobs.c.id)
        .limit(JOBS_IN_A_LOOK)
        .with_for_update(key_share=True, skip_locked=True)
    )


@cache
def predecessors() -> sa.Executable:
    """For each of these locked jobs the newest node that has not ended and for which it waits;
    whether it has waited for any that was not dropped; and, if all have ended, the first that has
    failed and the first that was cancelled.

    A separate statement, after the lock: the snapshot of the statement that locks may be older than
    the last dependency.  A node that is gone has succeeded.
    """
    node = (
        pg.unnest(array_parameter("job_ids", sa.BigInteger))
        .table_valued(sa.column("id", sa.BigInteger))
        .render_derived(name="node")
    )
    edge, after = dependencies.c, dependencies.c.after_id
    of_node = sa.select(after).where(edge.job_id == node.c.id)
    unfinished = of_node.where(~is_over(after)).order_by(after.desc()).limit(sa.literal_column("1"))
    watch = unfinished.lateral("watch")
    of_job = sa.select(jobs.c.outcome).where(jobs.c.id == after)
    of_batch = sa.select(batches.c.outcome).where(batches.c.id == -after)
    outcome = sa.case(
        (after > ZERO, of_job.offset(AS_IT_STANDS).scalar_subquery()),
        else_=of_batch.offset(AS_IT_STANDS).scalar_subquery(),
    )
    ended = (
        sa.select(after, outcome.label("outcome"))
        .where(edge.job_id == node.c.id, watch.c.after_id.is_(None))
        .correlate(node, watch)
        .offset(AS_IT_STANDS)
        .subquery("ended")
    )
    first = {
        status: pg.min(ended.c.after_id).filter(
            ended.c.outcome == sa.literal(status.value, sa.Text)
        )
        for status in (JobStatus.FAILED, JobStatus.CANCELLED)
    }
    causes = sa.select(*(cause.label(status) for status, cause in first.items())).lateral("causes")
    return sa.select(node.c.id, watch.c.after_id, of_node.exists(), *causes.c).select_from(
        node.outerjoin(watch, sa.true()).outerjoin(causes, sa.true())
    )


@cache
def jobs_to_look_at() -> sa.Executable:
    """The jobs whose watches are over, of those that watch one of these nodes."""
    return sa.select(blocked.c.node_id).where(
        blocked.c.waits_for == GIVEN, blocked.c.node_id > ZERO, is_over(blocked.c.waits_for)
    )


def runs_when(outcome: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a job runs if what it waits for has this outcome."""
    outcomes = pg.jsonb_extract_path(jobs.c.meta, WHEN)
    return sa.func.coalesce(pg.jsonb_exists(outcomes, outcome), outcome == SUCCEEDED)


@cache
def watch_others() -> sa.Executable:
    """Let each of these locked jobs watch another node."""
    new = document("watches", sa.column("id", sa.BigInteger), sa.column("other", sa.BigInteger))
    watch = sa.update(blocked).where(blocked.c.node_id == new.c.id)
    return watch.values(waits_for=new.c.other)


@cache
def release_jobs(*, limited: bool, notify: bool) -> sa.Executable:
    """Give locked jobs their messages, now: claims would find earlier ones behind their cursors
    late."""
    job = (
        sa.update(jobs)
        .where(jobs.c.id == JOBS, jobs.c.outcome.is_(None))
        .values(run_at=sa.func.greatest(jobs.c.run_at, clock()))
        .returning(*columns_for(limited=limited))
        .cte("job")
    )
    woken = wake_up_call() if notify else sa.true()
    count = sa.select(count_rows()).select_from(job).scalar_subquery()
    return sa.select(count, woken).add_cte(*dispatch_of(job, limited=limited))


@cache
def skip_jobs() -> sa.Executable:
    """End locked jobs as cancelled, each for its reason."""
    skipped = document("skipped", sa.column("id", sa.BigInteger), sa.column("reason", sa.Text))
    job = (
        sa.update(jobs)
        .where(jobs.c.id == skipped.c.id, jobs.c.outcome.is_(None))
        .values(
            outcome=CANCELLED,
            finished_at=clock(),
            held_unique_key=sa.null(),
            last_error=skipped.c.reason,
        )
        .returning(jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
        .cte("job")
    )
    letter = pg_insert(dead_letters).from_select(
        ["job_id", "outcome", "queue", "task", "finished_at"], sa.select(job)
    )
    return sa.select(job.c.id).add_cte(letter.on_conflict_do_nothing().cte("letter"))


@cache
def drop_jobs() -> sa.Executable:
    """Delete jobs that will never run, with their records, and what others wait for of them."""
    gone = sa.delete(jobs).where(jobs.c.id == JOBS).returning(jobs.c.id).cte("gone")
    edges = sa.delete(dependencies).where(dependencies.c.after_id == JOBS).cte("waits")
    return sa.select(gone.c.id).add_cte(*deleted_records(gone), edges)


@cache
def unblock_jobs() -> sa.Executable:
    """Delete the rows of these jobs, and those that jobs which have ended have left."""
    is_left = sa.and_(blocked.c.node_id > ZERO, ~is_unfinished(blocked.c.node_id), sees_all(jobs))
    is_meant = sa.or_(blocked.c.node_id == JOBS, is_left)
    return delete_unlocked(blocked, blocked.c.waits_for == GIVEN, is_meant)


@cache
def unblock_job() -> sa.Executable:
    """Delete the row of a job that is cancelled or deleted.  Never waits for a look."""
    return delete_unlocked(blocked, blocked.c.node_id == JOB)


class Over(NamedTuple):
    """Who watches a node that has ended."""

    batch_ids: list[int]
    jobs: bool
    """Whether jobs do."""


class JobsLook(NamedTuple):
    """What a look has done with jobs."""

    released: int
    ended: list[int]
    """Those that it has skipped or dropped: other nodes may watch them."""
    watches: list[int]
    """What others watch now."""
    is_full: bool
    """Whether more jobs may be left."""


class BlockedNodes:
    """The blocked nodes behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def swept(self, swept_to: int | None) -> tuple[list[int], int | None]:
        """The watched nodes that are over, and up to where they were read, None at the end."""
        over, swept_to = self._executor.execute(swept(), {"swept_to": swept_to}).one()
        return over, swept_to

    def over(self, node_ids: Iterable[int]) -> Over:
        """Who watches one of these nodes, or is one, and does not need to any more."""
        return Over(*self._executor.execute(over(), _nodes(node_ids)).one())

    def jobs_to_look_at(self, node_ids: Iterable[int]) -> list[int]:
        """The jobs that watch one of these nodes and do not need to any more."""
        return list(self._executor.execute(jobs_to_look_at(), _nodes(node_ids)).scalars())

    def look(self, node_ids: Iterable[int], *, notify: bool, job_id: int | None = None) -> JobsLook:
        """Look at the jobs that watch one of these nodes, or at one of them.

        Needs a transaction in READ COMMITTED: each statement after the lock must see what the last
        addition has committed.  The caller looks again, after the commit, at what they watch now.
        """
        given = _nodes(node_ids)
        one = {} if job_id is None else {"job_id": job_id}
        statement: Any = lock_jobs(one=job_id is not None)
        locked = {row[0]: row[1:] for row in self._executor.execute(statement, {**given, **one})}
        found = self._executor.execute(predecessors(), _jobs(locked)).all() if locked else []
        watches = {id: other for id, other, *_ in found if other is not None}
        released: dict[bool, list[int]] = {False: [], True: []}
        skipped: dict[int, str] = {}
        dropped: list[int] = []
        for id, other, is_wanted, failed, cancelled in found:
            if other is not None:
                continue
            limited, in_workflow, when = locked[id]
            outcome = FAILED_BY[failed is not None, cancelled is not None]
            runs_when = json.loads(when) if when else [JobStatus.SUCCEEDED]
            if outcome in runs_when and is_wanted:
                released[limited].append(id)
            elif is_wanted and in_workflow and JobStatus.SUCCEEDED in runs_when:
                skipped[id] = _reason(failed, cancelled)
            else:
                dropped.append(id)
        if watches:
            rows = [{"id": id, "other": other} for id, other in watches.items()]
            self._executor.execute(watch_others(), {"watches": json.dumps(rows)})
        for limited, job_ids in released.items():
            if job_ids:
                statement = release_jobs(limited=limited, notify=notify)
                self._executor.execute(statement, _jobs(job_ids))
        if skipped:
            rows = [{"id": id, "reason": reason} for id, reason in skipped.items()]
            self._executor.execute(skip_jobs(), {"skipped": json.dumps(rows)})
        if dropped:
            self._executor.execute(drop_jobs(), _jobs(dropped))
        self._executor.execute(unblock_jobs(), {**given, **_jobs(locked.keys() - watches.keys())})
        return JobsLook(
            released=sum(map(len, released.values())),
            ended=[*skipped, *dropped],
            watches=list(watches.values()),
            is_full=len(locked) == JOBS_IN_A_LOOK,
        )


FAILED_BY = {
    (False, False): JobStatus.SUCCEEDED,
    (True, False): JobStatus.FAILED,
    (True, True): JobStatus.FAILED,
    (False, True): JobStatus.CANCELLED,
}
"""The common outcome of nodes, by whether one has failed and whether one was cancelled."""


def _reason(failed: int | None, cancelled: int | None) -> str:
    node_id, verb = (cancelled, "was cancelled") if failed is None else (failed, "has failed")
    if node_id is None:
        return f"{SKIPPED}all have succeeded"
    return f"{SKIPPED}{'job' if node_id > 0 else 'group'} {abs(node_id)} {verb}"


def _nodes(node_ids: Iterable[int]) -> dict[str, str]:
    return {"node_ids": array_of(map(str, node_ids))}


def _jobs(job_ids: Iterable[int]) -> dict[str, str]:
    return {"job_ids": array_of(map(str, job_ids))}
