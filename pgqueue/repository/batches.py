"""Batches: create them, add jobs to them, and end them when the last job has ended.

A settle knows nothing of batches.  An open batch watches one unfinished job, as
:mod:`pgqueue.repository.blocked` explains, and a worker looks at the batch when this job has ended:
:meth:`Batches.look`.  The batch watches its newest unfinished job, because jobs mostly end in the
order of their ids: so a batch of a million jobs is looked at once or twice.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.errors import BatchEnded, BatchNotFound
from pgqueue.repository.blocked import (
    LAST,
    Look,
    common_outcome,
    has_ended,
    has_failed_before,
    is_not_needed,
    is_unfinished,
    runs_when,
    workflow_of,
)
from pgqueue.repository.reading import moment
from pgqueue.repository.references import Reference, is_free
from pgqueue.repository.signals import tell_waiting
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CTID,
    FAILED,
    Executor,
    among,
    batch_jobs,
    batches,
    blocked,
    clock,
    count_rows,
    dependencies,
    jobs,
    json_parameter,
    pg,
    seconds,
    sees_all,
    text_parameter,
)
from pgqueue.rules.retention import Retention

BATCH = sa.bindparam("batch_id", type_=sa.BigInteger)
NODE = blocked.c.node_id == -sa.cast(BATCH, sa.BigInteger)
"""The row of a batch in ``blocked``, which it has until it ends."""
AFTER = sa.bindparam("after", type_=sa.BigInteger)
IS_OPEN = batches.c.ended_at.is_(None)
NOW = pg.statement_timestamp()
FIRST_COUNT = batches.c.created_at + sa.literal_column("interval '1 second'")
LONGEST: sa.ColumnElement[Any] = sa.literal_column("interval '1 minute'")
A_DAY = sa.literal_column("86400::double precision", sa.Float)
"""An ended batch stays so long at least: its callback reads it."""


@cache
def add_batch() -> sa.Executable:
    """Insert a batch that watches no job yet; returns its id.

    A group belongs to the application of its workflow.
    """
    workflow = sa.cast(sa.bindparam("group_of", type_=sa.BigInteger), sa.BigInteger)
    whole = sa.alias(batches, "whole")
    row = {
        "name": sa.bindparam("name", type_=sa.Text),
        "meta": json_parameter("meta"),
        "application": sa.func.coalesce(
            sa.select(whole.c.application).where(whole.c.id == workflow).scalar_subquery(),
            text_parameter("of_application"),
        ),
        "is_workflow": sa.cast(sa.bindparam("as_workflow", type_=sa.Boolean), sa.Boolean),
        "workflow_id": workflow,
        "deadline_at": clock() + sa.cast(sa.bindparam("deadline", type_=sa.Interval), sa.Interval),
    }
    batch = sa.insert(batches).values(row).returning(batches.c.id).cte("batch")
    watch = sa.select(-batch.c.id, LAST)
    node = sa.insert(blocked).from_select(["node_id", "waits_for"], watch)
    return node.returning(-blocked.c.node_id)


@cache
def keep_open() -> sa.Executable:
    """Lock an open batch, so that it cannot end before this transaction does; no row if it has.

    FOR SHARE: any number of transactions may add jobs at once, and only a look conflicts with it.
    """
    kind = sa.select(batches.c.is_workflow).where(
        batches.c.id == BATCH, batches.c.workflow_id.is_(None)
    )
    node = sa.select(kind.scalar_subquery()).select_from(blocked).where(NODE)
    return node.with_for_update(read=True, of=blocked)


@cache
def is_member() -> sa.Executable:
    job_id = sa.bindparam("job_id", type_=sa.BigInteger)
    return sa.select(
        sa.exists().where(batch_jobs.c.batch_id == BATCH, batch_jobs.c.job_id == job_id)
    )


@cache
def is_known() -> sa.Executable:
    return sa.select(batches.c.id).where(batches.c.id == BATCH)


@cache
def add_jobs() -> sa.Executable:
    """Add jobs by their ids.  Those that a savepoint has undone meanwhile are left out."""
    ids = sa.cast(sa.bindparam("job_ids"), sa.ARRAY(sa.BigInteger))
    rows = sa.select(sa.cast(BATCH, sa.BigInteger), jobs.c.id).where(jobs.c.id == sa.any_(ids))
    return pg_insert(batch_jobs).from_select(["batch_id", "job_id"], rows).on_conflict_do_nothing()


def is_count_due() -> sa.ColumnElement[bool]:
    """Whether a batch is open, and is to be counted again."""
    return sa.and_(IS_OPEN, sa.func.coalesce(batches.c.count_at, FIRST_COUNT) <= NOW)


def has_due_count() -> sa.ColumnElement[bool]:
    """Whether a batch is to be counted.

    The order makes the planner read the index of the open batches, and not those that have ended.
    """
    first = sa.select(batches.c.id).where(is_count_due()).order_by(batches.c.id)
    return first.limit(sa.literal_column("1")).scalar_subquery().is_not(None)


def is_past_deadline() -> sa.ColumnElement[bool]:
    """Whether the deadline of a batch that is open is over."""
    return sa.and_(IS_OPEN, batches.c.deadline_at.is_not(None), batches.c.deadline_at <= NOW)


def has_past_deadline() -> sa.ColumnElement[bool]:
    """Whether the deadline of a batch is over that is open."""
    first = sa.select(batches.c.id).where(is_past_deadline()).order_by(batches.c.deadline_at)
    return first.limit(sa.literal_column("1")).scalar_subquery().is_not(None)


@cache
def jobs_past_deadline() -> sa.Executable:
    """The first jobs, after an id, of batches whose deadlines are over; without those that start
    when others are cancelled."""
    overdue = sa.select(batches.c.id).where(is_past_deadline())
    return (
        sa.select(jobs.c.id)
        .join_from(batch_jobs, jobs, jobs.c.id == batch_jobs.c.job_id)
        .where(batch_jobs.c.batch_id == among(overdue), batch_jobs.c.job_id > AFTER)
        .where(~runs_when(CANCELLED))
        .where(jobs.c.outcome.is_(None), jobs.c.cancel_requested_at.is_(None))
        .order_by(batch_jobs.c.job_id)
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )


@cache
def due_counts() -> sa.Executable:
    """The first batches after another id that are to be counted."""
    due = sa.select(batches.c.id).where(is_count_due(), batches.c.id > AFTER)
    return due.order_by(batches.c.id).limit(sa.bindparam("limit", type_=sa.BigInteger))


@cache
def lock_batch() -> sa.Executable:
    """Lock a batch whose watch is over.

    No row if a transaction adds jobs to it, or another worker looks at it, or row security hides
    jobs, which would look as if they had ended.
    """
    return (
        sa.select(blocked.c.node_id)
        .where(NODE, has_ended(blocked.c.waits_for), sees_all(jobs, batch_jobs, batches))
        .with_for_update(key_share=True, skip_locked=True)
    )


@cache
def newest_unfinished() -> sa.Executable:
    """The unfinished job of a batch that has the highest id.

    A separate statement, after the lock: the snapshot of the statement that locks may be older
    than the last addition.  From the end on each time: jobs are added there, and one that has
    ended before may have been requeued.
    """
    job_id = batch_jobs.c.job_id
    return (
        sa.select(job_id)
        .where(batch_jobs.c.batch_id == BATCH, is_unfinished(job_id))
        .order_by(job_id.desc())
        .limit(sa.literal_column("1"))
    )


@cache
def overdue() -> sa.Executable:
    """The open batches whose watches are over, and for how long.  For an operator."""
    watched = sa.select(jobs.c.finished_at).where(jobs.c.id == blocked.c.waits_for)
    since = sa.func.coalesce(watched.scalar_subquery(), batches.c.created_at)
    return (
        sa.select(batches.c.id, pg.statement_timestamp() - since)
        .join_from(blocked, batches, batches.c.id == -blocked.c.node_id)
        .where(has_ended(blocked.c.waits_for))
        .order_by(batches.c.id)
    )


@cache
def count_jobs() -> sa.Executable:
    """How many jobs a batch has, how they have ended, and its newest unfinished job."""
    return _counts(BATCH)


@cache
def watch_job() -> sa.Executable:
    job_id = sa.bindparam("job_id", type_=sa.BigInteger)
    return sa.update(blocked).where(NODE).values(waits_for=job_id)


@cache
def end_batch() -> sa.Executable:
    names = ("outcome", "total", "failed", "cancelled")
    values = {name: sa.bindparam(name, type_=batches.c[name].type) for name in names}
    node = sa.delete(blocked).where(NODE).cte("node")
    batch = sa.update(batches).where(batches.c.id == BATCH, IS_OPEN)
    of_batch = sa.cast(batches.c.id, sa.Text)
    callback = (
        sa.select(pg.min(jobs.c.id))
        .join_from(dependencies, jobs, jobs.c.id == dependencies.c.job_id)
        .where(dependencies.c.after_id == -sa.cast(BATCH, sa.BigInteger), jobs.c.outcome.is_(None))
        .where(batches.c.workflow_id.is_(None), runs_when(text_parameter("outcome_is")))
        .where(sa.func.coalesce(workflow_of(), of_batch) == of_batch)
        .correlate(batches)
    )
    batch = batch.values(**values, ended_at=clock(), callback_id=callback.scalar_subquery())
    return batch.add_cte(node, tell_waiting(BATCH))


@cache
def begin_count() -> sa.Executable:
    """Let no other worker count a batch for a minute; no row if another one does."""
    return (
        sa.update(batches)
        .where(batches.c.id == BATCH, is_count_due())
        .values(count_at=NOW + LONGEST)
        .returning(batches.c.counted)
    )


@cache
def write_count() -> sa.Executable:
    wait = seconds(sa.cast(sa.bindparam("wait", type_=sa.Double), sa.Double))
    return (
        sa.update(batches)
        .where(batches.c.id == BATCH, IS_OPEN)
        .values(counted=json_parameter("counts"), count_at=clock() + wait)
    )


@cache
def batch_states(*, one: bool, exact: bool) -> sa.Executable:
    """Batches with their progress, the newest first; ``one``: the batch with this id.

    An open batch is counted, which reads all of its jobs; without ``exact`` it has the numbers that
    a worker has counted last, if one has.  An ended batch has its numbers.
    """
    columns = batches.c
    conditions = [IS_OPEN] if exact else [IS_OPEN, columns.counted.is_(None)]
    counted = _counts(columns.id, *conditions).lateral("counted")

    def number(name: str, now: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        at_end = columns["total" if name == "ended" else name]
        if exact:
            return sa.func.coalesce(at_end, now)
        # The name as text: an operator for VARCHAR might be another role's.
        last = sa.cast(columns.counted.op("->>")(sa.cast(name, sa.Text)), sa.BigInteger)
        return sa.func.coalesce(at_end, last, now)

    found = (
        sa.select(
            *(columns.id, columns.name, sa.cast(columns.meta, sa.Text)),
            number("total", counted.c.total),
            number("ended", counted.c.total - counted.c.unfinished),
            number("failed", counted.c.failed),
            number("cancelled", counted.c.cancelled),
            columns.outcome,
            columns.callback_id,
            moment(columns.created_at),
            moment(columns.ended_at),
        )
        .select_from(batches)
        .join(counted, sa.true())
        .order_by(columns.id.desc())
    )
    if one:
        return found.where(columns.id == BATCH)
    # A group is a part of its workflow.
    found = found.where(columns.workflow_id.is_(None))
    return found.limit(sa.bindparam("limit", type_=sa.BigInteger))


@cache
def next_due_batch(references: tuple[Reference, ...]) -> sa.Executable:
    """The first batch of an application, after another id, whose time is over."""
    return (
        sa.select(batches.c.id)
        .where(batches.c.id > AFTER, *_is_due(), *is_free(references, batches))
        .order_by(batches.c.id)
        .limit(sa.literal_column("1"))
    )


@cache
def prune_batch() -> sa.Executable:
    """Delete a batch whose time is over, or at most so many of its rows.

    Returns how many rows were deleted.  A batch whose callback has not ended stays.
    """
    due = sa.select(batches.c.id).where(batches.c.id == BATCH, *_is_due())
    old = due.with_for_update(skip_locked=True).cte("old")
    id = sa.select(old.c.id).scalar_subquery()
    size = sa.bindparam("size", type_=sa.BigInteger)
    places = sa.select(CTID).select_from(batch_jobs).where(batch_jobs.c.batch_id == id).limit(size)
    those = among(places) == CTID
    parts = sa.delete(batch_jobs).where(those).returning(batch_jobs.c.job_id).cte("parts")
    parts_gone = sa.select(count_rows()).select_from(parts).scalar_subquery()
    whole = sa.delete(batches).where(batches.c.id == id, parts_gone < size)
    gone = whole.returning(batches.c.id).cte("gone")
    # Who waited for it has ended, and would take it for one that has succeeded.
    edges = sa.delete(dependencies).where(dependencies.c.after_id == among(sa.select(-gone.c.id)))
    return sa.select(
        parts_gone + sa.select(count_rows()).select_from(gone).scalar_subquery()
    ).add_cte(edges.cte("edges"))


def is_awaited() -> sa.ColumnElement[bool]:
    """Whether a job must stay, because its outcome counts at the end of a batch, or for a job that
    waits for it.

    Few probes by key for a job of a batch, two for any other.
    """
    is_open = sa.select(batches.c.id).where(batches.c.id == batch_jobs.c.batch_id, IS_OPEN)
    member = (
        sa.select(batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == jobs.c.id, is_open.offset(AS_IT_STANDS).exists())
        .offset(AS_IT_STANDS)
    )
    return sa.or_(member.exists(), _has_waiting(jobs.c.id))


def _has_waiting(node_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a blocked job waits for a node."""
    waits = sa.select(dependencies.c.job_id).where(dependencies.c.after_id == node_id)
    waiting = waits.join(blocked, blocked.c.node_id == dependencies.c.job_id)
    return waiting.offset(AS_IT_STANDS).correlate_except(dependencies, blocked).exists()


