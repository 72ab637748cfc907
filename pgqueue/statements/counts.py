"""The number of jobs by queue and status."""

from functools import cache

from sqlalchemy import ColumnElement, Executable, Select, exists, literal, select, text, union_all

from pgqueue.models import SCHEMA, Job
from pgqueue.statements.tables import (
    count_rows,
    dead_letters,
    jobs,
    leases,
    message_queue,
    waiting_messages,
)


@cache
def count_jobs() -> Executable:
    """By queue and status.  Reads all jobs."""
    by = (Job.queue, Job.status)
    return select(*by, count_rows().label("count")).group_by(*by).order_by(*by)


@cache
def count_jobs_but_succeeded() -> Executable:
    """The same without succeeded jobs, which are the most: reads only the narrow tables."""

    leased = exists().where(leases.c.target_id == message_queue.c.target_id)
    pending = _count(message_queue.c.queue, "pending").where(~leased)
    running = _count(jobs.c.queue, "running").join_from(
        leases, jobs, leases.c.target_id == jobs.c.id
    )
    blocked = _count(waiting_messages.c.queue, "blocked")
    by = (dead_letters.c.queue, dead_letters.c.outcome)
    return union_all(pending, running, blocked, select(*by, count_rows()).group_by(*by))


def _count(queue: ColumnElement[str], status: str) -> Select[str, str, int]:
    return select(queue, literal(status), count_rows()).group_by(queue)


@cache
def estimate_jobs() -> Executable:
    """The number of jobs that the last VACUUM or ANALYZE has found; -1 before the first."""
    return text(
        f"""
        SELECT reltuples::bigint FROM pg_catalog.pg_class
        WHERE oid = '"{SCHEMA}".jobs'::regclass::oid
        """  # noqa: S608  # the schema name is checked where it is read
    )
