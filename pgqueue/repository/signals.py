"""Signals: which of them a job receives, and which jobs sleep for one.

A signal is a row that an application inserts; it is not used up.  A job *waits* by a row of
``job_steps``, and sleeps until the timeout of its wait.  Both sides commit before they read::

    signal  commits the signal, then a worker reads the waits, and wakes the jobs that sleep
    wait    commits the wait, then reads the signals, and sleeps if there is none

So of both, the second finds the first, however long their transactions are open.  A job that is
about to sleep has a lease.  A signal is delivered when no such job is left, and none that sleeps;
until then it is read again.  The transaction that wakes the last jobs marks it, so a job is woken
once by a signal, whether it still waits or not.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import sqlalchemy as sa

from pgqueue.checks import OWN_SIGNALS
from pgqueue.repository.messages import FoundJob, message_in
from pgqueue.repository.tables import (
    Executor,
    among,
    array_of,
    array_parameter,
    blocked,
    clock,
    job_steps,
    jobs,
    json_parameter,
    leases,
    message_queue,
    pg,
    sees_all,
    signals,
    stands_at_place_of,
    text_parameter,
    waiting_messages,
    waits_at_place_of,
    wake_up_call,
)

KEPT = timedelta(days=30)
PAGE = 100
"""The signals that are delivered together."""
PORTION = 500
"""The jobs that one statement wakes."""
PRUNED = 1000

BATCH_HAS_ENDED = f"{OWN_SIGNALS}batch"
"""The signal that a worker sends with the end of a batch, if a job waits for it; its key is the id
of the batch."""

NEW = sa.not_(signals.c.delivered)
AFTER = sa.bindparam("after", type_=sa.BigInteger)
IDS = sa.any_(array_parameter("ids", sa.BigInteger))


@cache
def add_signal(*, notify: bool) -> sa.Executable:
    names = ("name", "key")
    values = {name: sa.bindparam(f"of_{name}", type_=sa.Text) for name in names}
    row = sa.insert(signals).values(**values, payload=json_parameter("of_payload"))
    added = row.returning(signals.c.id).cte("added")
    return sa.select(added.c.id, wake_up_call("signal") if notify else sa.true())


def tell_waiting(batch_id: sa.ColumnElement[Any]) -> sa.CTE:
    """Insert the signal of the end of a batch, if a job waits for it.

    The wait is committed with the batch, so it is there when the batch ends.
    """
    key, name = sa.cast(batch_id, sa.Text), sa.literal_column(f"'{BATCH_HAS_ENDED}'", sa.Text)
    waits = sa.exists().where(*_awaits(name, key))
    row = sa.select(name, key).where(waits)
    return sa.insert(signals).from_select(["name", "key"], row).cte("signal")


@cache
def signal_for() -> sa.Executable:
    """The first signal that a job may receive by a wait, with its payload as text."""
    return (
        sa.select(signals.c.id, sa.cast(signals.c.payload, sa.Text))
        .join_from(signals, jobs, jobs.c.id == sa.bindparam("job_id", type_=sa.BigInteger))
        .where(signals.c.name == text_parameter("signal"), signals.c.key == text_parameter("key"))
        .where(_may_receive(signals))
        .order_by(signals.c.id)
        .limit(sa.literal_column("1"))
    )


@cache
def undelivered() -> sa.Executable:
    """The next signals that are not delivered."""
    return (
        sa.select(signals.c.id)
        .where(NEW, signals.c.id > AFTER)
        .where(sees_all(job_steps, jobs, leases, blocked))
        .order_by(signals.c.id)
        .limit(sa.literal_column(str(PAGE)))
    )


@cache
def sleepers() -> sa.Executable:
    """The next jobs that sleep for one of these signals, with their messages, or are about to sleep
    and have none."""
    job = (
        sa.select(jobs.c.id)
        .select_from(signals)
        .join(job_steps, sa.and_(*_awaits(signals.c.name, signals.c.key)))
        .join(jobs, _sleeps_for(signals))
        .where(signals.c.id == IDS, job_steps.c.job_id > AFTER)
        .order_by(jobs.c.id)
        .limit(sa.literal_column(str(PORTION)))
        .subquery("job")
    )
    places = {message_queue: stands_at_place_of, waiting_messages: waits_at_place_of}
    messages = [
        sa.select(message_in(table, table))
        .where(is_at_place_of(job.c.id))
        .limit(sa.literal_column("1"))
        .scalar_subquery()
        for table, is_at_place_of in places.items()
    ]
    return sa.select(job.c.id, sa.func.coalesce(*messages)).order_by(job.c.id)


@cache
def mark_delivered() -> sa.Executable:
    """Mark those of these signals for which no job sleeps, or is about to.  Waits for nothing."""
    waits = sa.and_(*_awaits(signals.c.name, signals.c.key))
    sleeper = sa.select(jobs.c.id).join_from(job_steps, jobs, _sleeps_for(signals)).where(waits)
    done = sa.select(signals.c.id).where(signals.c.id == IDS, ~sleeper.correlate(signals).exists())
    done = done.with_for_update(skip_locked=True)
    return sa.update(signals).where(signals.c.id == among(done)).values(delivered=sa.true())


@cache
def prune_signals() -> sa.Executable:
    """Delete some signals whose time is over, delivered or not."""
    kept: sa.ColumnElement[Any] = sa.literal_column(f"interval '{KEPT.days} days'")
    old = sa.select(signals.c.id).order_by(signals.c.id).limit(PRUNED).subquery()
    due = signals.c.created_at < pg.statement_timestamp() - kept
    return sa.delete(signals).where(signals.c.id.in_(sa.select(old.c.id)), due)


def has_signals() -> sa.ColumnElement[bool]:
    """Whether signals are to be delivered."""
    return sa.exists().where(NEW)


def _awaits(
    name: sa.ColumnElement[str], key: sa.ColumnElement[str]
) -> tuple[sa.ColumnElement[bool], ...]:
    """The condition of the steps that wait for a signal."""
    return (job_steps.c.signal == name, job_steps.c.key == key, is_open_wait())


def is_open_wait() -> sa.ColumnElement[bool]:
    """Whether a step waits for a signal, in the words of the index of these steps."""
    return sa.and_(job_steps.c.signal.is_not(None), job_steps.c.result.is_(None))


def _sleeps_for(signal: sa.FromClause) -> sa.ColumnElement[bool]:
    """Whether the job of a step that waits for a signal sleeps, or has a lease: it may have looked
    for the signal, and be about to sleep.

    A job that is due, or is blocked until others end, runs anyway, and looks itself.
    """
    has_lease = sa.exists().where(leases.c.target_id == jobs.c.id)
    is_blocked = sa.exists().where(blocked.c.node_id == jobs.c.id)
    return sa.and_(
        *(jobs.c.id == job_steps.c.job_id, jobs.c.outcome.is_(None), _may_receive(signal)),
        sa.or_(has_lease, sa.and_(jobs.c.run_at > clock(), ~is_blocked)),
    )


def _may_receive(signal: sa.FromClause) -> sa.ColumnElement[bool]:
    """Whether a signal is younger than a job, and none of its waits has received it."""
    other = sa.alias(job_steps, "other")
    received = sa.exists().where(
        other.c.job_id == jobs.c.id,
        other.c.signal == signal.c.name,
        pg.jsonb_extract_path_text(other.c.result, sa.literal_column("'signal'"), type_=sa.Text)
        == sa.cast(signal.c.id, sa.Text),
    )
    return sa.and_(signal.c.created_at >= jobs.c.created_at, ~received.correlate_except(other))


class Signals:
    """The signals behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, name: str, key: str, payload: str | None, *, notify: bool) -> int:
        """Insert a signal, whose payload is JSON text; returns its id."""
        row = {"of_name": name, "of_key": key, "of_payload": payload}
        return int(self._executor.execute(add_signal(notify=notify), row).scalar_one())

    def undelivered(self, after: int) -> list[int]:
        """The next signals after an id that are not delivered; empty at the end."""
        return list(self._executor.execute(undelivered(), {"after": after}).scalars())

    def sleepers(self, signal_ids: Iterable[int], *, after: int) -> list[FoundJob]:
        """The next jobs after an id that sleep for one of these signals, or are about to."""
        given = {"ids": array_of(map(str, signal_ids)), "after": after}
        return [FoundJob(*row) for row in self._executor.execute(sleepers(), given)]

    def mark_delivered(self, signal_ids: Iterable[int]) -> None:
        """Note for which of these signals no job sleeps any more, nor is about to."""
        self._executor.execute(mark_delivered(), {"ids": array_of(map(str, signal_ids))})

    def prune(self) -> bool:
        """Delete some signals whose time is over; returns whether there may be more."""
        found: Any = self._executor.execute(prune_signals())
        return bool(found.rowcount == PRUNED)