def _is_due() -> tuple[sa.ColumnElement[bool], ...]:
    keep = sa.select(json_parameter("keep_of_others")).scalar_subquery()
    span = sa.cast(keep.op("->>")(batches.c.outcome), sa.Float)
    whole = sa.alias(batches, "whole")
    is_in_open_workflow = sa.exists().where(
        whole.c.id == batches.c.workflow_id, whole.c.ended_at.is_(None)
    )
    return (
        ~is_in_open_workflow,
        ~_has_waiting(-batches.c.id),
        batches.c.ended_at <= pg.statement_timestamp() - seconds(sa.func.greatest(span, A_DAY)),
        span >= sa.literal_column("0::double precision", sa.Float),
        ~is_unfinished(batches.c.callback_id),
        sees_all(jobs, blocked, dependencies),
        batches.c.application == text_parameter("of_application"),
    )


def _counts(
    batch_id: sa.ColumnElement[Any], *conditions: sa.ColumnElement[bool]
) -> sa.Select[*tuple[Any, ...]]:
    """A job that is gone has ended and has not failed: pruning leaves the jobs of open batches."""
    is_unfinished = sa.and_(jobs.c.id.is_not(None), jobs.c.outcome.is_(None))
    return (
        sa.select(
            count_rows().label("total"),
            _count_if(is_unfinished).label("unfinished"),
            _count_if(jobs.c.outcome == FAILED).label("failed"),
            _count_if(sa.and_(jobs.c.outcome == CANCELLED, ~is_not_needed())).label("cancelled"),
            _count_if(has_failed_before()).label("failed_before"),
            pg.max(sa.case((is_unfinished, jobs.c.id))).label("newest_unfinished"),
        )
        .select_from(batch_jobs.outerjoin(jobs, jobs.c.id == batch_jobs.c.job_id))
        .where(batch_jobs.c.batch_id == batch_id, *conditions)
    )


