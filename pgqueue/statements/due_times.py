"""The due times of waiting jobs, which a test brings forward.

No worker in production moves them.
"""

from functools import cache

from sqlalchemy import (
    DateTime,
    Double,
    Executable,
    bindparam,
    cast,
    delete,
    false,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from pgqueue.statements.tables import clock, jobs, message_queue, pg, seconds, waiting_messages

COPIED = ("target_id", "task", "attempt", "crashes", "alone")


@cache
def waiting_queues() -> Executable:
    """The names of all queues that have messages.  Reads all messages."""
    names = select(message_queue.c.queue).union(select(waiting_messages.c.queue)).subquery("names")
    return select(names.c.queue).order_by(names.c.queue)


@cache
def next_admission() -> Executable:
    """Whether a job that waits to be admitted is due, and how many seconds until the next one is.

    Reads all such jobs.
    """
    run_at, now = waiting_messages.c.run_at, pg.statement_timestamp()
    is_due = func.coalesce(pg.bool_or(run_at <= now), false())
    later = pg.min(run_at).filter(run_at > now)
    return select(is_due, cast(func.extract("epoch", later - clock()), Double))


@cache
def seconds_until() -> Executable:
    """How long a time is away, by the clock with which claims compare."""
    moment = cast(bindparam("moment", type_=DateTime(timezone=True)), DateTime(timezone=True))
    return select(cast(func.extract("epoch", moment - clock()), Double))


@cache
def bring_forward() -> Executable:
    """Make each job that is not due yet due earlier; by a negative number, later.

    New messages replace the old ones, in the same order, with the time of their jobs' rows.
    """
    message = (
        delete(message_queue)
        .where(message_queue.c.run_at > pg.statement_timestamp())
        .returning(message_queue)
        .cte("message")
    )
    earlier = seconds(cast(bindparam("seconds", type_=Double), Double))
    job = (
        update(jobs)
        .where(jobs.c.id == message.c.target_id, jobs.c.outcome.is_(None))
        .values(run_at=jobs.c.run_at - earlier)
        .returning(jobs.c.id, jobs.c.run_at)
        .cte("job")
    )
    copied = [message.c[name] for name in COPIED]
    rows = (
        select(message.c.queue, message.c.priority, job.c.run_at, *copied)
        .select_from(message.join(job, job.c.id == message.c.target_id))
        .order_by(message.c.id)
    )
    return insert(message_queue).from_select(["queue", "priority", "run_at", *COPIED], rows)


@cache
def bring_admissions_forward() -> Executable:
    """The same for jobs that wait to be admitted."""
    earlier = seconds(cast(bindparam("seconds", type_=Double), Double))
    message = (
        update(waiting_messages)
        .where(waiting_messages.c.run_at > pg.statement_timestamp())
        .values(run_at=waiting_messages.c.run_at - earlier)
        .returning(waiting_messages.c.target_id, waiting_messages.c.run_at)
        .cte("message")
    )
    return update(jobs).where(jobs.c.id == message.c.target_id).values(run_at=message.c.run_at)
