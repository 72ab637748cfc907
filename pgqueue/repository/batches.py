"""Batches: create them, add jobs to them, and find out when the last job has ended.

A settle knows nothing of batches.  Each open batch names one job for which it waits, and only when
that job has ended does a worker look for the next unfinished one.  So a batch of a million jobs
costs one probe by key at each look.
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
from pgqueue.models import JobStatus
from pgqueue.repository.enqueue import Enqueues, NewJob
from pgqueue.repository.reading import moment
from pgqueue.repository.references import Reference, is_free
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CTID,
    FAILED,
    Executor,
    among,
    batch_jobs,
    batches,
    clock,
    count_rows,
    jobs,
    json_parameter,
    pg,
    seconds,
    sees_all,
    text_parameter,
)
from pgqueue.rules.retention import Retention

BATCH = sa.bindparam("batch_id", type_=sa.BigInteger)
AFTER = sa.bindparam("after", type_=sa.BigInteger)
IS_OPEN = batches.c.ended_at.is_(None)
NOW = pg.statement_timestamp()
FIRST_COUNT = batches.c.created_at + sa.literal_column("interval '1 second'")
LONGEST: sa.ColumnElement[Any] = sa.literal_column("interval '1 minute'")
A_DAY = sa.literal_column("86400::double precision", sa.Float)
"""An ended batch stays so long at least: its callback reads it."""


@cache
def add_batch(*, named: bool) -> sa.Executable:
    """Insert a batch without callbacks; returns its id.

    ``named``: of an application with a name.  Without one, an older grant of rights is enough.
    """
    row = {"name": sa.bindparam("name", type_=sa.Text), "meta": json_parameter("meta")}
    if named:
        row["application"] = text_parameter("of_application")
    return sa.insert(batches).values(row).returning(batches.c.id)


@cache
def set_callbacks(callbacks: tuple[str, ...]) -> sa.Executable:
    values = {name: json_parameter(name) for name in callbacks}
    return sa.update(batches).where(batches.c.id == BATCH).values(values)


@cache
def keep_open() -> sa.Executable:
    """Lock an open batch, so that it cannot end before this transaction does; no row if it has.

    FOR KEY SHARE: any number of transactions may add jobs at once, and only the FOR UPDATE of an
    end conflicts with it.  After a wait for an end, READ COMMITTED compares ``ended_at`` again.
    """
    return (
        sa.select(batches.c.id)
        .where(batches.c.id == BATCH, IS_OPEN)
        .with_for_update(read=True, key_share=True)
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


def may_have_ended() -> sa.ColumnElement[bool]:
    """Whether a batch is open, and the job for which it waits has ended or was never chosen."""
    return sa.and_(IS_OPEN, ~_is_unfinished(batches.c.waits_for))


def is_count_due() -> sa.ColumnElement[bool]:
    """Whether a batch, if it is open, is to be counted again."""
    return sa.func.coalesce(batches.c.count_at, FIRST_COUNT) <= NOW


def is_wanted() -> sa.ColumnElement[bool]:
    """Whether a batch may have ended, or is to be counted."""
    return sa.and_(IS_OPEN, sa.or_(is_count_due(), ~_is_unfinished(batches.c.waits_for)))


def has_candidates() -> sa.ColumnElement[bool]:
    """Whether a batch may have ended, or is to be counted; one probe for each open batch.

    The order makes the planner read the index of the open batches, and not those that have ended.
    """
    first = sa.select(batches.c.id).where(is_wanted()).order_by(batches.c.id)
    return first.limit(sa.literal_column("1")).scalar_subquery().is_not(None)


@cache
def candidates() -> sa.Executable:
    """The first batches after another id that may have ended or are to be counted."""
    return (
        sa.select(batches.c.id, may_have_ended(), is_count_due())
        .where(is_wanted(), batches.c.id > AFTER)
        .order_by(batches.c.id)
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )


@cache
def lock_candidate() -> sa.Executable:
    """Lock a batch that may have ended.

    No row if a transaction adds jobs to it, or another worker looks at it, or row security hides
    jobs, which would look as if they had ended.
    """
    return (
        sa.select(batches.c.waits_for, *_callbacks())
        .where(may_have_ended(), batches.c.id == BATCH, sees_all(jobs, batch_jobs))
        .with_for_update(skip_locked=True)
    )


@cache
def candidates_in_full() -> sa.Executable:
    """The batches that may have ended, with their callbacks, and for how long.  For an operator."""
    ended_at = (
        sa.select(jobs.c.finished_at).where(jobs.c.id == batches.c.waits_for).scalar_subquery()
    )
    since = sa.func.coalesce(ended_at, batches.c.created_at)
    return (
        sa.select(
            batches.c.id,
            *_callbacks(),
            pg.statement_timestamp() - since,
        )
        .where(may_have_ended())
        .order_by(batches.c.id)
    )


@cache
def next_unfinished() -> sa.Executable:
    """The first unfinished job of a batch after another job.

    A separate statement, after the lock: the snapshot of the statement that locks may be older
    than the last addition.
    """
    job_id = batch_jobs.c.job_id
    return (
        sa.select(job_id)
        .where(batch_jobs.c.batch_id == BATCH, job_id > AFTER, _is_unfinished(job_id))
        .order_by(job_id)
        .limit(sa.literal_column("1"))
    )


@cache
def count_jobs() -> sa.Executable:
    """How many jobs a batch has, how they have ended, and its first unfinished job."""
    return _counts(BATCH)


@cache
def wait_for() -> sa.Executable:
    job_id = sa.bindparam("job_id", type_=sa.BigInteger)
    return sa.update(batches).where(batches.c.id == BATCH).values(waits_for=job_id)


@cache
def end_batch() -> sa.Executable:
    names = ("outcome", "total", "failed", "cancelled", "callback_id")
    values = {name: sa.bindparam(name, type_=batches.c[name].type) for name in names}
    return (
        sa.update(batches)
        .where(batches.c.id == BATCH, IS_OPEN)
        .values(**values, waits_for=sa.null(), ended_at=clock())
    )


@cache
def begin_count() -> sa.Executable:
    """Let no other worker count a batch for a minute; no row if another one does.

    Locks no key, so that jobs can be added meanwhile.
    """
    return (
        sa.update(batches)
        .where(batches.c.id == BATCH, IS_OPEN, is_count_due())
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
    return sa.select(parts_gone + sa.select(count_rows()).select_from(gone).scalar_subquery())


def is_in_open_batch() -> sa.ColumnElement[bool]:
    """Whether a job must stay, because its outcome counts at the end of a batch.

    Two probes by key for a job of a batch, one for any other.
    """
    is_open = sa.select(batches.c.id).where(batches.c.id == batch_jobs.c.batch_id, IS_OPEN)
    return (
        sa.select(batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == jobs.c.id, is_open.offset(AS_IT_STANDS).exists())
        .offset(AS_IT_STANDS)
        .exists()
    )


def _is_due() -> tuple[sa.ColumnElement[bool], ...]:
    keep = sa.select(json_parameter("keep_of_others")).scalar_subquery()
    span = sa.cast(keep.op("->>")(batches.c.outcome), sa.Float)
    return (
        batches.c.ended_at <= pg.statement_timestamp() - seconds(sa.func.greatest(span, A_DAY)),
        span >= sa.literal_column("0::double precision", sa.Float),
        ~_is_unfinished(batches.c.callback_id),
        sees_all(jobs),
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
            _count_if(jobs.c.outcome == CANCELLED).label("cancelled"),
            pg.min(sa.case((is_unfinished, jobs.c.id))).label("first_unfinished"),
        )
        .select_from(batch_jobs.outerjoin(jobs, jobs.c.id == batch_jobs.c.job_id))
        .where(batch_jobs.c.batch_id == batch_id, *conditions)
    )


def _count_if(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return count_rows().filter(condition)


def _callbacks() -> list[sa.ColumnElement[Any]]:
    names = ("on_success", "on_failure", "on_cancelled")
    return [sa.cast(batches.c[name], sa.Text) for name in names]


def _is_unfinished(job_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """One probe by key for each row: the OFFSET keeps the planner from reading all jobs."""
    unfinished = sa.select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.outcome.is_(None))
    return unfinished.offset(AS_IT_STANDS).exists()


JOBS_IN_A_STATEMENT = 10_000


class UnreadableCallback(ValueError):
    """Another release has written the callback of a batch."""


@dataclass(frozen=True, slots=True)
class Callback:
    """The job that the end of a batch enqueues."""

    new: NewJob
    args: str
    limit_keys: str | None

    def document(self) -> str:
        """The same as JSON, so that any worker can enqueue the job without knowing its task."""
        new = self.new
        values = {
            "task": new.task,
            "queue": new.queue,
            "priority": new.priority,
            "max_attempts": new.max_attempts,
            "meta": new.meta,
            "tags": list(new.tags),
            "args": self.args,
            "limit_keys": self.limit_keys,
        }
        return json.dumps(values)

    @classmethod
    def of(cls, document: str, *, notify: bool) -> "Callback":
        """Read the JSON.  Raises UnreadableCallback if another release has written other values."""
        values = json.loads(document)
        if not isinstance(values, dict) or values.keys() != TYPES.keys():
            raise UnreadableCallback(
                "its callback has other values than this release reads; start workers of the "
                "release that has created the batch"
            )
        for name, types in TYPES.items():
            if not isinstance(values[name], types):
                raise UnreadableCallback(
                    f"its callback has {type(values[name]).__name__} as {name}, which this release "
                    "cannot read; start workers of the release that has created the batch"
                )
        args, limit_keys = values.pop("args"), values.pop("limit_keys")
        return cls(NewJob(**values, notify=notify), args, limit_keys)


TYPES: Mapping[str, type | tuple[type, ...]] = {
    "task": str,
    "queue": str,
    "priority": int,
    "max_attempts": int,
    "meta": (str, type(None)),
    "tags": list,
    "args": str,
    "limit_keys": (str, type(None)),
}
"""The values of a stored callback.  One more may mean something that must not be left out."""


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
    """The job that the end has enqueued."""
    created_at: datetime
    ended_at: datetime | None


class Candidate(NamedTuple):
    """A batch that may have ended, and which no worker has ended so far."""

    id: int
    since: timedelta
    unreadable: str | None
    """Why this code cannot read a callback of the batch."""


class Counts(NamedTuple):
    """The jobs of a batch."""

    total: int
    unfinished: int
    failed: int
    cancelled: int
    first_unfinished: int | None


class Batches:
    """The batches behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, name: str | None, meta: str | None, application: str) -> int:
        """Insert a batch; returns its id."""
        row = {"name": name, "meta": meta}
        if application:
            row["of_application"] = application
        statement = add_batch(named=bool(application))
        return int(self._executor.execute(statement, row).scalar_one())

    def set_callbacks(self, batch_id: int, callbacks: Mapping[str, Callback]) -> None:
        """``callbacks``: by the names of their columns."""
        documents = {name: callback.document() for name, callback in callbacks.items()}
        self._run(set_callbacks(tuple(sorted(documents))), batch_id, **documents)

    def keep_open(self, batch_id: int) -> None:
        """Keep a batch from ending before this transaction does.

        Raises BatchEnded or BatchNotFound.
        """
        parameters = {"batch_id": batch_id}
        if self._executor.execute(keep_open(), parameters).first() is not None:
            return
        if self._executor.execute(is_known(), parameters).first() is None:
            raise not_found(batch_id)
        raise BatchEnded(
            f"batch {batch_id} has ended, and its callback may have run, so no job can be added; "
            "create another batch"
        )

    def add_jobs(self, batch_id: int, job_ids: Sequence[int]) -> None:
        for start in range(0, len(job_ids), JOBS_IN_A_STATEMENT):
            part = list(job_ids[start : start + JOBS_IN_A_STATEMENT])
            self._executor.execute(add_jobs(), {"batch_id": batch_id, "job_ids": part})

    def candidates(self, *, after: int, limit: int) -> list[tuple[int, bool, bool]]:
        """The first batches after an id that may have ended or are to be counted: the id, whether
        it may have ended, whether it is to be counted.  Locks nothing."""
        parameters = {"after": after, "limit": limit}
        rows = self._executor.execute(candidates(), parameters)
        return [(row[0], row[1], row[2]) for row in rows]

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

    def overdue(self) -> list[Candidate]:
        """All batches that may have ended."""
        rows = self._executor.execute(candidates_in_full())
        return [Candidate(id, since, _fault_of(callbacks)) for id, *callbacks, since in rows]

    def end(self, batch_id: int, *, notify: bool) -> bool | None:
        """Lock a batch that may have ended, and end it if it has; returns whether it has, None if
        another transaction has locked it.

        Needs a transaction in READ COMMITTED: each statement after the lock must see what the last
        addition has committed.  Raises UnreadableCallback.
        """
        row = self._run(lock_candidate(), batch_id).first()
        if row is None:
            return None
        waited_for, on_success, on_failure, on_cancelled = row
        found = self._run(next_unfinished(), batch_id, after=waited_for or 0)
        counts = Counts(0, 0, 0, 0, found.scalar())
        if counts.first_unfinished is None:
            # Once more from the first job on: one may have been requeued, or added behind.
            counts = Counts(*self._run(count_jobs(), batch_id).one())
        if counts.first_unfinished is not None:
            self._run(wait_for(), batch_id, job_id=counts.first_unfinished)
            return False
        if counts.failed:
            outcome, callback = JobStatus.FAILED, on_failure
        elif counts.cancelled:
            outcome, callback = JobStatus.CANCELLED, on_cancelled or on_failure
        else:
            outcome, callback = JobStatus.SUCCEEDED, on_success
        self._end(batch_id, counts, outcome, callback, notify=notify)
        return True

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

    def _end(
        self,
        batch_id: int,
        counts: Counts,
        outcome: JobStatus,
        document: str | None,
        *,
        notify: bool,
    ) -> None:
        callback_id = None
        if document is not None:
            callback = Callback.of(document, notify=notify)
            placed = Enqueues(self._executor).enqueue(
                callback.new, callback.args, unique_key=None, limit_keys=callback.limit_keys
            )
            callback_id = placed.id
        self._run(
            end_batch(),
            batch_id,
            outcome=outcome.value,
            total=counts.total,
            failed=counts.failed,
            cancelled=counts.cancelled,
            callback_id=callback_id,
        )

    def _run(self, statement: Any, batch_id: int, **parameters: Any) -> Any:
        return self._executor.execute(statement, {"batch_id": batch_id, **parameters})


def _rules_of(retention: Retention) -> dict[str, str]:
    keep = retention.parameters()["keep_of_others"]
    return {"keep_of_others": keep, "of_application": retention.application}


def _fault_of(documents: Sequence[str | None]) -> str | None:
    try:
        for document in documents:
            if document is not None:
                Callback.of(document, notify=False)
    except UnreadableCallback as error:
        return str(error)
    return None


def not_found(batch_id: int) -> BatchNotFound:
    return BatchNotFound(
        f"batch {batch_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.batches"
    )


def _state_of(row: Any) -> BatchState:
    id, name, meta, *others = row
    return BatchState(id, name, json.loads(meta) if meta else {}, *others)
