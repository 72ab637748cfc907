"""Many jobs that one statement cancels, requeues, or moves to another queue, priority or time.

A statement takes what no other transaction has locked, and waits for nothing.  Who calls it changes
the jobs that it has left one by one, by :class:`~pgqueue.repository.jobs.Jobs`.

No index finds a message by its job, so a message is found while the jobs are selected
(:meth:`Listing.found`, :meth:`Signals.sleepers`), and
deleted by its whole key.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any

import sqlalchemy as sa

from pgqueue.repository.fast_path import fetch
from pgqueue.repository.jobs import (
    Change,
    Jobs,
    NewValues,
    document_of,
    moved_in_lane,
    new_values,
    replaced,
)
from pgqueue.repository.messages import MESSAGE_KEYS, NEW, FoundJob
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CTID,
    LETTER,
    Executor,
    among,
    array_of,
    array_parameter,
    clock,
    dead_letter_of,
    document,
    equal,
    jobs,
    message_queue,
    waiting_messages,
)
from pgqueue.repository.workflows import free_jobs, is_dead


def _messages(table: sa.Table, *conditions: sa.ColumnElement[bool]) -> sa.Select[*tuple[Any, ...]]:
    """Where these messages are stored, locked together with the rows of their jobs.

    Locks the row of a job first and then its message, as every change of a job does.  Waits for
    neither: a job that another transaction has locked, or a worker has claimed, is left out.
    """
    keys = MESSAGE_KEYS[table]
    found = document("found", *(sa.column(name, table.c[name].type) for name in keys))
    locked = (
        sa.select(*found.c)
        .select_from(found.join(jobs, jobs.c.id == found.c.target_id))
        .where(*conditions)
        .with_for_update(key_share=True, skip_locked=True, of=jobs)
        .cte("locked")
    )
    message = (
        sa.select(CTID)
        .select_from(table)
        .where(*equal(table, locked, keys))
        .with_for_update(skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("message")
    )
    return sa.select(message.c.ctid).select_from(locked.join(message, sa.true()))


@cache
def cancel_waiting(table: sa.Table) -> sa.Executable:
    """End these jobs as cancelled; returns those that it has ended."""
    gone = sa.delete(table).where(among(_messages(table)) == CTID)
    taken = gone.returning(table.c.target_id).cte("taken")
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id, jobs.c.outcome.is_(None))
        .values(outcome=CANCELLED, finished_at=clock(), held_unique_key=sa.null())
        .returning(*LETTER)
        .cte("job")
    )
    return sa.select(job.c.id).add_cte(dead_letter_of(job))


@cache
def change_pending(columns: tuple[str, ...], *, notify: bool) -> sa.Executable:
    """Give pending jobs another queue, time or priority, and replace their messages; returns the
    jobs.

    Leaves jobs under limits that are to start later, because they give up their places; of those
    that are to move, the ones with a unique key, and of a task that the application does not have.
    """
    values = new_values(columns)
    conditions = [_has_others(values)]
    if {"run_at", "queue"} & {*columns}:
        conditions.append(jobs.c.limit_keys.is_(None))
    if "queue" in columns:
        conditions.append(jobs.c.unique_key.is_(None))
        conditions.append(jobs.c.task == sa.any_(array_parameter("tasks", sa.Text)))
    messages = _messages(message_queue, *conditions)
    return replaced(sa.delete(message_queue).where(among(messages) == CTID), values, notify=notify)


@cache
def change_blocked(columns: tuple[str, ...], *, notify: bool) -> sa.Executable:
    """Give jobs that wait to be admitted another time or priority; returns the jobs."""
    values = new_values(columns)
    messages = _messages(waiting_messages, _has_others(values))
    return moved_in_lane(
        sa.update(waiting_messages).where(among(messages) == CTID), values, notify=notify
    )


@cache
def run_many_now(table: sa.Table, *, notify: bool) -> sa.Executable:
    """Make jobs due that wait for a later time; returns them."""
    messages = among(_messages(table, jobs.c.run_at > clock())) == CTID
    if table is message_queue:
        return replaced(sa.delete(table).where(messages), {"run_at": clock()}, notify=notify)
    return moved_in_lane(sa.update(table).where(messages), {"run_at": clock()}, notify=notify)


def _has_others(values: Mapping[str, Any]) -> sa.ColumnElement[bool]:
    """Whether a job has other values than these."""
    types: dict[str, Any] = {
        "queue": sa.Text,
        "priority": sa.SmallInteger,
        "run_at": sa.DateTime(timezone=True),
    }
    return sa.or_(*(jobs.c[name] != sa.cast(new, types[name]) for name, new in values.items()))


@cache
def lock_free_jobs() -> sa.Executable:
    """Lock those failed and cancelled jobs that have no unique key, no message and no lease, and
    that no other transaction has locked."""
    free = free_jobs()
    return (
        sa.select(jobs.c.id, jobs.c.limit_keys.is_not(None))
        .select_from(free.join(jobs, jobs.c.id == free.c.id))
        .where(is_dead(), jobs.c.unique_key.is_(None))
        .with_for_update(of=jobs, key_share=True, skip_locked=True)
    )


class ManyJobs:
    """Many jobs at once, behind one Session or Connection.

    Each method returns the jobs that it has changed, with the change; the others stay as they are.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def cancel(self, found: Sequence[FoundJob]) -> dict[int, Change]:
        """End jobs that wait."""
        return self._waiting(found, cancel_waiting, Change.CANCELLED)

    def run_now(self, found: Sequence[FoundJob], *, notify: bool) -> dict[int, Change]:
        """Make jobs due that wait for a later time."""
        return self._waiting(found, partial(run_many_now, notify=notify), Change.DUE_NOW)

    def change(
        self, found: Sequence[FoundJob], new: NewValues, *, tasks: Iterable[str], notify: bool
    ) -> dict[int, Change]:
        """Give jobs that wait another ``priority``, ``run_at`` or ``queue``.

        ``tasks``: those of the application, which knows their limits.
        """
        if "queue" in new:  # limits may be those of the queue
            found = [one for one in found if one.stands_in(message_queue)]
        columns = tuple(sorted(new))

        def statement(table: sa.Table) -> sa.Executable:
            kind = change_pending if table is message_queue else change_blocked
            return kind(columns, notify=notify)

        named: dict[str, Any] = {f"{NEW}{name}": value for name, value in new.items()}
        if "queue" in new:
            named["tasks"] = array_of(tasks)
        return self._waiting(found, statement, Change.CHANGED, named)

    def requeue(self, times: Mapping[int, datetime | None], *, notify: bool) -> dict[int, Change]:
        """Put jobs back that have failed or were cancelled and have no unique key.

        Each job is due at its time; None means now.
        """
        free = dict(fetch(self._executor, lock_free_jobs(), {"wanted": document_of(times)}))
        done: set[int] = set()
        for limited in (False, True):
            some = {job_id: at for job_id, at in times.items() if free.get(job_id) is limited}
            if some:
                done |= Jobs(self._executor).put_back(some, notify=notify, limited=limited)
        return dict.fromkeys(sorted(done), Change.REQUEUED)

    def _waiting(
        self,
        found: Sequence[FoundJob],
        statement: Callable[[sa.Table], sa.Executable],
        change: Change,
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[int, Change]:
        done: list[int] = []
        for table in MESSAGE_KEYS:
            messages = [
                one.message for one in found if one.message and one.message["table"] == table.name
            ]
            if messages:
                given = {"found": json.dumps(messages), **(parameters or {})}
                done += [row[0] for row in self._executor.execute(statement(table), given)]
        return dict.fromkeys(sorted(done), change)
