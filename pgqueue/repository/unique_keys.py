"""Unique keys: an enqueue that may change or cancel the job that holds its key.

The enqueue locks the rows of the holders first (:func:`enqueue_or_lock_jobs`), so no two enqueues
change one job at the same time, and no worker settles it meanwhile.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.repository.enqueue import (
    Enqueues,
    NewJob,
    NewJobRow,
    Placed,
    PlacedAs,
    documents_of,
    enqueue_or_lock_jobs,
)
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.messages import DISPATCHED, NEW, Start, labels, start_time
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CTID,
    POSITION,
    Executor,
    among,
    blocked,
    clock,
    document,
    equal,
    jobs,
    message_queue,
    text_parameter,
    wake_up_call,
)
from pgqueue.rules.unique import Unique

KEPT = ("attempt", "crashes", "alone")
"""What a message says about past attempts."""


class KeyChanges:
    """Runs enqueues that may change the holders of their keys, in the caller's transaction."""

    def __init__(self, executor: Executor, *, running: int | None = None) -> None:
        """``running``: the job whose handler enqueues, which is not cancelled."""
        self._executor = executor
        self._running = running

    def enqueue(self, new: NewJob, rows: Sequence[NewJobRow]) -> list[Placed]:
        """Insert jobs; change the waiting jobs that hold their keys, or cancel the holders.

        The keys must be ascending, each at most once.  If a holder that is to be changed has
        started, ``until`` decides: with "started", a new job takes the key; otherwise the holder is
        returned unchanged.
        """
        unique = _unique_of(new)
        placed = self._at_latest(new, rows)
        unplaced = [row for row in rows if row.unique_key not in placed]
        without_key = self._insert_or_lock(new, unplaced, placed)
        if taken := _missing(unplaced, placed):
            if unique.moves_holder:
                placed |= self._changed(new, taken)
            left = _missing(taken, placed)
            freed = self._freed(new, left)
            # We have locked the jobs that had these keys, so no other caller can take the keys.
            rows_of_freed = [row for row in left if row.unique_key in freed]
            self._insert_or_lock(new, rows_of_freed, placed)
            if held := [str(row.unique_key) for row in _missing(taken, placed)]:
                placed |= Enqueues(self._executor).holders(new.queue, held)
        keyless = iter(without_key)
        keys = [row.unique_key for row in rows]
        return [next(keyless) if key is None else placed[key] for key in keys]

    def _at_latest(self, new: NewJob, rows: Sequence[NewJobRow]) -> dict[str, Placed]:
        """The waiting jobs that cannot be postponed further.

        They are not locked, so a worker can claim them however many callers try to postpone them.
        """
        unique = _unique_of(new)
        if unique.at_most is None or unique.on_conflict != "postpone":
            return {}
        parameters = {**_names_and_documents(new, rows), "at_most": unique.at_most}
        at_latest = self._executor.execute(holders_at_latest(), parameters)
        return {key: Placed(id, PlacedAs.AT_LATEST) for id, key in at_latest}

    def _insert_or_lock(
        self, new: NewJob, rows: Sequence[NewJobRow], placed: dict[str, Placed]
    ) -> list[Placed]:
        """Insert the jobs whose keys are free, and lock the holders of the other keys.

        Adds the new jobs with a key to ``placed``, and returns those without a key, in order.
        Waits for other transactions that have one of the keys.
        """
        if not rows:
            return []
        statement = enqueue_or_lock_jobs(
            start=new.start,
            notify=new.notify,
            labelled=new.is_labelled,
            limited=rows[0].limit_keys is not None,
        )
        parameters = {**new.parameters(), **documents_of(rows)}
        written = self._executor.execute(statement, parameters).all()
        placed |= {key: Placed(id, PlacedAs.NEW) for id, key, *_ in written if key is not None}
        ids = sorted(id for id, key, *_ in written if key is None)
        return [Placed(id, PlacedAs.NEW) for id in ids]

    def _changed(self, new: NewJob, rows: Sequence[NewJobRow]) -> dict[str, Placed]:
        unique = _unique_of(new)
        statement = change_holders(
            start=new.start,
            replace=unique.on_conflict == "replace",
            bounded=unique.at_most is not None,
            notify=new.notify,
            labelled=new.is_labelled,
        )
        bound = {} if unique.at_most is None else {"at_most": unique.at_most}
        named = {f"{NEW}{name}": value for name, value in new.parameters().items()}
        parameters = {**named, **documents_of(rows), **bound}
        changed = self._executor.execute(statement, parameters)
        return {key: Placed(id, PlacedAs.CHANGED) for id, key, *_ in changed}

    def _freed(self, new: NewJob, rows: Sequence[NewJobRow]) -> set[str]:
        """Let the holders of these keys give them up, if the enqueue says so; returns the keys."""
        unique = _unique_of(new)
        if not rows or (unique.moves_holder and unique.until != "started"):
            return set()
        parameters = _names_and_documents(new, rows)
        if unique.moves_holder:
            return set(self._executor.execute(free_keys(), parameters).scalars())
        jobs, found = Jobs(self._executor), self._executor.execute(holders(), parameters).all()
        return {key for id, key in found if id != self._running and jobs.cancel(id)}