def _count_if(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return count_rows().filter(condition)


JOBS_IN_A_STATEMENT = 10_000


class NewBatchRow(NamedTuple):
    """The values of a new batch, workflow or group."""

    name: str | None
    meta: str | None = None
    of_application: str = ""
    as_workflow: bool = False
    group_of: int | None = None
    """Of a group, its workflow."""
    deadline: timedelta | None = None


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch and its progress, as read by :meth:`PgQueue.get_batch`."""

    id: int
    name: str | None
    meta: Mapping[str, Any]
    total: int
    """How many jobs have been added."""
    ended: int
    """How many of them have succeeded, failed, were cancelled, or were deleted."""
    failed: int
    cancelled: int
    outcome: str | None
    """None while the batch is open, then "failed" if a job of it has failed, else "cancelled" if
    one was cancelled, else "succeeded"."""
    callback_id: int | None
    """The job that starts after the batch; None while it is open."""
    created_at: datetime
    ended_at: datetime | None


class OverdueBatch(NamedTuple):
    """A batch that may have ended, and at which no worker has looked so far."""

    id: int
    since: timedelta


class Counts(NamedTuple):
    """The jobs of a batch."""

    total: int
    unfinished: int
    failed: int
    cancelled: int
    failed_before: int
    """Those of the cancelled ones that were skipped because another job has failed."""
    newest_unfinished: int | None


class Batches:
    """The batches behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, new: NewBatchRow) -> int:
        """Insert a batch; returns its id."""
        return int(self._executor.execute(add_batch(), new._asdict()).scalar_one())

    def watch(self, batch_id: int, job_id: int) -> None:
        """Let a batch watch one of its jobs.  If the job has ended, the sweep finds another."""
        self._run(watch_job(), batch_id, job_id=job_id)

    def keep_open(self, batch_id: int, *, is_workflow: bool) -> None:
        """Keep a batch from ending before this transaction does.

        Raises BatchEnded, or BatchNotFound, also for a workflow if it is to be none.
        """
        parameters = {"batch_id": batch_id}
        kind = self._executor.execute(keep_open(), parameters).first()
        if kind is not None and kind[0] is is_workflow:
            return
        if kind is not None:
            what, other = ("no workflow", "batch") if is_workflow else ("a workflow", "workflow")
            raise BatchNotFound(f"{batch_id} is {what}; use extend_{other}")
        if self._executor.execute(is_known(), parameters).first() is None:
            raise not_found(batch_id)
        raise BatchEnded(
            f"batch {batch_id} has ended, and its callback may have run, so no job can be added; "
            "create another batch"
        )

    def has_job(self, batch_id: int, job_id: int) -> bool:
        return bool(self._run(is_member(), batch_id, job_id=job_id).scalar())

    def add_jobs(self, batch_id: int, job_ids: Sequence[int]) -> None:
        for start in range(0, len(job_ids), JOBS_IN_A_STATEMENT):
            part = list(job_ids[start : start + JOBS_IN_A_STATEMENT])
            self._run(add_jobs(), batch_id, job_ids=part)

    def due_counts(self, *, after: int, limit: int) -> list[int]:
        """The first batches after an id that are to be counted.  Locks nothing."""
        parameters = {"after": after, "limit": limit}
        return list(self._executor.execute(due_counts(), parameters).scalars())

    def past_deadline(self, *, after: int, limit: int) -> list[int]:
        """The first jobs after an id that are to be cancelled as the deadline of their batch is
        over."""
        parameters = {"after": after, "limit": limit}
        return list(self._executor.execute(jobs_past_deadline(), parameters).scalars())

    def begin_count(self, batch_id: int) -> Mapping[str, Any] | None:
        """Take the next count of a batch; returns the last one, None if another worker counts."""
        row = self._run(begin_count(), batch_id).first()
        return None if row is None else row[0] or {}

    def count(self, batch_id: int, last: Mapping[str, Any]) -> None:
        """Count the jobs of an open batch, and write the progress into its row.

        The next count is in a second, later if nothing has changed, and so that counts take at most
        a fiftieth of the time.
        """
        began = time.monotonic()
        counts = Counts(*self._run(count_jobs(), batch_id).one())
        took = time.monotonic() - began
        new = {
            "total": counts.total,
            "ended": counts.total - counts.unfinished,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        }
        has_changed = any(last.get(name) != value for name, value in new.items())
        wait = 1.0 if has_changed else min(2 * last.get("wait", 0.5), 60.0)
        wait = max(wait, 50 * took)
        self._run(write_count(), batch_id, counts=json.dumps({**new, "wait": wait}), wait=wait)

    def progress(self, batch_id: int) -> BatchState:
        """A batch as it was last counted, exactly before the first count; raises BatchNotFound."""
        return self._state(batch_id, exact=False)

    def newest(self, limit: int) -> list[BatchState]:
        """The newest batches as they were last counted, exactly before their first counts."""
        return self._states(limit, exact=False)

    def overdue(self) -> list[OverdueBatch]:
        """All batches that may have ended."""
        return [OverdueBatch(*row) for row in self._executor.execute(overdue())]

    def look(self, batch_id: int) -> Look:
        """Look at a batch whose watch may be over: let it watch another job, or end it.

        Needs a transaction in READ COMMITTED: each statement after the lock must see what the last
        addition has committed.  The caller looks again, after the commit, at the job that the batch
        watches now.
        """
        if self._run(lock_batch(), batch_id).first() is None:
            return Look()
        watched: int | None = self._run(newest_unfinished(), batch_id).scalar()
        if watched is None:
            counts = Counts(*self._run(count_jobs(), batch_id).one())
            watched = counts.newest_unfinished  # requeued since
        if watched is not None:
            self.watch(batch_id, watched)
            return Look(watches=[watched])
        self._end(batch_id, counts)
        return Look(ended=[-batch_id])

    def state(self, batch_id: int) -> BatchState:
        """Return a batch with its progress; raises BatchNotFound."""
        return self._state(batch_id, exact=True)

    def states(self, limit: int) -> list[BatchState]:
        """Return the newest batches."""
        return self._states(limit, exact=True)

    def next_due(
        self, retention: Retention, references: tuple[Reference, ...], *, after: int
    ) -> int | None:
        """The first batch after an id whose time is over."""
        parameters = {**_rules_of(retention), "after": after}
        found: int | None = self._executor.execute(next_due_batch(references), parameters).scalar()
        return found

    def prune(self, batch_id: int, retention: Retention, size: int) -> int:
        """Delete up to ``size`` rows of a batch whose time is over; returns how many."""
        found = self._run(prune_batch(), batch_id, **_rules_of(retention), size=size)
        return int(found.scalar_one())

    def _state(self, batch_id: int, *, exact: bool) -> BatchState:
        row = self._run(batch_states(one=True, exact=exact), batch_id).first()
        if row is None:
            raise not_found(batch_id)
        return _state_of(row)

    def _states(self, limit: int, *, exact: bool) -> list[BatchState]:
        rows = self._executor.execute(batch_states(one=False, exact=exact), {"limit": limit})
        return [_state_of(row) for row in rows]

    def _end(self, batch_id: int, counts: Counts) -> None:
        name = common_outcome(counts.failed + counts.failed_before, counts.cancelled).value
        numbers = {"total": counts.total, "failed": counts.failed, "cancelled": counts.cancelled}
        self._run(end_batch(), batch_id, outcome=name, outcome_is=name, **numbers)

    def _run(self, statement: Any, batch_id: int, **parameters: Any) -> Any:
        return self._executor.execute(statement, {"batch_id": batch_id, **parameters})


def _rules_of(retention: Retention) -> dict[str, str]:
    keep = retention.parameters()["keep_of_others"]
    return {"keep_of_others": keep, "of_application": retention.application}


def not_found(batch_id: int) -> BatchNotFound:
    return BatchNotFound(
        f"batch {batch_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.batches"
    )


def _state_of(row: Any) -> BatchState:
    id, name, meta, *others = row
    return BatchState(id, name, json.loads(meta) if meta else {}, *others)
