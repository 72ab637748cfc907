"""Blocked nodes: which have nothing more to wait for, and the release of jobs.

A *node* is a job, named by its id, or a batch, named by its id with a minus sign.  A row of
``blocked`` says that a node waits, and which unfinished node it *watches*: a batch one of its jobs,
a job one of the nodes that ``dependencies`` names.  A settle knows nothing of this, and nothing is
counted.  When the watched node has ended, a worker *looks*: the blocked node watches another
unfinished one, or its waiting ends.  A batch ends then; a job is

* *released*, which gives it a message, if it runs with the outcomes of these nodes,
* *skipped*, which ends it as cancelled, with the reason, if it does not, or
* *dropped*, which deletes it, if it is a callback of a plain batch that is not wanted.

Why this is safe: each side commits its write before it reads.  Of an end and a new watch, the
second sees the first::

    end     commits the end of a job, then reads whether the watch of the job's batch is over
    watch   commits that a node watches the job, then reads whether the job has ended

A worker that dies in between leaves a node whose watch is over.  Upkeep reads these (the *sweep*),
and also those of jobs that were cancelled, deleted or claimed by the application.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.meta import OF_WORKFLOW, RUNS_WHEN, outcomes_noted
from pgqueue.models import JobStatus
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import columns_for, dispatch_of
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    FAILED,
    LETTER,
    SUCCEEDED,
    Executor,
    array_of,
    array_parameter,
    batch_jobs,
    batches,
    blocked,
    clock,
    count_rows,
    dead_letter_of,
    delete_unlocked,
    deleted_records,
    dependencies,
    document,
    given_ids,
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
NOT_NEEDED = f"{SKIPPED}not needed"
"""The error of a job that waits for a failure which has not come.  It stops nothing: neither its
successors, nor the success of its workflow."""
FAILED_WORDS = " has failed"
"""How the error of a job ends that was skipped because another has failed."""

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
JOBS = sa.any_(array_parameter("job_ids", sa.BigInteger))
GIVEN = sa.any_(array_parameter("node_ids", sa.BigInteger))
ZERO: sa.ColumnElement[int] = sa.literal_column("0", sa.BigInteger)
WHEN, WORKFLOW = (
    sa.cast(sa.literal_column(f"'{key}'", sa.Text), sa.Text) for key in (RUNS_WHEN, OF_WORKFLOW)
)
LAST = sa.literal_column(str(NOTHING), sa.BigInteger)


def workflow_of() -> sa.ColumnElement[str]:
    """The id of the workflow of a job, as text; NULL if it belongs to none."""
    id: sa.ColumnElement[str] = pg.jsonb_extract_path_text(jobs.c.meta, WORKFLOW, type_=sa.Text)
    return id


def is_in_workflow() -> sa.ColumnElement[bool]:
    return workflow_of().is_not(None)


def is_skipped() -> sa.ColumnElement[bool]:
    """Whether a look has ended the job.  A handler may give such a reason too: its job has
    started."""
    prefix = sa.cast(sa.literal_column(f"'{SKIPPED}'", sa.Text), sa.Text)
    is_said = sa.func.coalesce(pg.starts_with(jobs.c.last_error, prefix), sa.false())
    return sa.and_(jobs.c.outcome == CANCELLED, jobs.c.started_at.is_(None), is_said)


def is_not_needed() -> sa.ColumnElement[bool]:
    reason = sa.cast(sa.literal_column(f"'{NOT_NEEDED}'"), sa.Text)
    return sa.and_(is_skipped(), pg.starts_with(jobs.c.last_error, reason))


def is_unfinished(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """One probe by key for each row: the OFFSET keeps the planner from reading all jobs."""
    unfinished = sa.select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
    return unfinished.offset(AS_IT_STANDS).correlate_except(jobs).exists()


def has_ended(watched: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
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
    over = sa.select(read.c.waits_for).where(has_ended(read.c.waits_for))
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
    is_batch = sa.and_(blocked.c.node_id < ZERO, has_ended(blocked.c.waits_for))
    # A branch for each index.
    branches = (
        sa.select(-blocked.c.node_id).where(column == GIVEN, is_batch)
        for column in (blocked.c.waits_for, blocked.c.node_id)
    )
    batch_ids = sa.func.array(sa.union(*branches).scalar_subquery())
    return sa.select(batch_ids, jobs_to_look_at().exists())


@cache
def lock_jobs(*, one: bool) -> sa.Executable:
    """Lock the first unfinished jobs whose watches are over, and their rows in ``blocked``; or
    ``one`` of them.

    A job that another transaction has locked, for example to cancel it or to let it wait for one
    more, is left out, so the order of the locks does not matter: without ORDER BY, no more rows are
    read than wanted.  The rows of ``blocked`` are read first, whatever the planner expects: a plan
    of a time when there were few jobs would read all jobs.
    """
    job = (
        sa.select(
            jobs.c.id,
            jobs.c.limit_keys.is_not(None).label("limited"),
            is_in_workflow().label("in_workflow"),
            pg.jsonb_extract_path_text(jobs.c.meta, WHEN).label("when"),
        )
        .where(jobs.c.id == blocked.c.node_id, jobs.c.outcome.is_(None))
        .with_for_update(key_share=True, skip_locked=True)
        .correlate(blocked)
        .lateral("job")
    )
    return (
        sa.select(*job.c)
        .join_from(blocked, job, sa.true())
        .where(blocked.c.waits_for == GIVEN, has_ended(blocked.c.waits_for))
        .where(*([blocked.c.node_id == JOB] if one else []))
        .where(sees_all(jobs, batches, dependencies))
        .limit(JOBS_IN_A_LOOK)
        .with_for_update(key_share=True, skip_locked=True, of=blocked)
    )


@cache
def predecessors() -> sa.Executable:
    """For each of these locked jobs the newest node that has not ended and for which it waits; if
    all have ended, why it is skipped if one has failed, and if one was cancelled; and whether none
    of them was needed, NULL if it waits for none.

    A separate statement, after the lock: the snapshot of the statement that locks may be older than
    the last dependency.  A node that is gone has succeeded.
    """
    node = given_ids("job_ids", name="node")
    after, is_of_node = dependencies.c.after_id, dependencies.c.job_id == node.c.id
    # By the key: the order fits no other index, and the planner does not drop a column from it of
    # which it knows a range.
    unfinished = (
        sa.select(after)
        .where(dependencies.c.job_id.between(node.c.id, node.c.id), ~has_ended(after))
        .order_by(dependencies.c.job_id.desc(), after.desc())
    )
    watch = unfinished.limit(sa.literal_column("1")).lateral("watch")
    job = (
        sa.select(
            sa.case((has_failed_before(), FAILED), else_=jobs.c.outcome).label("outcome"),
            sa.case((is_skipped(), jobs.c.last_error), else_=_why_skipped("job", jobs)).label(
                "why"
            ),
            is_not_needed().label("not_needed"),
        )
        .where(jobs.c.id == after)
        .offset(AS_IT_STANDS)
        .lateral("predecessor")
    )
    is_member = batch_jobs.c.batch_id == batches.c.id
    member = sa.select(batch_jobs.c.job_id).where(is_member)
    not_needed = sa.select(jobs.c.id).where(jobs.c.id == batch_jobs.c.job_id, is_not_needed())
    needed = member.where(~not_needed.offset(AS_IT_STANDS).correlate_except(jobs).exists())
    batch = (
        sa.select(
            batches.c.outcome,
            _why_skipped("batch", batches).label("why"),
            sa.and_(member.exists(), ~needed.exists()).label("not_needed"),
        )
        .where(batches.c.id == -after)
        .offset(AS_IT_STANDS)
        .lateral("group")
    )

    def of_either(name: str) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(job.c[name], batch.c[name]).label(name)

    ended = (
        sa.select(of_either("outcome"), of_either("why"), of_either("not_needed"))
        .select_from(dependencies)
        .outerjoin(job, sa.true())
        .outerjoin(batch, sa.true())
        .where(is_of_node, watch.c.after_id.is_(None))
        .correlate(node, watch)
        .subquery("ended")
    )
    is_needed = ~sa.func.coalesce(ended.c.not_needed, sa.false())
    whys = (
        pg.min(ended.c.why).filter(ended.c.outcome == outcome, is_needed).label(label)
        for label, outcome in (("failed", FAILED), ("cancelled", CANCELLED))
    )
    none_needed = pg.bool_and(~is_needed).label("none_needed")
    causes = sa.select(*whys, none_needed).lateral("causes")
    return sa.select(node.c.id, watch.c.after_id, *causes.c).select_from(
        node.outerjoin(watch, sa.true()).outerjoin(causes, sa.true())
    )


def has_failed_before() -> sa.ColumnElement[bool]:
    """Whether a job was skipped because another has failed, which its successors take for its own
    failure."""
    end = sa.cast(sa.literal_column(f"'{FAILED_WORDS}'"), sa.Text)
    last = pg.right(jobs.c.last_error, pg.length(end), type_=sa.Text)
    return sa.and_(is_skipped(), last == end)


def _why_skipped(kind: str, row: sa.Table) -> sa.ColumnElement[str]:
    """Why a job is skipped that waits for this one."""
    words = sa.case((row.c.outcome == FAILED, FAILED_WORDS), else_=" was cancelled")
    return pg.concat(f"{SKIPPED}{kind} ", row.c.id, words, type_=sa.Text)


@cache
def jobs_to_look_at() -> sa.Select[Any]:
    """The jobs whose watches are over, of those that watch one of these nodes."""
    return sa.select(blocked.c.node_id).where(
        blocked.c.waits_for == GIVEN, blocked.c.node_id > ZERO, has_ended(blocked.c.waits_for)
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
    late.  They are blocked no longer."""
    job = (
        sa.update(jobs)
        .where(jobs.c.id == JOBS)
        .values(run_at=sa.func.greatest(jobs.c.run_at, clock()))
        .returning(*columns_for(limited=limited))
        .cte("job")
    )
    woken = wake_up_call() if notify else sa.true()
    written = dispatch_of(job, limited=limited)
    return sa.select(woken).add_cte(*written, unblock_jobs().cte("unblocked"))


