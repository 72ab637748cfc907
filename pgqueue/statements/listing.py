"""What an operator reads: pages of jobs, and all rows about one job.

A page must be fast beside millions of ended jobs.  So each status is read from the table that has
its jobs, in the order of their ids: pending from the messages, running from the leases, failed and
cancelled from the dead letters.  Only succeeded jobs, and jobs of any status, are read backwards
from the newest row of ``jobs``.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Executable,
    Select,
    Table,
    Text,
    Uuid,
    bindparam,
    cast,
    exists,
    literal_column,
    select,
    text,
    true,
    type_coerce,
    union,
)

from pgqueue.models import SCHEMA, Job, JobStatus
from pgqueue.statements.reading import moment, readable, span
from pgqueue.statements.tables import (
    AS_IT_STANDS,
    SUCCEEDED,
    clock,
    dead_letters,
    job_attempts,
    jobs,
    leases,
    message_queue,
    paused_tasks,
    pg,
    queues,
    text_parameter,
    workers,
)

JOB = bindparam("job_id", type_=BigInteger)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs; a job matches if all conditions given here hold."""

    statuses: frozenset[JobStatus] = frozenset()
    """Empty: any status."""
    task: str | None = None
    queue: str | None = None
    before: int | None = None
    """Only jobs with a smaller id: older ones."""
    after: int | None = None
    """Only jobs with a larger id: newer ones."""
    tag: str | None = None
    """Only jobs with this tag; no index finds them, so every other condition helps."""
    are_waiting: bool = False
    """Of the pending jobs, only those that are not due yet."""

    def words(self, table: Table, id: ColumnElement[int]) -> list[ColumnElement[bool]]:
        """The conditions, without the status, for a table with columns task and queue."""
        found = [
            None if self.task is None else table.c.task == cast(self.task, Text),
            None if self.queue is None else table.c.queue == cast(self.queue, Text),
            None if self.before is None else id < self.before,
            None if self.after is None else id > self.after,
            None if self.tag is None else _has_tag(self.tag, table, id),
        ]
        return [condition for condition in found if condition is not None]


def _has_tag(tag: str, table: Table, id: ColumnElement[int]) -> ColumnElement[bool]:
    if table is jobs:
        return type_coerce(jobs.c.tags.has_key(cast(tag, Text)), Boolean)
    # One probe by key for each row; an EXISTS could become a join that reads all jobs.
    tagged = jobs.alias("tagged")
    has_it = select(tagged.c.tags.has_key(cast(tag, Text))).where(tagged.c.id == id)
    return has_it.scalar_subquery().is_(true())


SHOWN: tuple[Any, ...] = (
    Job.id,
    Job.status,
    Job.task,
    Job.queue,
    Job.priority,
    Job.attempts,
    Job.max_attempts,
    Job.run_at,
    Job.created_at,
    Job.started_at,
    Job.finished_at,
    Job.last_error,
)
"""No arguments and results, which may be large and secret."""


def list_jobs(which: JobFilter, *, limit: int) -> Executable:
    """The newest matching jobs, by descending id."""
    ids = job_ids(which, limit=limit, newest_first=True)
    found = ids.subquery("found")
    return select(*map(readable, SHOWN)).join(found, found.c.id == Job.id).order_by(Job.id.desc())


def job_ids(which: JobFilter, *, limit: int | None, newest_first: bool) -> Select[*tuple[Any, ...]]:
    """The ids of matching jobs, in order."""

    def first(ids: Select[*tuple[Any, ...]], id: ColumnElement[int]) -> Select[*tuple[Any, ...]]:
        return ids.order_by(id.desc() if newest_first else id).limit(limit)

    if not which.statuses:
        return first(select(jobs.c.id).where(*which.words(jobs, jobs.c.id)), jobs.c.id)
    branches = []
    for status in sorted(which.statuses):
        ids, id = _standing_in(status, which, newest_first=newest_first)
        # Each in a subquery of its own; otherwise the limit of one would apply to all.
        branches.append(select(first(ids, id).subquery()))
    found = union(*branches).subquery("ids")
    return first(select(found.c.id), found.c.id)


NOT_YOURS = "(not readable by this role)"


@cache
def hidden_columns() -> Executable:
    """The columns of a job and its attempts that this role may not read, as ``table.column``."""
    return text(
        f"""
        SELECT pg_catalog.concat(relname, '.', attname)
        FROM pg_catalog.pg_attribute
        JOIN pg_catalog.pg_class ON pg_class.oid = attrelid
        WHERE relnamespace = pg_catalog.to_regnamespace('"{SCHEMA}"')::oid
          AND relname IN ('jobs', 'job_attempts')
          AND attnum > 0 AND NOT attisdropped
          AND NOT pg_catalog.has_column_privilege(attrelid, attnum, 'SELECT')
        """  # noqa: S608  # the schema name is checked where it is read
    )


