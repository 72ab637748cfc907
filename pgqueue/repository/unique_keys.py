"""Unique keys: change the waiting job that holds one, and give back the key of a job that starts.

An enqueue that changes holders has locked their rows before (:func:`enqueue_or_lock_jobs`), so no
two enqueues change one job at the same time, and no worker settles it meanwhile.
"""

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.repository.fence import ONE, is_ours
from pgqueue.repository.messages import DISPATCHED, NEW, Start, labels, start_time
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CTID,
    POSITION,
    among,
    clock,
    document,
    equal,
    jobs,
    message_queue,
    pg,
    text_parameter,
    wake_up_call,
)

KEPT = ("attempt", "crashes", "alone")
"""What a message says about past attempts."""


LONGEST_WAIT = pg.set_config("lock_timeout", "1s", sa.true()).is_not(None)
"""How long the start of one job waits for another transaction that has the job's row locked.  Set
for the transaction, which must have no other statement."""


@cache
def change_holders(
    *, start: Start, replace: bool, bounded: bool, notify: bool, labelled: bool = False
) -> sa.Executable:
    """Give the waiting holders of these keys a new time and, with ``replace``, new arguments.

    Returns the ids and keys of these jobs.  A job without a message, or whose message a
    transaction holds, has started, and is not returned.  Messages are never updated: each is
    deleted, and inserted at its new place.  ``bounded``: not later than ``created_at + at_most``.
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
    place = [job.c[name] for name in (*POSITION, "id", "task")]
    rows = sa.select(*place, *(taken.c[name] for name in KEPT)).where(taken.c.target_id == job.c.id)
    message = sa.insert(message_queue).from_select([*POSITION, "target_id", "task", *KEPT], rows)
    woken = sa.select(wake_up_call() if notify else sa.true()).scalar_subquery()
    return sa.select(job.c.id, job.c.held_unique_key, woken).add_cte(message.cte("message"))


@cache
def holders_at_bound() -> sa.Executable:
    """Those holders of these keys whose time cannot be moved further; locks nothing."""
    holder = _holders()
    bound = jobs.c.run_at >= _latest()
    return sa.select(holder.c.id, holder.c.unique_key).where(jobs.c.id == holder.c.id, bound)


@cache
def free_keys() -> sa.Executable:
    """Give back keys for jobs that have started; returns the keys.

    A worker would give them back when the handler starts: the job may still wait in its buffer.
    """
    holder = _holders()
    return (
        sa.update(jobs)
        .where(jobs.c.id == holder.c.id)
        .values(held_unique_key=sa.null())
        .returning(holder.c.unique_key)
    )


@cache
def free_key_of_attempt(*, in_own_transaction: bool) -> sa.Executable:
    """Give back the unique key of a job whose handler is about to start.

    No row: the lease is not ours any more, or the job has ended.  A job whose key is free already
    is returned too.
    """
    return (
        sa.update(jobs)
        .where(
            jobs.c.id == ONE[0],
            jobs.c.outcome.is_(None),
            sa.exists().where(is_ours(*ONE)),
            LONGEST_WAIT if in_own_transaction else sa.true(),
        )
        .values(held_unique_key=sa.null())
        .returning(jobs.c.id)
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
    places = sa.select(message.c.ctid).select_from(holder.join(message, sa.true()))
    return (
        sa.delete(message_queue)
        .where(among(places) == CTID)
        .returning(message_queue.c.target_id, *(message_queue.c[name] for name in KEPT))
        .cte("taken")
    )


def _latest() -> sa.ColumnElement[Any]:
    return jobs.c.created_at + sa.cast(sa.bindparam("at_most", type_=sa.Interval), sa.Interval)
