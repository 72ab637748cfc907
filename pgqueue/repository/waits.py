"""What a job that waits waits for: pauses, workers, other jobs.

Each statement reads a few rows by key, all workers and all leases, or at most a thousand messages
of each priority; none counts the jobs that wait.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.checks import ALL_QUEUES
from pgqueue.repository.health import is_live, serves
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import (
    Executor,
    count_rows,
    jobs,
    leases,
    message_queue,
    paused_tasks,
    pg,
    queues,
    text_parameter,
    unreadable_jobs,
    waiting_messages,
    workers,
)
from pgqueue.repository.workers import NO_QUEUES

MOST_AHEAD = 1000
"""The largest position: counting a million jobs would take long."""
JOB = sa.bindparam("job_id", type_=sa.BigInteger)


def jobs_ahead() -> sa.ScalarSelect[int]:
    """How many due jobs are claimed before the one of the row of ``jobs``, at most MOST_AHEAD."""
    series = pg.generate_series(sa.literal_column("0"), jobs.c.priority)
    priority = series.table_valued(sa.column("priority", sa.Integer)).render_derived(name="each")
    first = (
        sa.select(message_queue.c.priority, message_queue.c.run_at, message_queue.c.target_id)
        .where(
            message_queue.c.queue == jobs.c.queue,
            message_queue.c.priority == sa.cast(priority.c.priority, sa.SmallInteger),
            message_queue.c.run_at <= pg.statement_timestamp(),
        )
        .order_by(message_queue.c.run_at, message_queue.c.id)
        .limit(sa.literal_column(str(MOST_AHEAD)))
        .correlate(jobs, priority)
        .lateral("first")
    )
    names = ("priority", "run_at")
    is_before = sa.tuple_(*(first.c[name] for name in names), first.c.target_id) < sa.tuple_(
        *(jobs.c[name] for name in names), jobs.c.id
    )
    ahead = sa.select(sa.func.least(count_rows(), sa.literal_column(str(MOST_AHEAD)))).select_from(
        priority.join(first, sa.true())
    )
    return ahead.where(is_before).correlate(jobs).scalar_subquery()


@cache
def pauses_of_job() -> sa.Executable:
    """When all queues, the queue and the task of a job were paused, and whether workers cannot read
    the job."""
    every = sa.literal_column(f"'{ALL_QUEUES}'", sa.Text)
    of_all = sa.select(queues.c.paused_at).where(queues.c.name == every)
    queue = sa.select(queues.c.paused_at).where(queues.c.name == text_parameter("queue_name"))
    task = sa.select(paused_tasks.c.paused_at).where(
        paused_tasks.c.task == text_parameter("task_name")
    )
    met = sa.select(unreadable_jobs).where(unreadable_jobs.c.job_id == JOB)
    since, reason = (
        met.with_only_columns(unreadable_jobs.c[name]).scalar_subquery()
        for name in ("since", "reason")
    )
    return sa.select(
        moment(of_all.scalar_subquery()),
        moment(queue.scalar_subquery()),
        moment(task.scalar_subquery()),
        moment(since),
        reason,
    )


@cache
def workers_of_queue() -> sa.Executable:
    """How many live workers serve a queue, how many of these have a free slot, and how many live
    workers are quiet."""
    held = (
        sa.select(leases.c.worker_id, count_rows().label("jobs"))
        .group_by(leases.c.worker_id)
        .subquery("held")
    )
    serving = serves(text_parameter("queue_name"))
    has_room = sa.func.coalesce(held.c.jobs, sa.literal_column("0")) < workers.c.slots
    return (
        sa.select(
            count_rows().filter(serving),
            count_rows().filter(serving, has_room),
            count_rows().filter(workers.c.queues == NO_QUEUES),
        )
        .select_from(workers.outerjoin(held, held.c.worker_id == workers.c.id))
        .where(is_live())
    )


@cache
def first_admitted() -> sa.Executable:
    """The first job that is due of those in the queue of a job that have the same limits."""
    waits = waiting_messages.c
    return (
        sa.select(waits.target_id)
        .where(
            waits.limit_keys == text_parameter("limit_keys"),
            waits.queue == text_parameter("queue_name"),
            waits.run_at <= pg.statement_timestamp(),
        )
        .order_by(waits.priority, waits.run_at, waits.target_id)
        .limit(sa.literal_column("1"))
    )


@cache
def place_of_job() -> sa.Executable:
    return sa.select(jobs_ahead()).select_from(jobs).where(jobs.c.id == JOB)


class Wait(NamedTuple):
    """What a job waits for that is not due yet, or that no worker has started."""

    all_paused_at: datetime | None
    """When all queues were paused."""
    queue_paused_at: datetime | None
    task_paused_at: datetime | None
    unreadable_since: datetime | None
    """When a worker first could not read its arguments."""
    unreadable_reason: str | None
    workers: int
    """How many live workers serve its queue."""
    free_workers: int
    """How many of them hold fewer jobs than they have slots."""
    quiet_workers: int
    """How many live workers claim no more jobs of any queue."""
    ahead: int
    """How many due jobs of its queue are claimed before it, at most MOST_AHEAD; 0 for a job that
    waits for room in its limits."""
    first_admitted: int | None
    """Of the due jobs of its queue with the same limits, the first; None without limits."""

    @property
    def is_queue_paused(self) -> bool:
        return self.queue_paused_at is not None or self.all_paused_at is not None


class Waits:
    """The jobs that wait, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def of(self, job: Mapping[str, Any], *, is_due: bool, is_blocked: bool) -> Wait:
        """What a job waits for; ``job`` is its row, ``is_blocked`` whether limits make it wait."""
        parameters = {
            "job_id": job["id"],
            "queue_name": job["queue"],
            "task_name": job["task"],
            "limit_keys": job["limit_keys"],
        }
        pauses = self._row(pauses_of_job(), parameters, "job_id", "queue_name", "task_name")
        counts = self._row(workers_of_queue(), parameters, "queue_name")
        ahead, first = 0, None
        if is_due and not is_blocked:
            [ahead] = self._row(place_of_job(), parameters, "job_id") or [0]
        elif is_due and job["limit_keys"] is not None:
            [first] = self._row(first_admitted(), parameters, "limit_keys", "queue_name") or [None]
        return Wait._make([*pauses, *counts, ahead, first])

    def _row(self, statement: sa.Executable, values: Mapping[str, Any], *names: str) -> list[Any]:
        found = self._executor.execute(statement, {name: values[name] for name in names}).first()
        return [] if found is None else list(found)
