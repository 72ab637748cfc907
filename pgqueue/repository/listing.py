"""What an operator reads: the ids of jobs that match a filter, and all rows about one job.

This must be fast beside millions of ended jobs.  So each status is read from the table that has
its jobs, in the order of their ids: pending and blocked from the messages, running from the
leases, failed and cancelled from the dead letters.  Only succeeded jobs, and jobs of any status,
are read backwards from the newest row of ``jobs``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.checks import LONGEST_DELAY
from pgqueue.models import DEAD, SCHEMA, STATES, Job, JobStatus, StepKind
from pgqueue.repository.admit import Admissions
from pgqueue.repository.blocked import named
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.limits import Limits
from pgqueue.repository.messages import MESSAGE_KEYS, FoundJob, message_in
from pgqueue.repository.nodes import job_not_found
from pgqueue.repository.reading import moment, readable, span
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    Executor,
    array_of,
    array_parameter,
    batch_jobs,
    batches,
    blocked,
    clock,
    count_rows,
    dependencies,
    is_key_across_queues,
    job_attempts,
    job_steps,
    jobs,
    leases,
    pg,
    workers,
)
from pgqueue.repository.waits import Wait, Waits
from pgqueue.repository.workers import NOTHING_PAUSED
from pgqueue.rules.admission import next_token, rule_of
from pgqueue.rules.limits import SEPARATOR, name_of

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
JOBS = sa.any_(array_parameter("ids", sa.BigInteger))
MOST_HOLDERS = 5
MOST_BATCHES = 20
MOST_STEPS = 100
MOST_NODES = 20
"""Jobs and batches before a job that are listed, and the same number after it."""
SLEEPING = {StepKind.SLEEP, StepKind.WAIT, StepKind.GATHER}


def job_ids(
    which: JobFilter, *, limit: int | None, newest_first: bool = False, with_messages: bool = False
) -> sa.Select[*tuple[Any, ...]]:
    """The ids of matching jobs, in order; with the message of each that waits, if wanted."""

    def first(
        ids: sa.Select[*tuple[Any, ...]], id: sa.ColumnElement[int]
    ) -> sa.Select[*tuple[Any, ...]]:
        return ids.order_by(id.desc() if newest_first else id).limit(limit)

    branches = []
    for status in sorted(which.statuses):
        ids, id = _standing_in(
            status, which, newest_first=newest_first, with_messages=with_messages
        )
        # Each in a subquery of its own; otherwise the limit of one would apply to all.
        branches.append(sa.select(first(ids, id).subquery()))
        if (elsewhere := STATES[status].elsewhere if status in STATES else None) is not None:
            rest = sa.select(jobs.c.id, *([NO_MESSAGE] if with_messages else []))
            rest = rest.join(elsewhere.table, elsewhere == jobs.c.id)
            rest = rest.where(jobs.c.outcome.is_(None), *which.clauses(jobs, jobs.c.id))
            branches.append(sa.select(first(rest, jobs.c.id).subquery()))
    if not branches:
        columns = [jobs.c.id, *([NO_MESSAGE] if with_messages else [])]
        return first(sa.select(*columns).where(*which.clauses(jobs, jobs.c.id)), jobs.c.id)
    found = sa.union(*branches).subquery("ids")
    return first(sa.select(found), found.c.id)


NO_MESSAGE = sa.literal_column("NULL::jsonb", JSONB).label("message")


def number_of_jobs(which: JobFilter, *, limit: int | None) -> sa.Executable:
    """How many jobs match, up to a limit."""
    ids = job_ids(which, limit=limit).subquery("found")
    return sa.select(count_rows()).select_from(ids)


def number_of_taken_keys(which: JobFilter, *, limit: int) -> sa.Executable:
    """How many of these ended jobs have a unique key that another job holds."""
    ids = job_ids(which, limit=limit).subquery("found")
    # One probe of an index for each job: as a join, this could read all of `jobs`.
    held = sa.alias(jobs, "held")
    in_queue = sa.exists(held.c.id).where(
        held.c.id != jobs.c.id,
        held.c.queue == jobs.c.queue,
        held.c.held_unique_key == jobs.c.unique_key,
        held.c.held_unique_key.is_not(None),
    )
    across = sa.exists(held.c.id).where(
        held.c.held_unique_key == jobs.c.unique_key, is_key_across_queues(held)
    )
    return (
        sa.select(count_rows())
        .select_from(ids.join(jobs, jobs.c.id == ids.c.id))
        .where(jobs.c.unique_key.is_not(None), sa.or_(in_queue, across))
    )


def matching_ids(which: JobFilter) -> sa.Executable:
    """Those of some ids whose jobs match, whatever their status."""
    given = jobs.c.id == sa.any_(array_parameter("ids", sa.BigInteger))
    return sa.select(jobs.c.id).where(given, *which.clauses(jobs, jobs.c.id)).order_by(jobs.c.id)


@cache
def id_above() -> sa.Executable:
    """The id of the job that comes so many above another id."""
    size = sa.bindparam("size", type_=sa.BigInteger)
    rows = (
        sa.select(jobs.c.id)
        .where(jobs.c.id > sa.bindparam("after", type_=sa.BigInteger))
        .order_by(jobs.c.id)
    )
    return rows.offset(size - sa.literal_column("1", sa.BigInteger)).limit(1)


NOT_YOURS = "(not readable by this role)"


@cache
def hidden_columns() -> sa.Executable:
    """What this role may not read of a job, its attempts and its steps, as ``table.column``."""
    return sa.text(
        f"""
        SELECT pg_catalog.concat(relname, '.', attname)
        FROM pg_catalog.pg_attribute
        JOIN pg_catalog.pg_class ON pg_class.oid = attrelid
        WHERE relnamespace = pg_catalog.to_regnamespace('"{SCHEMA}"')::oid
          AND relname IN ('jobs', 'job_attempts', 'job_steps')
          AND attnum > 0 AND NOT attisdropped
          AND NOT pg_catalog.has_column_privilege(attrelid, attnum, 'SELECT')
        """  # noqa: S608  # the schema name is checked where it is read
    )


def job_details(hidden: frozenset[str]) -> sa.Executable:
    """The row of one job, its status, and the time."""
    columns = [_if_shown(one, hidden) for one in jobs.c]
    now = moment(pg.statement_timestamp()).label("read_at")
    return sa.select(*columns, Job.status.label("status"), now).where(Job.id == JOB)


@cache
def status_of_job() -> sa.Executable:
    return sa.select(Job.status).where(Job.id == JOB)


@cache
def holder_of_job() -> sa.Executable:
    """The worker that has the lease of a job, the age of its last heartbeat, and its other jobs."""
    other = leases.alias("other")
    earlier = sa.select(count_rows()).where(
        other.c.worker_id == leases.c.worker_id,
        sa.tuple_(other.c.started_at, other.c.target_id)
        < sa.tuple_(leases.c.started_at, leases.c.target_id),
    )
    return (
        sa.select(
            leases.c.worker_id,
            workers.c.hostname,
            workers.c.pid,
            leases.c.attempt,
            moment(leases.c.started_at),
            span(clock() - workers.c.heartbeat_at).label("heartbeat_age"),
            workers.c.dead_at.is_not(None).label("is_dead"),
            workers.c.slots,
            earlier.correlate(leases).scalar_subquery().label("earlier_jobs"),
        )
        .select_from(leases.outerjoin(workers, workers.c.id == leases.c.worker_id))
        .where(leases.c.target_id == JOB)
    )


@cache
def batches_of_job() -> sa.Executable:
    """The batches to which a job belongs."""
    return (
        sa.select(
            *(batches.c.id, batches.c.name, batches.c.callback_id),
            sa.and_(batches.c.is_workflow, batches.c.ended_at.is_not(None)),
        )
        .join_from(batch_jobs, batches, batches.c.id == batch_jobs.c.batch_id)
        .where(batch_jobs.c.job_id == JOB)
        .order_by(batches.c.id)
        .limit(sa.literal_column(str(MOST_BATCHES)))
    )


@cache
def watch_of_job() -> sa.Executable:
    """The node that a job watches, and for how many it waits."""
    edges = sa.select(count_rows()).where(dependencies.c.job_id == JOB).scalar_subquery()
    return sa.select(blocked.c.waits_for, edges).where(blocked.c.node_id == JOB)


@cache
def nodes_before() -> sa.Executable:
    """The jobs and batches for which a job waits, or has waited."""
    edges = sa.select(dependencies.c.after_id.label("id")).where(dependencies.c.job_id == JOB)
    return _first_nodes(edges)


@cache
def nodes_after() -> sa.Executable:
    """The jobs that wait, or have waited, for a job, or for a batch to which it belongs."""
    own = sa.select(-batch_jobs.c.batch_id).where(batch_jobs.c.job_id == JOB)
    edges = sa.select(dependencies.c.job_id.label("id")).where(
        sa.or_(dependencies.c.after_id == JOB, dependencies.c.after_id.in_(own))
    )
    return _first_nodes(edges.distinct())


def _first_nodes(edges: sa.Select[Any]) -> sa.Executable:
    first = edges.order_by(sa.column("id")).limit(sa.literal_column(str(MOST_NODES + 1)))
    node = first.subquery("node")
    batch_outcome = sa.func.coalesce(batches.c.outcome, sa.literal_column("'open'", sa.Text))
    is_batch = batches.c.id.is_not(None)
    return (
        sa.select(
            node.c.id,
            sa.func.coalesce(jobs.c.task, batches.c.name),
            sa.case(
                (jobs.c.id.is_not(None), sa.cast(Job.status, sa.Text)), (is_batch, batch_outcome)
            ),
        )
        .select_from(node)
        .outerjoin(jobs, jobs.c.id == node.c.id)
        .outerjoin(batches, batches.c.id == -node.c.id)
        .order_by(node.c.id)
    )


def steps_of_job(hidden: frozenset[str]) -> sa.Executable:
    """The recorded steps of a job: those that are not finished, then the others, newest first."""
    return (
        sa.select(
            job_steps.c.name,
            job_steps.c.kind,
            job_steps.c.attempt,
            moment(job_steps.c.started_at),
            moment(job_steps.c.finished_at),
            job_steps.c.signal,
            job_steps.c.key,
            _if_shown(job_steps.c.result, hidden),
        )
        .where(job_steps.c.job_id == JOB)
        .order_by(job_steps.c.finished_at.desc().nulls_first(), job_steps.c.name)
        .limit(sa.literal_column(str(MOST_STEPS)))
    )


@cache
def arguments_of_jobs() -> sa.Executable:
    return sa.select(jobs.c.id, jobs.c.args).where(jobs.c.id == JOBS)


@cache
def holders_of_jobs() -> sa.Executable:
    """The workers that have the leases of these jobs."""
    return (
        sa.select(leases.c.target_id, workers.c.hostname, workers.c.pid)
        .select_from(leases.join(workers, workers.c.id == leases.c.worker_id))
        .where(leases.c.target_id == JOBS)
    )


def attempts_of_job(hidden: frozenset[str]) -> sa.Executable:
    """Every unsuccessful attempt of a job, oldest first."""
    return (
        sa.select(
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
            job_attempts.c.moved_to,
        )
        .select_from(job_attempts.outerjoin(workers, workers.c.id == job_attempts.c.worker_id))
        .where(job_attempts.c.job_id == JOB)
        .order_by(job_attempts.c.message_id, job_attempts.c.attempt)
    )


def _if_shown(column: sa.Column[Any], hidden: frozenset[str]) -> sa.ColumnElement[Any]:
    if f"{column.table.name}.{column.name}" not in hidden:
        return readable(column)
    return sa.literal_column(f"'{NOT_YOURS}'", sa.Text).label(column.name)


def _standing_in(
    status: JobStatus, which: JobFilter, *, newest_first: bool, with_messages: bool
) -> tuple[sa.Select[*tuple[Any, ...]], sa.ColumnElement[int]]:
    """The ids of the jobs of one status, and the column that orders them."""
    message: list[sa.ColumnElement[Any]] = [NO_MESSAGE] if with_messages else []
    if status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        clauses = [Job.status == status, *which.clauses(jobs, jobs.c.id)]
        return sa.select(jobs.c.id, *message).where(*clauses), jobs.c.id
    state = STATES[status]
    clauses = [*state.conditions, *which.clauses(state.table, state.job_id)]
    if status in DEAD:
        return sa.select(state.job_id.label("id"), *message).where(*clauses), state.job_id
    # From the messages: the backlog limits their number, and nothing limits that of jobs.
    keys = MESSAGE_KEYS[state.table] if with_messages else [state.job_id.name]
    order = state.job_id.desc() if newest_first else state.job_id
    ordered = (
        sa.select(*(state.table.c[key] for key in keys))
        .where(*clauses)
        .order_by(order)
        .subquery("messages")
    )
    # OFFSET 0 makes the planner read each job by its key, while messages are read in their order;
    # otherwise it would hash all of `jobs` to find twenty rows.
    unfinished = (
        sa.select(jobs.c.id)
        .where(jobs.c.id == ordered.c.target_id, jobs.c.outcome.is_(None))
        .offset(AS_IT_STANDS)
        .lateral("unfinished")
    )
    # Behind the sort, for the few that are wanted: to make JSON of all messages takes long.
    message = [message_in(state.table, ordered).label("message")] if with_messages else []
    id = ordered.c.target_id
    return sa.select(id.label("id"), *message).join(unfinished, sa.true()), id


@cache
def first_failure() -> sa.Executable:
    """The first attempt of a worker that was neither cancelled nor discarded and has failed.

    Reads all attempts.
    """
    attempt = job_attempts.c
    asked_for = [
        sa.literal_column("'cancelled'", sa.Text),
        sa.literal_column("'discarded'", sa.Text),
    ]
    return (
        sa.select(
            attempt.job_id, attempt.attempt, attempt.outcome, attempt.error_type, attempt.error
        )
        .where(attempt.worker_id == sa.bindparam("worker_id", type_=sa.Uuid))
        .where(attempt.outcome.not_in(asked_for))
        .order_by(attempt.finished_at)
        .limit(1)
    )


class Holder(NamedTuple):
    """The worker that runs a job; hostname and pid are None if its row is deleted."""

    worker_id: UUID
    hostname: str | None
    pid: int | None
    attempt: int
    started_at: datetime
    heartbeat_age: timedelta | None
    is_dead: bool
    """Whether another worker has declared it dead."""
    slots: int | None
    earlier_jobs: int
    """How many jobs that it holds were claimed before this one."""


class PastAttempt(NamedTuple):
    """An unsuccessful attempt."""

    attempt: int
    outcome: str
    error_type: str | None
    error: str | None
    traceback: str | None
    worker_id: UUID | None
    hostname: str | None
    pid: int | None
    started_at: datetime | None
    finished_at: datetime
    moved_to: str | None = None
    """The queue to which its retry has moved the job."""


class LimitUse(NamedTuple):
    """One limit of a job."""

    key: str
    held: int
    """How many jobs hold a place under this key."""
    capacity: int | None
    """None if no worker has declared the limit."""
    period: timedelta | None = None
    """Of a rate: the time in which ``capacity`` jobs start."""
    seconds_to_token: float | None = None
    """Of a rate that is used up: how long until the next job may start."""
    is_fair: bool = False
    """Whether its keys take turns."""
    is_strict: bool = False
    """Whether its jobs run in the order of their times, one at a time."""
    is_set_for_key: bool = False
    """Whether the capacity is that of this key alone."""
    holders: tuple[int, ...] = ()
    """Some of the jobs that hold places, the oldest first."""


class BatchOfJob(NamedTuple):
    """A batch to which a job belongs."""

    id: int
    name: str | None
    callback_id: int | None
    """The job that the end of the batch has enqueued."""
    is_ended_workflow: bool


class StepOfJob(NamedTuple):
    """What is on record of a step of a handler."""

    name: str
    kind: StepKind
    attempt: int
    """The attempt that has written it."""
    started_at: datetime
    finished_at: datetime | None
    """In the future while the job sleeps or waits; None if nothing says when it ends."""
    signal: str | None
    """The signal for which it waits."""
    key: str | None
    """The key of this signal."""
    result: Any

    def is_open(self, at: datetime) -> bool:
        """Whether it has not ended at a time."""
        return self.finished_at is None or self.finished_at > at


class Watch(NamedTuple):
    """What a blocked job waits for."""

    node_id: int
    """One of the jobs that have not ended; of a batch, its id with a minus sign."""
    number: int
    """For how many jobs and batches it waits, with those that have ended."""


class Node(NamedTuple):
    """A job or a batch, before or after another job."""

    id: int
    """Of a batch, its id with a minus sign."""
    name: str | None
    """The task of the job, or the name of the batch."""
    status: str | None
    """None if it has been deleted; of a batch its outcome, or "open"."""

    def __str__(self) -> str:
        return " ".join(filter(None, (named(self.id), self.name, self.status or "deleted")))


@dataclass(frozen=True, slots=True)
class JobDetails:
    """Everything on record about one job."""

    status: JobStatus
    columns: dict[str, Any]
    """The row of ``jobs``."""
    holder: Holder | None
    past_attempts: Sequence[PastAttempt]
    read_at: datetime
    """The time of the database."""
    wait: Wait
    limits: Sequence[LimitUse] = ()
    batches: Sequence[BatchOfJob] = ()
    waits_for: Watch | None = None
    steps: Sequence[StepOfJob] = ()
    """Those that are open, then the others, the newest first; at most MOST_STEPS."""
    before: Sequence[Node] = ()
    """For what it waits, or has waited; one more than MOST_NODES if there are more."""
    after: Sequence[Node] = ()
    """What waits, or has waited, for it or for a batch of it; as many."""

    @property
    def is_due(self) -> bool:
        return bool(self.columns["run_at"] <= self.read_at)

    @property
    def open_step(self) -> StepOfJob | None:
        """The step in which the job sleeps or waits; None if it is due or retried before."""
        never = self.read_at + LONGEST_DELAY / 2
        for step in self.steps:
            wakes_at = (step.finished_at or never) - timedelta(seconds=1)
            if step.kind in SLEEPING and step.is_open(self.read_at):
                return step if self.columns["run_at"] >= wakes_at else None
        return None


class Listing:
    """Reads the jobs behind one Session or Connection for an operator."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def ids(self, which: JobFilter, *, limit: int | None = None) -> list[int]:
        """The ids of all matching jobs, or of the oldest of them, in ascending order."""
        ids = job_ids(which, limit=limit, newest_first=False)
        return [row[0] for row in self._executor.execute(ids)]

    def found(self, which: JobFilter, *, limit: int) -> list[FoundJob]:
        """The oldest jobs that match, in ascending order, with the messages of those that wait."""
        ids = job_ids(which, limit=limit, with_messages=True)
        return [FoundJob(*row) for row in self._executor.execute(ids)]

    def matching(self, which: JobFilter, ids: Sequence[int]) -> list[int]:
        """Those of these ids whose jobs match, whatever their status, in ascending order."""
        parameters = {"ids": array_of(map(str, ids))}
        return [row[0] for row in self._executor.execute(matching_ids(which), parameters)]

    def count(self, which: JobFilter, *, limit: int | None = None) -> int:
        """How many jobs match; at most ``limit``."""
        return int(self._executor.execute(number_of_jobs(which, limit=limit)).scalar_one())

    def taken_keys(self, which: JobFilter, *, limit: int) -> int:
        """Of the oldest jobs that match, how many cannot be requeued: their key is taken."""
        statement = number_of_taken_keys(which, limit=limit)
        return int(self._executor.execute(statement).scalar_one())

    def next_id(self, after: int, *, size: int) -> int | None:
        """The id that has so many jobs of any kind between it and ``after``; None at the end."""
        return self._executor.execute(id_above(), {"after": after, "size": size}).scalar()

    def arguments(self, job_ids: Iterable[int]) -> dict[int, Any]:
        """The arguments of some jobs; none if this role may not read them."""
        hidden = [row[0] for row in self._executor.execute(hidden_columns())]
        if "jobs.args" in hidden:
            return {}
        found = self._executor.execute(arguments_of_jobs(), {"ids": array_of(map(str, job_ids))})
        return {row.id: row.args for row in found}

    def holders(self, job_ids: Iterable[int]) -> dict[int, str]:
        """The workers that have claimed some jobs, as ``host:pid``."""
        found = self._executor.execute(holders_of_jobs(), {"ids": array_of(map(str, job_ids))})
        return {row.target_id: f"{row.hostname}:{row.pid}" for row in found}

    def status(self, job_id: int) -> JobStatus | None:
        """The status of a job; None if there is no such job."""
        found = self._executor.execute(status_of_job(), {"job_id": job_id}).scalar()
        return None if found is None else JobStatus(found)

    def first_failure(self, worker_id: UUID) -> str | None:
        """In words, the first attempt of a worker that has failed; None if there is none."""
        row = self._executor.execute(first_failure(), {"worker_id": worker_id}).first()
        if row is None:
            return None
        return f"job {row[0]}: attempt {row[1]} ended as {row[2]}: {row[3]}: {row[4]}"

    def job(self, job_id: int) -> JobDetails:
        """Everything about one job that this role may read; raises JobNotFound."""
        one = {"job_id": job_id}
        hidden = frozenset(row[0] for row in self._executor.execute(hidden_columns()))
        row = self._executor.execute(job_details(hidden), one).mappings().one_or_none()
        if row is None:
            raise job_not_found(self._executor, job_id)
        columns = dict(row)
        status, read_at = JobStatus(columns.pop("status")), columns.pop("read_at")
        held = self._executor.execute(holder_of_job(), one).one_or_none()
        past = self._executor.execute(attempts_of_job(hidden), one)
        batches = self._executor.execute(batches_of_job(), one)
        watch = self._executor.execute(watch_of_job(), one).first()
        steps = self._executor.execute(steps_of_job(hidden), one)
        wait = Waits(self._executor).of(
            columns,
            is_due=columns["run_at"] <= read_at,
            is_blocked=status == JobStatus.BLOCKED,
        )
        return JobDetails(
            status=status,
            columns=columns,
            holder=Holder(*held) if held else None,
            past_attempts=[PastAttempt(*attempt) for attempt in past],
            read_at=read_at,
            wait=wait,
            limits=self._limits(columns["limit_keys"]),
            batches=[BatchOfJob(*batch) for batch in batches],
            waits_for=None if watch is None else Watch(*watch),
            steps=[StepOfJob(name, StepKind(kind), *rest) for name, kind, *rest in steps],
            before=list(map(Node._make, self._executor.execute(nodes_before(), one))),
            after=list(map(Node._make, self._executor.execute(nodes_after(), one))),
        )

    def _limits(self, limit_keys: str | None) -> list[LimitUse]:
        if limit_keys is None or limit_keys == NOT_YOURS:
            return []
        admissions, keys = Admissions(self._executor), limit_keys.split(SEPARATOR)
        rules = Limits(self._executor).rules()
        places = admissions.places_under(keys, paused=NOTHING_PAUSED)
        holders: dict[str, list[int]] = {key: [] for key in keys}
        for place in places:
            if place.is_held:
                holders[place.key].append(place.job_id)
        buckets = admissions.buckets(keys)
        uses = []
        for key in keys:
            rule, held = rule_of(key, rules), sorted(holders[key])
            use = LimitUse(key, len(held), None, holders=tuple(held[:MOST_HOLDERS]))
            if rule is not None:
                wait = next_token([key], buckets, rules) if rule.period else None
                use = use._replace(
                    capacity=rule.capacity,
                    period=rule.period,
                    seconds_to_token=None if wait is None else wait.total_seconds(),
                    is_fair=rule.is_fair,
                    is_strict=rule.is_strict,
                    is_set_for_key=key in rules and key != name_of(key),
                )
            uses.append(use)
        return uses
