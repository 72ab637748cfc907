"""The due times of waiting jobs, which a test brings forward.

No worker in production moves them.
"""

from datetime import datetime
from functools import cache

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from pgqueue.repository.claim import Upcoming
from pgqueue.repository.tables import (
    Executor,
    blocked,
    clock,
    job_steps,
    jobs,
    message_queue,
    pg,
    seconds,
    sees_all,
    waiting_messages,
)

COPIED = ("target_id", "task", "attempt", "crashes", "alone")


@cache
def next_admission() -> sa.Executable:
    """Whether a job that waits to be admitted is due, and how many seconds until the next one is.

    Reads all such jobs.
    """
    run_at, now = waiting_messages.c.run_at, pg.statement_timestamp()
    is_due = sa.func.coalesce(pg.bool_or(run_at <= now), sa.false())
    later = pg.min(run_at).filter(run_at > now)
    return sa.select(is_due, sa.cast(sa.func.extract("epoch", later - clock()), sa.Double))


@cache
def seconds_until() -> sa.Executable:
    """How long a time is away, by the clock with which claims compare."""
    moment = sa.cast(
        sa.bindparam("moment", type_=sa.DateTime(timezone=True)), sa.DateTime(timezone=True)
    )
    return sa.select(sa.cast(sa.func.extract("epoch", moment - clock()), sa.Double))


@cache
def bring_forward() -> sa.Executable:
    """Make each job that is not due yet due earlier; by a negative number, later.

    New messages replace the old ones, in the same order, with the time of their jobs' rows.
    """
    message = (
        sa.delete(message_queue)
        .where(message_queue.c.run_at > pg.statement_timestamp(), sees_all(jobs))
        .returning(message_queue)
        .cte("message")
    )
    earlier = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    job = (
        sa.update(jobs)
        .where(jobs.c.id == message.c.target_id, jobs.c.outcome.is_(None))
        .values(run_at=jobs.c.run_at - earlier)
        .returning(jobs.c.id, jobs.c.run_at)
        .cte("job")
    )
    copied = [message.c[name] for name in COPIED]
    rows = (
        sa.select(message.c.queue, message.c.priority, job.c.run_at, *copied)
        .select_from(message.join(job, job.c.id == message.c.target_id))
        .order_by(message.c.id)
    )
    return insert(message_queue).from_select(["queue", "priority", "run_at", *COPIED], rows)


@cache
def bring_admissions_forward() -> sa.Executable:
    """The same for jobs that wait to be admitted."""
    earlier = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    message = (
        sa.update(waiting_messages)
        .where(waiting_messages.c.run_at > pg.statement_timestamp())
        .values(run_at=waiting_messages.c.run_at - earlier)
        .returning(waiting_messages.c.target_id, waiting_messages.c.run_at)
        .cte("message")
    )
    return sa.update(jobs).where(jobs.c.id == message.c.target_id).values(run_at=message.c.run_at)


@cache
def bring_blocked_jobs_forward() -> sa.Executable:
    """The same for jobs that wait for others, which have no message until they are released."""
    earlier = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    later = jobs.c.run_at > pg.statement_timestamp()
    job = sa.update(jobs).where(jobs.c.id == blocked.c.node_id, jobs.c.outcome.is_(None), later)
    return job.values(run_at=jobs.c.run_at - earlier)


@cache
def bring_steps_forward() -> sa.Executable:
    """The same for the sleeps of jobs."""
    earlier = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    sleep = sa.update(job_steps).where(job_steps.c.finished_at > pg.statement_timestamp())
    return sleep.values(finished_at=job_steps.c.finished_at - earlier)


class DueTimes:
    """The due times of all waiting jobs, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def seconds_until(self, moment: datetime) -> float:
        """How many seconds a time is away."""
        parameters = {"moment": moment}
        return float(self._executor.execute(seconds_until(), parameters).scalar_one())

    def bring_forward(self, seconds: float) -> None:
        """Make the jobs that are not due yet due this much earlier."""
        for statement in (
            bring_forward(),
            bring_admissions_forward(),
            bring_blocked_jobs_forward(),
            bring_steps_forward(),
        ):
            self._executor.execute(statement, {"seconds": seconds})

    def next_admission(self) -> Upcoming:
        """Whether a job that waits to be admitted is due, and when the next one will be."""
        return Upcoming(*self._executor.execute(next_admission()).one())