def _unique_of(new: NewJob) -> Unique:
    assert new.unique is not None, "an enqueue that changes holders has unique keys"
    return new.unique


def _missing(rows: Sequence[NewJobRow], placed: dict[str, Placed]) -> list[NewJobRow]:
    return [row for row in rows if row.unique_key is not None and row.unique_key not in placed]


def _names_and_documents(new: NewJob, rows: Sequence[NewJobRow]) -> dict[str, Any]:
    names = {f"{NEW}task": new.task, f"{NEW}queue": new.queue}
    return {**names, **documents_of(rows)}


@cache
def change_holders(
    *, start: Start, replace: bool, bounded: bool, notify: bool, labelled: bool = False
) -> sa.Executable:
    """Give the waiting holders of these keys a new time and, with ``replace``, new arguments.

    Returns the ids and keys of these jobs.  A job without a message, or whose message a
    transaction holds, has started, and is not returned.  Messages are never updated: each is
    deleted, and inserted at its new position.

    ``bounded``: not later than ``created_at + at_most``.
    """
    holder = _holders()
    taken = _taken_messages(holder)
    run_at = start_time(start, NEW)
    if bounded:
        run_at = sa.func.greatest(sa.func.least(run_at, _latest()), clock())
    values: dict[str, Any] = {"run_at": run_at}
    if replace:
        priority = sa.bindparam(f"{NEW}priority", type_=sa.SmallInteger)
        values |= {"args": holder.c.args, "priority": priority}
        values |= labels(NEW) if labelled else {"meta": sa.null(), "tags": sa.null()}
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id, jobs.c.id == holder.c.id)
        .values(values)
        .returning(*DISPATCHED, jobs.c.held_unique_key)
        .cte("job")
    )
    new = [job.c[name] for name in (*POSITION, "id", "task")]
    rows = sa.select(*new, *(taken.c[name] for name in KEPT)).where(taken.c.target_id == job.c.id)
    message = sa.insert(message_queue).from_select([*POSITION, "target_id", "task", *KEPT], rows)
    woken = sa.select(wake_up_call() if notify else sa.true()).scalar_subquery()
    return sa.select(job.c.id, job.c.held_unique_key, woken).add_cte(message.cte("message"))


@cache
def holders_at_latest() -> sa.Executable:
    """Those holders of these keys whose time cannot be moved further; locks nothing."""
    holder = _holders()
    bound = jobs.c.run_at >= _latest()
    return sa.select(holder.c.id, holder.c.unique_key).where(jobs.c.id == holder.c.id, bound)


@cache
def holders() -> sa.Executable:
    """The holders of these keys, which the caller has locked."""
    holder = _holders()
    return sa.select(holder.c.id, holder.c.unique_key)


@cache
def free_keys() -> sa.Executable:
    """Give back keys for jobs that have started; returns the keys.

    A worker would give them back when the handler starts: the job may still wait in its buffer.  A
    job that waits for others has no message either, and has not started.
    """
    holder = _holders()
    return (
        sa.update(jobs)
        .where(jobs.c.id == holder.c.id, ~sa.exists().where(blocked.c.node_id == holder.c.id))
        .values(held_unique_key=sa.null())
        .returning(holder.c.unique_key)
    )


def _holders() -> sa.CTE:
    """The jobs of this task that hold the keys of the document, one probe of the index for each."""
    given = document("documents", sa.column("args", JSONB), sa.column("unique_key", sa.Text))
    job = (
        sa.select(*(jobs.c[name] for name in ("id", *POSITION)))
        .where(
            jobs.c.queue == text_parameter(f"{NEW}queue"),
            jobs.c.held_unique_key == given.c.unique_key,
            jobs.c.held_unique_key.is_not(None),
            jobs.c.task == text_parameter(f"{NEW}task"),
        )
        .offset(AS_IT_STANDS)
        .lateral("job_of_key")
    )
    return sa.select(job, given).select_from(given.join(job, sa.true())).cte("holder")


def _taken_messages(holder: sa.CTE) -> sa.CTE:
    """The messages of waiting jobs, deleted."""
    same = equal(message_queue, holder, POSITION)
    message = (
        sa.select(CTID)
        .select_from(message_queue)
        .where(*same, message_queue.c.target_id == holder.c.id)
        .with_for_update(skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("waiting")
    )
    ctids = sa.select(message.c.ctid).select_from(holder.join(message, sa.true()))
    return (
        sa.delete(message_queue)
        .where(among(ctids) == CTID)
        .returning(message_queue.c.target_id, *(message_queue.c[name] for name in KEPT))
        .cte("taken")
    )


def _latest() -> sa.ColumnElement[Any]:
    return jobs.c.created_at + sa.cast(sa.bindparam("at_most", type_=sa.Interval), sa.Interval)