@cache
def skip_jobs() -> sa.Executable:
    """End locked jobs as cancelled, each for its reason."""
    skipped = document("skipped", sa.column("id", sa.BigInteger), sa.column("reason", sa.Text))
    job = (
        sa.update(jobs)
        .where(jobs.c.id == skipped.c.id)
        .values(
            outcome=CANCELLED,
            finished_at=clock(),
            held_unique_key=sa.null(),
            last_error=skipped.c.reason,
        )
        .returning(*LETTER)
        .cte("job")
    )
    return sa.select(job.c.id).add_cte(dead_letter_of(job))


@cache
def drop_jobs() -> sa.Executable:
    """Delete jobs that will never run, with all that is on record about them."""
    gone = sa.delete(jobs).where(jobs.c.id == JOBS).returning(jobs.c.id).cte("gone")
    return sa.select(gone.c.id).add_cte(*deleted_records(gone))


@cache
def unblock_jobs() -> sa.Delete:
    """Delete the rows of these locked jobs."""
    return sa.delete(blocked).where(blocked.c.node_id == JOBS)


@cache
def drop_left_rows() -> sa.Executable:
    """Delete the rows that jobs have left which were cancelled while their rows were locked."""
    is_left = sa.and_(blocked.c.node_id > ZERO, ~is_unfinished(blocked.c.node_id), sees_all(jobs))
    return delete_unlocked(blocked, blocked.c.waits_for == GIVEN, is_left)