def job_details(hidden: frozenset[str]) -> Executable:
    """The row of one job, and its status."""
    columns = [_if_shown(one, hidden) for one in jobs.c]
    return select(*columns, Job.status.label("status")).where(Job.id == JOB)


@cache
def status_of_job() -> Executable:
    return select(Job.status).where(Job.id == JOB)


@cache
def holder_of_job() -> Executable:
    """The worker that has the lease of a job, and the age of its last heartbeat."""
    return (
        select(
            leases.c.worker_id,
            workers.c.hostname,
            workers.c.pid,
            leases.c.attempt,
            moment(leases.c.started_at),
            span(clock() - workers.c.heartbeat_at).label("heartbeat_age"),
        )
        .select_from(leases.outerjoin(workers, workers.c.id == leases.c.worker_id))
        .where(leases.c.target_id == JOB)
    )


@cache
def pauses_of_job() -> Executable:
    """Whether the queue of a job is paused, and whether its task is."""
    queue = queues.c.name == text_parameter("queue_name")
    task = paused_tasks.c.task == text_parameter("task_name")
    return select(
        exists().where(queue, queues.c.paused_at.is_not(None)).label("is_queue_paused"),
        exists().where(task).label("is_task_paused"),
    )


def attempts_of_job(hidden: frozenset[str]) -> Executable:
    """Every unsuccessful attempt of a job, oldest first."""
    return (
        select(
            job_attempts.c.attempt,
            job_attempts.c.outcome,
            job_attempts.c.error_type,
            _if_shown(job_attempts.c.error, hidden),
            _if_shown(job_attempts.c.traceback, hidden),
            job_attempts.c.worker_id,
            workers.c.hostname,
            workers.c.pid,
            moment(job_attempts.c.started_at),
            moment(job_attempts.c.finished_at),
        )
        .select_from(job_attempts.outerjoin(workers, workers.c.id == job_attempts.c.worker_id))
        .where(job_attempts.c.job_id == JOB)
        .order_by(job_attempts.c.message_id, job_attempts.c.attempt)
    )


def _if_shown(column: Column[Any], hidden: frozenset[str]) -> ColumnElement[Any]:
    if f"{column.table.name}.{column.name}" not in hidden:
        return readable(column)
    return literal_column(f"'{NOT_YOURS}'", Text).label(column.name)


def _standing_in(
    status: JobStatus, which: JobFilter, *, newest_first: bool
) -> tuple[Select[*tuple[Any, ...]], ColumnElement[int]]:
    """The ids of the jobs of one status, and the column that orders them."""
    match status:
        case JobStatus.PENDING:
            return _pending(which, newest_first=newest_first)
        case JobStatus.FAILED | JobStatus.CANCELLED:
            letter = dead_letters.c.job_id
            died = dead_letters.c.outcome == literal_column(f"'{status.value}'")
            words = which.words(dead_letters, letter)
            return select(letter.label("id")).where(died, *words), letter
        case JobStatus.SUCCEEDED:
            words = [jobs.c.outcome == SUCCEEDED, *which.words(jobs, jobs.c.id)]
        case _:
            words = [Job.status == status, *which.words(jobs, jobs.c.id)]
    return select(jobs.c.id).where(*words), jobs.c.id


def _pending(
    which: JobFilter, *, newest_first: bool
) -> tuple[Select[*tuple[Any, ...]], ColumnElement[int]]:
    """Reads messages: the backlog limits their number, and nothing limits that of jobs.

    OFFSET 0 makes the planner read each job by its key, while messages are read in their order;
    otherwise it would hash all of ``jobs`` to find twenty rows.
    """
    target = message_queue.c.target_id
    leased = exists().where(leases.c.target_id == target)
    messages = select(target).where(~leased, *which.words(message_queue, target))
    if which.are_waiting:
        messages = messages.where(message_queue.c.run_at > pg.statement_timestamp())
    ordered = messages.order_by(target.desc() if newest_first else target).subquery("messages")
    unfinished = (
        select(jobs.c.id)
        .where(jobs.c.id == ordered.c.target_id, jobs.c.outcome.is_(None))
        .offset(AS_IT_STANDS)
        .lateral("unfinished")
    )
    ids = select(ordered.c.target_id.label("id")).join(unfinished, true())
    return ids, ordered.c.target_id


@cache
def first_failure() -> Executable:
    """The first attempt of a worker that has failed without being asked to.  Reads all attempts."""
    attempt = job_attempts.c
    asked_for = [literal_column("'cancelled'", Text), literal_column("'discarded'", Text)]
    return (
        select(attempt.job_id, attempt.attempt, attempt.outcome, attempt.error_type, attempt.error)
        .where(attempt.worker_id == bindparam("worker_id", type_=Uuid))
        .where(attempt.outcome.not_in(asked_for))
        .order_by(attempt.finished_at)
        .limit(1)
    )
