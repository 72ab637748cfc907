"""Signals: which of them a job receives, and which jobs sleep for one.

A signal is a row that an application inserts; it is not used up.  A job *waits* by a row of
``job_steps``, and sleeps until the timeout of its wait.  Both sides commit before they read::

    signal  commits the signal, then a worker reads the waits, and wakes the jobs that sleep
    wait    commits the wait, then reads the signals, and sleeps if there is none

So of both, the second finds the first, however long their transactions are open.  A job that is
about to sleep has a lease: its signal is looked at again until the job sleeps, and is awake.
"""

from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.repository.tables import (
    Executor,
    blocked,
    clock,
    count_rows,
    job_steps,
    jobs,
    json_parameter,
    leases,
    pg,
    sees_all,
    signals,
    text_parameter,
    wake_up_call,
)

KEPT = timedelta(days=30)
PAGE = 100
"""The signals that one statement delivers."""
PRUNED = 1000

NEW = sa.not_(signals.c.delivered)


@cache
def add_signal(*, notify: bool) -> sa.Executable:
    names = ("name", "key")
    values = {name: sa.bindparam(f"of_{name}", type_=sa.Text) for name in names}
    row = sa.insert(signals).values(**values, payload=json_parameter("of_payload"))
    added = row.returning(signals.c.id).cte("added")
    return sa.select(added.c.id, wake_up_call("signal") if notify else sa.true())


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
def deliver() -> sa.Executable:
    """The jobs that sleep for one of the next signals; and mark those signals as delivered for
    which no job sleeps, or is about to.

    Returns the last id of the page, how many signals it has, and the jobs.
    """
    page = (
        sa.select(*(signals.c[name] for name in ("id", "name", "key", "created_at")))
        .where(NEW, signals.c.id > sa.bindparam("after", type_=sa.BigInteger))
        .order_by(signals.c.id)
        .limit(sa.literal_column(str(PAGE)))
        .with_for_update(skip_locked=True)
        .cte("page")
    )
    has_lease = sa.exists().where(leases.c.target_id == jobs.c.id)
    is_blocked = sa.exists().where(blocked.c.node_id == jobs.c.id)
    sleeper = (
        sa.select(page.c.id.label("signal_id"), jobs.c.id.label("job_id"), has_lease.label("runs"))
        .join_from(
            page,
            job_steps,
            sa.and_(job_steps.c.signal == page.c.name, job_steps.c.key == page.c.key),
        )
        .join(jobs, jobs.c.id == job_steps.c.job_id)
        .where(job_steps.c.signal.is_not(None), job_steps.c.result.is_(None))
        .where(jobs.c.outcome.is_(None), _may_receive(page))
        # A job that is due, or is blocked until others end, runs anyway, and looks itself.
        .where(sa.or_(has_lease, sa.and_(jobs.c.run_at > clock(), ~is_blocked)))
        .cte("sleeper")
        .prefix_with("MATERIALIZED")
    )
    is_awaited = sa.exists().where(sleeper.c.signal_id == page.c.id)
    delivered = (
        sa.update(signals)
        .where(signals.c.id == page.c.id, ~is_awaited)
        .where(sees_all(job_steps, jobs, leases, blocked))
        .values(delivered=sa.true())
        .cte("delivered")
    )
    asleep = sa.select(sleeper.c.job_id).where(sa.not_(sleeper.c.runs)).distinct()
    return sa.select(
        pg.max(page.c.id), count_rows(), sa.func.array(asleep.scalar_subquery())
    ).add_cte(delivered)


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


class Delivery(NamedTuple):
    """What a page of signals has found."""

    last_id: int | None
    is_full: bool
    """Whether there may be more signals."""
    asleep: list[int]
    """The jobs that sleep for one of them."""


class Signals:
    """The signals behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, name: str, key: str, payload: str | None, *, notify: bool) -> int:
        """Insert a signal, whose payload is JSON text; returns its id."""
        row = {"of_name": name, "of_key": key, "of_payload": payload}
        return int(self._executor.execute(add_signal(notify=notify), row).scalar_one())

    def deliver(self, after: int) -> Delivery:
        """Read the next signals after an id, and the jobs that sleep for them."""
        last_id, count, asleep = self._executor.execute(deliver(), {"after": after}).one()
        return Delivery(last_id, count == PAGE, asleep)

    def prune(self) -> bool:
        """Delete some signals whose time is over; returns whether there may be more."""
        found: Any = self._executor.execute(prune_signals())
        return bool(found.rowcount == PRUNED)