@cache
def unblock_job() -> sa.Executable:
    """Delete the row of a job that is cancelled or deleted.  Never waits for a look."""
    row = delete_unlocked(blocked, blocked.c.node_id == JOB)
    return row.returning(blocked.c.node_id)


class Over(NamedTuple):
    """Who watches a node that has ended."""

    batch_ids: list[int]
    jobs: bool
    """Whether jobs do."""


class Look(NamedTuple):
    """What a look has done."""

    released: int = 0
    """How many jobs have got their messages."""
    ended: Sequence[int] = ()
    """The jobs that it has skipped or dropped, or the batch that it has ended: others may watch
    them."""
    watches: Sequence[int] = ()
    """What others watch now."""
    is_full: bool = False
    """Whether more jobs may be left."""
    batch_ids: Sequence[int] = ()
    """The batches to look at next, which watch one of the nodes or are one of them."""


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
        [row] = fetch(self._executor, over(), _nodes(node_ids))
        return Over(*row)

    def jobs_to_look_at(self, node_ids: Iterable[int]) -> list[int]:
        """The jobs that watch one of these nodes and do not need to any more."""
        return list(self._executor.execute(jobs_to_look_at(), _nodes(node_ids)).scalars())

    def look(self, node_ids: Iterable[int], *, notify: bool, job_id: int | None = None) -> Look:
        """Look at the jobs that watch one of these nodes, or at one of them, and find the batches
        that do.

        Needs a transaction in READ COMMITTED: each statement after the lock must see what the last
        addition has committed.  The caller looks again, after the commit, at what they watch now.
        """
        given = _nodes(node_ids)
        batch_ids: list[int] = []
        if job_id is None:
            batch_ids, has_jobs = self.over(node_ids)
            if not has_jobs:
                return Look(batch_ids=batch_ids)
            rows = fetch(self._executor, lock_jobs(one=False), given)
        else:
            rows = fetch(self._executor, lock_jobs(one=True), {**given, "job_id": job_id})
        if not rows:
            self._executor.execute(drop_left_rows(), given)
            return Look(batch_ids=batch_ids)
        locked = {row[0]: row[1:] for row in rows}
        found = fetch(self._executor, predecessors(), _jobs(locked))
        watches = {id: other for id, other, *_ in found if other is not None}
        released: dict[bool, list[int]] = {False: [], True: []}
        skipped: dict[int, str] = {}
        dropped: list[int] = []
        for id, other, *causes in found:
            limited, in_workflow, when = locked[id]
            if other is not None:
                continue
            if (reason := _why_not(when, *causes)) is None:
                released[limited].append(id)
            elif in_workflow:
                skipped[id] = reason
            else:
                dropped.append(id)
        self._write(watches, released, skipped, dropped, notify=notify)
        return Look(
            released=sum(map(len, released.values())),
            ended=[*skipped, *dropped],
            watches=list(watches.values()),
            is_full=len(locked) == JOBS_IN_A_LOOK,
            batch_ids=batch_ids,
        )

    def _write(
        self,
        watches: Mapping[int, int],
        released: Mapping[bool, Sequence[int]],
        skipped: Mapping[int, str],
        dropped: Sequence[int],
        *,
        notify: bool,
    ) -> None:
        """Write what is decided about locked jobs; those to release by whether they have limits."""
        run = self._executor.execute
        if watches:
            rows = [{"id": id, "other": other} for id, other in watches.items()]
            run(watch_others(), {"watches": json.dumps(rows)})
        for limited, job_ids in released.items():
            if job_ids:
                fetch(self._executor, release_jobs(limited=limited, notify=notify), _jobs(job_ids))
        if skipped:
            reasons = [{"id": id, "reason": reason} for id, reason in skipped.items()]
            run(skip_jobs(), {"skipped": json.dumps(reasons)})
        if dropped:
            run(drop_jobs(), _jobs(dropped))
        if skipped or dropped:
            run(unblock_jobs(), _jobs([*skipped, *dropped]))


def common_outcome(failed: object, cancelled: object) -> JobStatus:
    """The outcome of several nodes, by whether any has failed, and whether any was cancelled."""
    if failed:
        return JobStatus.FAILED
    return JobStatus.CANCELLED if cancelled else JobStatus.SUCCEEDED


def _why_not(
    when: str | None, failed: str | None, cancelled: str | None, none_needed: bool | None
) -> str | None:
    """Why a job is skipped all of whose predecessors have ended; None if it runs."""
    runs = common_outcome(failed, cancelled) in outcomes_noted(when)
    return None if runs and not none_needed else failed or cancelled or NOT_NEEDED


def named(node_id: int) -> str:
    """A node in words."""
    return f"job {node_id}" if node_id > 0 else f"batch {-node_id}"


def _nodes(node_ids: Iterable[int]) -> dict[str, str]:
    return {"node_ids": array_of(map(str, node_ids))}


def _jobs(job_ids: Iterable[int]) -> dict[str, str]:
    return {"job_ids": array_of(map(str, job_ids))}
