"""Settle: write the outcome of an attempt, if the lease is still ours.

Every statement that ends an attempt checks the fence (:mod:`pgqueue.repository.fence`).  Most begin
by deleting the lease there, and derive everything else from the deleted lease.  So a worker that
has lost its lease changes nothing.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, assert_never

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.exc import IntegrityError

from pgqueue.checks import LONGEST_DELAY
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Exhausted,
    Expired,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)
from pgqueue.repository import deadlines, fence
from pgqueue.repository.claim import Claimed, Claims
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.fate import transaction_name
from pgqueue.repository.follow_ups import follow_up_messages
from pgqueue.repository.row_security import refuse_hidden
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CRASH,
    FAILED,
    INTERRUPTION,
    NEWLINE,
    POSITION,
    SPACE,
    SUCCEEDED,
    among,
    array_parameter,
    clock,
    count_rows,
    dead_letters,
    deleted_records,
    document,
    equal,
    given_ids,
    has_key_of_period,
    is_key_across_queues,
    job_attempts,
    jobs,
    key_after_failure,
    key_after_success,
    leases,
    limits,
    message_queue,
    pg,
    seconds,
    unreadable_jobs,
    waiting_messages,
    wake_up_call,
)
from pgqueue.repository.transactions import CHECK_CONSTRAINTS

MOST_SNOOZES = sa.literal_column("32767", sa.Integer)
HALF = sa.literal_column("CAST(0.5 AS FLOAT)", sa.Float)
SHORTEST_PAUSE = sa.literal_column("CAST(5 AS FLOAT)", sa.Float)
LONGEST_PAUSE = sa.literal_column("CAST(60 AS FLOAT)", sa.Float)
USED_UP = sa.literal_column("1", sa.SmallInteger)
FIRST_ATTEMPT = sa.cast(sa.literal_column("1"), sa.SmallInteger)
NOT_USED_UP = sa.cast(sa.literal_column("0"), sa.SmallInteger)
ONE = sa.literal_column("1", sa.Integer)
VERDICT_COLUMNS = (
    sa.column("target_id", sa.BigInteger),
    sa.column("message_id", sa.BigInteger),
    sa.column("attempt", sa.SmallInteger),
    sa.column("job_outcome", sa.Text),
    sa.column("delay", sa.Float),
    sa.column("give_up_after", sa.Float),
    sa.column("used_up", sa.SmallInteger),
    sa.column("crashed", sa.SmallInteger),
    sa.column("snoozed", sa.SmallInteger),
    sa.column("max_interruptions", sa.SmallInteger),
    sa.column("max_unreadable", sa.Float),
    sa.column("result", JSONB),
    sa.column("attempt_end", sa.Text),
    sa.column("error_type", sa.Text),
    sa.column("error", sa.Text),
    sa.column("traceback", sa.Text),
    sa.column("fingerprint", sa.BigInteger),
    sa.column("to_queue", sa.Text),
    sa.column("to_priority", sa.SmallInteger),
)
"""One attempt and its end, as ``_row_of`` writes it."""
ERROR = ("error_type", "error", "traceback")
POSITION_OF_RETRY = ("to_queue", "to_priority")
KEPT_AS_GIVEN = (
    *("snoozed", "max_interruptions", "result", *ERROR, "fingerprint"),
    *POSITION_OF_RETRY,
)
LAST_INTERRUPTION = sa.literal_column("' The job has reached max_interruptions = '", sa.Text)


@cache
def settle() -> sa.Executable:
    """Settle a batch of attempts, each as its document says; returns those that were ours.

    A document says of an unreadable job that it fails.  Until ``max_unreadable`` has passed, the
    job waits instead: half of the time it has been unreadable, from 5 seconds to a minute.
    """
    given = document("verdicts", *VERDICT_COLUMNS)
    gone = fence.deleted_leases(given)
    # OFFSET keeps the planner from joining in another order: one probe by key for each such job.
    unreadable = (
        sa.select(unreadable_jobs.c.since)
        .where(unreadable_jobs.c.job_id == given.c.target_id, given.c.max_unreadable.is_not(None))
        .offset(AS_IT_STANDS)
        .lateral("met")
    )
    now = pg.statement_timestamp()
    waited = now - sa.func.coalesce(unreadable.c.since, now)
    waits = waited < seconds(given.c.max_unreadable)
    half = sa.cast(sa.extract("epoch", waited), sa.Float) * HALF
    pause = sa.func.least(sa.func.greatest(half, SHORTEST_PAUSE), LONGEST_PAUSE)
    job_outcome = sa.case(
        (waits, sa.null()), (_is_too_late(given, gone), FAILED), else_=given.c.job_outcome
    )
    settled = (
        sa.select(
            *(column for column in gone.c if column.name != "crashes"),
            # A crash of the child process counts as a crash of the worker: the job is then
            # claimed alone.
            (gone.c.crashes + given.c.crashed).label("crashes"),
            *(given.c[name] for name in KEPT_AS_GIVEN),
            waits.label("waits"),
            sa.case((waits, pause), else_=given.c.delay).label("delay"),
            sa.case((waits, NOT_USED_UP), else_=given.c.used_up).label("used_up"),
            job_outcome.label("job_outcome"),
            sa.case((waits, sa.null()), else_=given.c.attempt_end).label("attempt_end"),
        )
        .select_from(
            gone.join(
                given, sa.and_(*equal(given, gone, ("target_id", "message_id", "attempt")))
            ).outerjoin(unreadable, sa.true())
        )
        .cte("settled")
    )
    return write_outcomes(settled).add_columns(transaction_name())


@cache
def settle_succeeded() -> sa.Executable:
    """The common case of :func:`settle`, with less work: success without a result.

    Returns one row: how many were ours; which of them ended as cancelled; and, if not all were
    ours, which were.  The arrays are sent as text: psycopg would adapt each item.
    """
    job = _succeeded_jobs(fence.deleted_leases(_given_successes()))
    ours = count_rows()
    cancelled = pg.jsonb_agg(job.c.id).filter(job.c.outcome == CANCELLED)
    settled = sa.case((ours != sa.bindparam("expected", type_=sa.Integer), pg.jsonb_agg(job.c.id)))
    return (
        sa.select(ours, sa.cast(cancelled, sa.Text), sa.cast(settled, sa.Text))
        .select_from(job)
        .add_cte(_dead_letters_of(job))
    )


@cache
def settle_one_success() -> sa.Executable:
    """End one successful attempt in its handler's transaction; no row if it was not ours.

    Without a dead letter: the transaction of a job that was cancelled is rolled back.
    """
    job = _succeeded_jobs(fence.deleted_lease())
    return sa.select(job.c.id, job.c.outcome, transaction_name())


@cache
def delete_succeeded() -> sa.Executable:
    """Delete jobs that have succeeded and are not kept; returns those that were deleted.

    Leaves other jobs to the ordinary settle: those that are not ours, were asked to cancel, or keep
    the key of a period.  Locks the leases before the jobs, as everywhere, and deletes only those of
    deleted jobs: a job whose cancel was requested meanwhile keeps its lease, and is settled.
    """
    given = _given_successes()
    ours = (
        sa.select(leases.c.target_id)
        .where(fence.is_ours(given.c.target_id, given.c.message_id, given.c.attempt))
        .with_for_update()
        .offset(AS_IT_STANDS)
        .lateral("ours")
    )
    lease = sa.select(ours.c.target_id).select_from(given.join(ours, sa.true())).cte("lease")
    job = (
        sa.delete(jobs)
        .where(
            jobs.c.id == lease.c.target_id,
            jobs.c.outcome.is_(None),
            jobs.c.cancel_requested_at.is_(None),
            has_key_of_period().is_not(sa.true()),
        )
        .returning(jobs.c.id)
        .cte("job")
    )
    ids = among(sa.select(job.c.id))
    gone = sa.delete(leases).where(leases.c.target_id == ids).cte("gone")
    return sa.select(job.c.id, transaction_name()).add_cte(gone, *deleted_records(job))


def check_constraints() -> sa.Executable:
    """Check deferred constraints, such as a foreign key to a job that was just deleted."""
    return sa.text(CHECK_CONSTRAINTS)


@cache
def free_jobs() -> sa.Executable:
    """Which of these jobs no other transaction has locked at this moment."""
    return free_among(given_ids("target_ids", column="target_id"))


def free_among(given: sa.FromClause) -> sa.Select[Any]:
    """Those of these jobs that can be updated without waiting for another transaction.

    Another transaction may have cancelled a job and not committed yet.  Locks the free jobs, with
    one probe by key for each.  A deleted job counts as free.
    """
    job = sa.select(jobs.c.id).where(jobs.c.id == given.c.target_id)
    unlocked = job.with_for_update(key_share=True, skip_locked=True).offset(AS_IT_STANDS)
    free = unlocked.lateral("free")
    return (
        sa.select(given.c.target_id)
        .select_from(given.outerjoin(free, sa.true()))
        .where(sa.or_(free.c.id.is_not(None), job.scalar_subquery().is_(None)))
    )


_KEY_ARRAYS = (
    ("target_ids", sa.BigInteger),
    ("message_ids", sa.BigInteger),
    ("attempts", sa.SmallInteger),
)


def _given_successes() -> sa.TableValuedAlias:
    return (
        # unnest with several arrays is syntax, and takes no schema name.
        sa.func.unnest(*(array_parameter(name, kind) for name, kind in _KEY_ARRAYS))
        .table_valued(
            sa.column("target_id", sa.BigInteger),
            sa.column("message_id", sa.BigInteger),
            sa.column("attempt", sa.SmallInteger),
        )
        .render_derived(name="given")
    )


def _succeeded_jobs(lease: sa.CTE) -> sa.CTE:
    return (
        sa.update(jobs)
        .where(jobs.c.id == lease.c.target_id, jobs.c.outcome.is_(None))
        .values(
            outcome=sa.case((jobs.c.cancel_requested_at.is_(None), SUCCEEDED), else_=CANCELLED),
            attempts=lease.c.attempt,
            last_error=sa.null(),
            started_at=lease.c.started_at,
            finished_at=clock(),
            held_unique_key=sa.case((jobs.c.cancel_requested_at.is_(None), key_after_success())),
        )
        .returning(jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
        .cte("job")
    )


def write_outcomes(settled: sa.CTE, *more: str) -> sa.Select[Any]:
    """Apply the outcomes of these deleted leases, of every kind.

    Plain successes have a shorter form, ``_succeeded_jobs``, which repeats the rules that concern
    them.  Needs the columns of ``fence.lease_columns()`` and those of ``rescue._crashed()``.

    Returns each job and its outcome, and ``more`` of its columns, meta as text.

    The job's row decides: a job that has ended meanwhile keeps its outcome.  Three rules hold for
    every outcome: a requested cancel takes precedence; a job that would go on fails if its last
    attempt is used up; and a job that goes on gets a message here, or a waiting message if its next
    start counts under a rate.  The follow-up of a job that fails is enqueued here.

    A retry may move a job to another queue, which wakes the workers there.  Not a job that holds a
    key of its queue: another job may hold it in the other queue, and a violated index would fail
    the whole batch.
    """
    interruptions = sa.cast(jobs.c.interruptions, sa.Integer) + ONE
    # NULL, which counts as false, if the attempt was not interrupted.
    is_last_interruption = interruptions >= settled.c.max_interruptions
    uses_up_last_attempt = sa.and_(
        settled.c.used_up == USED_UP, settled.c.attempt >= jobs.c.max_attempts
    )
    job_outcome = sa.case(
        (jobs.c.cancel_requested_at.is_not(None), CANCELLED),
        (settled.c.job_outcome.is_not(None), settled.c.job_outcome),
        (uses_up_last_attempt, FAILED),
        (is_last_interruption, FAILED),
    )
    moves = sa.and_(
        job_outcome.is_(None),
        settled.c.to_queue.is_not(None),
        sa.or_(jobs.c.held_unique_key.is_(None), is_key_across_queues()),
    )
    has_moved = jobs.c.queue == settled.c.to_queue
    job = (
        sa.update(jobs)
        .where(jobs.c.id == settled.c.target_id, jobs.c.outcome.is_(None))
        .values(
            outcome=job_outcome,
            queue=sa.case((moves, settled.c.to_queue), else_=jobs.c.queue),
            priority=sa.case(
                (job_outcome.is_(None), sa.func.coalesce(settled.c.to_priority, jobs.c.priority)),
                else_=jobs.c.priority,
            ),
            # At most max_attempts: the attempt that only finds the job exhausted may crash too.
            attempts=sa.func.least(settled.c.attempt - 1 + settled.c.used_up, jobs.c.max_attempts),
            # Limited: a job that snoozes for ever must not fail when the counter is at its maximum.
            snoozes=sa.func.least(
                sa.cast(jobs.c.snoozes, sa.Integer) + settled.c.snoozed, MOST_SNOOZES
            ),
            interruptions=sa.case(
                (settled.c.max_interruptions.is_not(None), interruptions),
                else_=jobs.c.interruptions,
            ),
            # Without a delay the job keeps its run_at: a new one would put it behind the backlog.
            run_at=sa.case(
                (
                    sa.and_(job_outcome.is_(None), settled.c.delay.is_not(None)),
                    clock() + seconds(settled.c.delay),
                ),
                else_=jobs.c.run_at,
            ),
            result=settled.c.result,
            # NULL after a successful attempt; earlier attempts keep their errors on record.
            last_error=sa.func.coalesce(
                sa.case(
                    (
                        is_last_interruption,
                        pg.concat(settled.c.error, LAST_INTERRUPTION, settled.c.max_interruptions),
                    )
                ),
                sa.func.nullif(sa.cast(settled.c.error, sa.Text), sa.literal_column("''", sa.Text)),
                settled.c.error_type,  # of an exception without a message
                sa.case((settled.c.job_outcome.is_distinct_from(SUCCEEDED), jobs.c.last_error)),
            ),
            started_at=sa.case((settled.c.used_up == USED_UP, settled.c.started_at)),
            finished_at=sa.case((job_outcome.is_not(None), clock())),
            held_unique_key=sa.case(
                (job_outcome.is_(None), jobs.c.held_unique_key),
                (job_outcome == SUCCEEDED, key_after_success()),
                (job_outcome == FAILED, key_after_failure()),
            ),
        )
        .returning(
            *jobs.c,
            *(column.label(f"settled_{column.name}") for column in settled.c),
            _next_start_counts().label("next_start_counts"),
            sa.case((has_moved, settled.c.to_queue)).label("moved_to"),
            sa.case((has_moved, wake_up_call())).label("woken"),
        )
        .cte("job")
    )

    # The messages of jobs that go on.  A job that crashed before, or has only one attempt, is not
    # claimed ahead of a slot.
    moved = (*POSITION, "id", "task", "attempts", "settled_crashes")
    alone = sa.or_(job.c.settled_crashes > 0, job.c.max_attempts == 1)
    next_message = sa.insert(message_queue).from_select(
        [*POSITION, "target_id", "task", "attempt", "crashes", "alone"],
        sa.select(*(job.c[name] for name in moved), alone).where(
            job.c.outcome.is_(None), job.c.next_start_counts.is_not(sa.true())
        ),
    )
    waiting_message = sa.insert(waiting_messages).from_select(
        ["limit_keys", *POSITION, "target_id", "task", "attempt", "crashes"],
        sa.select(job.c.limit_keys, *(job.c[name] for name in moved)).where(
            job.c.outcome.is_(None), job.c.next_start_counts
        ),
    )

    recorded = ("message_id", "attempt", "attempt_end", *ERROR, "worker_id", "started_at")
    bad_attempt = pg_insert(job_attempts).from_select(
        [
            "job_id",
            *("outcome" if name == "attempt_end" else name for name in recorded),
            "moved_to",
            "finished_at",
        ],
        sa.select(
            job.c.id,
            *(job.c[f"settled_{name}"] for name in recorded),
            job.c.moved_to,
            clock(),
        ).where(job.c.settled_attempt_end.is_not(None)),
    )

    # A job that was recorded as unreadable before keeps its time.
    unreadable = pg_insert(unreadable_jobs).from_select(
        ["job_id", "task", "reason"],
        sa.select(job.c.id, job.c.task, job.c.settled_error).where(
            job.c.settled_waits, job.c.outcome.is_(None)
        ),
    )
    # No longer unreadable: an attempt has started, or the job has ended.  Probes by key: a join
    # might read the whole table.
    readable = sa.select(job.c.id).where(
        sa.or_(
            job.c.settled_used_up == USED_UP,
            job.c.settled_snoozed == ONE,
            job.c.settled_max_interruptions.is_not(None),
            job.c.outcome.is_not(None),
        )
    )
    forgotten = sa.delete(unreadable_jobs).where(unreadable_jobs.c.job_id == among(readable))

    columns = (sa.cast(job.c[name], sa.Text) if name == "meta" else job.c[name] for name in more)
    return (
        sa.select(job.c.id, job.c.outcome, *columns)
        .add_cte(next_message.cte("next_message"), waiting_message.cte("waiting_message"))
        .add_cte(
            bad_attempt.on_conflict_do_nothing().cte("bad_attempt"),
            _dead_letters_of(job, job.c.settled_fingerprint),
        )
        .add_cte(follow_up_messages(job))
        .add_cte(unreadable.on_conflict_do_nothing().cte("unreadable"), forgotten.cte("readable"))
    )


def _next_start_counts() -> sa.ColumnElement[bool | None]:
    """Whether a job is under a rate, so that it must be admitted again before it starts again.

    A job that is also under a strict limit stays where it is: others would overtake it.  CASE
    reads no limit for a job without limits.
    """
    key = pg.unnest(pg.string_to_array(jobs.c.limit_keys, NEWLINE)).column_valued("key")
    names = sa.select(pg.split_part(key, SPACE, ONE, type_=sa.Text))
    counts = sa.and_(pg.bool_or(limits.c.period.is_not(None)), ~pg.bool_or(limits.c.is_strict))
    known = sa.select(counts).where(limits.c.name == among(names))
    return sa.case((jobs.c.limit_keys.is_not(None), known.scalar_subquery()))


def _dead_letters_of(job: sa.CTE, fingerprint: sa.ColumnElement[Any] | None = None) -> sa.CTE:
    """Record the jobs that have ended as failed or cancelled; ``fingerprint``: of their errors."""
    columns = ["job_id", "outcome", "queue", "task", "finished_at"]
    values: list[sa.ColumnElement[Any]] = [
        job.c.id,
        job.c.outcome,
        job.c.queue,
        job.c.task,
        job.c.finished_at,
    ]
    if fingerprint is not None:
        columns.append("fingerprint")
        values.append(sa.case((job.c.outcome == FAILED, fingerprint)))
    rows = sa.select(*values).where(job.c.outcome.in_([FAILED, CANCELLED]))
    letters = pg_insert(dead_letters).from_select(columns, rows).on_conflict_do_nothing()
    return letters.cte("letter")


def _is_too_late(given: Any, lease: sa.CTE) -> sa.ColumnElement[bool]:
    """Whether the next attempt would start too late after the first one; NULL without a limit.

    A requeued job has older first attempts on record, so the latest one counts.  Probed by key,
    and only if there is a limit: CASE evaluates no other branch.
    """
    first = sa.select(pg.max(job_attempts.c.started_at)).where(
        job_attempts.c.job_id == given.c.target_id, job_attempts.c.attempt == FIRST_ATTEMPT
    )
    began = sa.case(
        (lease.c.attempt == FIRST_ATTEMPT, lease.c.started_at),
        else_=sa.func.coalesce(first.scalar_subquery(), lease.c.started_at),
    )
    late = clock() + seconds(given.c.delay) > began + seconds(given.c.give_up_after)
    return sa.case((given.c.give_up_after.is_not(None), late))


Settlement = tuple[Claimed, Outcome]
"""An outcome with its attempt, on its way to the database."""

JobOutcomes = dict[int, str | None]
"""The jobs whose attempts were this worker's to settle, and how each job has ended; None if it goes
on."""


class Attempts(Claims):
    """The attempts of one worker, behind one Session or Connection: claimed, and settled here."""

    transaction: str | None = None
    """The name of the transaction in which attempts were settled last, to ask for its fate."""

    def is_cancelled(self, claimed: Claimed) -> bool | None:
        """Whether the job of an attempt was asked to cancel; None if its lease is lost."""
        rows = fetch(self._executor, fence.is_cancelled(), self._names_of(claimed))
        return bool(rows[0][0]) if rows else None

    def has_expired(self, claimed: Claimed, expires_in: timedelta) -> bool:
        """Whether a job has waited too long to start; ``expires_in``: the task's limit."""
        parameters = {"job_id": claimed.job_id, "expires_in": expires_in.total_seconds()}
        rows = fetch(self._executor, deadlines.has_expired(), parameters)
        return bool(rows and rows[0][0])

    def free_key(self, claimed: Claimed, *, in_own_transaction: bool) -> bool:
        """Give back the unique key of a job that starts; False if it must not start any more.

        ``in_own_transaction``: the statement commits itself, and waits for a second at most.
        """
        statement = fence.free_key_of_attempt(in_own_transaction=in_own_transaction)
        return bool(fetch(self._executor, statement, self._names_of(claimed)))

    def settle(self, settlements: Sequence[Settlement]) -> JobOutcomes:
        """Write outcomes; returns the jobs whose attempts were still this worker's."""
        given = sorted(
            (_row_of(claimed, outcome) for claimed, outcome in settlements),
            key=lambda row: row["target_id"],
        )
        parameters = {"verdicts": json.dumps(given), "worker_id": self._worker_id}
        rows = fetch(self._executor, settle(), parameters)
        return self._settled(rows, expected=len(settlements))

    def settle_succeeded(self, successes: Sequence[Claimed]) -> JobOutcomes | None:
        """Write successes that have no result to store.

        None means that all of them were this worker's and have succeeded.
        """
        [(ours, cancelled, settled)] = fetch(
            self._executor,
            settle_succeeded(),
            {
                **_successes(successes),
                "expected": len(successes),
                "worker_id": self._worker_id,
            },
        )
        if ours == len(successes) and cancelled is None:
            return None
        if ours < len(successes):
            refuse_hidden(self._executor)
        if not ours:
            return {}
        ids = json.loads(settled) if settled else [claimed.job_id for claimed in successes]
        cancelled_ids = set(json.loads(cancelled or "[]"))
        return {job_id: "cancelled" if job_id in cancelled_ids else "succeeded" for job_id in ids}

    def delete_succeeded(self, successes: Sequence[Claimed]) -> list[int]:
        """Delete jobs that have succeeded and are not kept; returns their ids.

        The other jobs stay as they are, to be settled.
        """
        parameters = {**_successes(successes), "worker_id": self._worker_id}
        rows = fetch(self._executor, delete_succeeded(), parameters)
        if rows:
            self.transaction = rows[0][1]
        return [row[0] for row in rows]

    def delete_one_success(self, claimed: Claimed) -> bool:
        """The same in the transaction of its handler; False if the job must be settled instead.

        In a savepoint: a row of the application that refers to the job may refuse it, and a
        deferred foreign key must not fail the COMMIT instead.
        """
        try:
            with self._executor.begin_nested():
                is_deleted = self.delete_succeeded([claimed]) != []
                if is_deleted:
                    self._executor.execute(check_constraints())
                return is_deleted
        except IntegrityError:
            return False

    def free_among(self, claimed: Sequence[Claimed]) -> set[int]:
        """Return the jobs among these whose rows no other transaction has locked."""
        ids = {"target_ids": _array([one.job_id for one in claimed])}
        return {row[0] for row in fetch(self._executor, free_jobs(), ids)}

    def settle_one_success(self, claimed: Claimed) -> JobOutcomes:
        """End one successful attempt in its handler's transaction; empty if it is not ours."""
        rows = fetch(self._executor, settle_one_success(), self._names_of(claimed))
        return self._settled(rows, expected=1)

    def _settled(self, rows: Sequence[Any], *, expected: int) -> JobOutcomes:
        """Raises RowsHidden if an attempt was not found because row security hides it."""
        if len(rows) < expected:
            refuse_hidden(self._executor)
        if rows:
            self.transaction = rows[0][2]
        return {row[0]: row[1] for row in rows}

    def _names_of(self, claimed: Claimed) -> dict[str, Any]:
        """The values by which an attempt's lease is found, if it is still this worker's."""
        return {
            "job_id": claimed.job_id,
            "of_message_id": claimed.message_id,
            "of_attempt": claimed.attempt,
            "worker_id": self._worker_id,
        }


def _successes(successes: Sequence[Claimed]) -> dict[str, str]:
    return {
        "target_ids": _array([claimed.job_id for claimed in successes]),
        "message_ids": _array([claimed.message_id for claimed in successes]),
        "attempts": _array([claimed.attempt for claimed in successes]),
    }


def _array(numbers: list[int]) -> str:
    return f"{{{str(numbers)[1:-1]}}}"


def _row_of(claimed: Claimed, outcome: Outcome) -> dict[str, Any]:  # noqa: C901  # one case each
    """Return one attempt and its outcome, as the row that the settle statement reads."""
    row: dict[str, Any] = {
        "target_id": claimed.job_id,
        "message_id": claimed.message_id,
        "attempt": claimed.attempt,
        "used_up": 1,
        "crashed": 0,
        "snoozed": 0,
    }
    not_used_up = {**row, "used_up": 0}
    match outcome:
        case Succeeded(result):
            return {**row, "job_outcome": "succeeded", "result": result}
        case Retried(delay, error, end, limit, queue, priority):
            times = {"delay": _seconds(delay), "give_up_after": _seconds(limit)}
            position = {"to_queue": queue, "to_priority": priority}
            crashed = int(end is AttemptEnd.CRASHED)
            return {**row, **times, **position, "crashed": crashed, **_error(error, end)}
        case Failed(error, end):
            return {**row, "job_outcome": "failed", **_error(error, end)}
        case Unreadable(error, longest):
            failed = {"job_outcome": "failed", **_error(error, AttemptEnd.FAILED)}
            return {**row, **failed, "max_unreadable": _seconds(longest)}
        case Cancelled(reason):
            cancelled = {"job_outcome": "cancelled", "attempt_end": AttemptEnd.CANCELLED}
            return {**row, **cancelled, "error": reason or None}
        case Interrupted(most):
            interrupted = _error(INTERRUPTION, AttemptEnd.INTERRUPTED)
            return {**not_used_up, "max_interruptions": most, **interrupted}
        case Snoozed(delay):
            return {**not_used_up, "snoozed": 1, "delay": _seconds(delay)}
        case Released():
            return not_used_up
        case Exhausted():
            crash = {"error": CRASH.message, "fingerprint": CRASH.fingerprint}
            return {**not_used_up, "job_outcome": "failed", **crash}
        case Expired(reason):
            return {**not_used_up, "job_outcome": "cancelled", "error": reason}
    assert_never(outcome)


def _seconds(delay: timedelta | None) -> float | None:
    """Limit a delay to the range of a timestamp: one that overflows would fail the whole batch."""
    if delay is None:
        return None
    return min(max(delay, timedelta(0)), LONGEST_DELAY).total_seconds()


def _error(error: ErrorReport, end: AttemptEnd) -> dict[str, Any]:
    return {
        "attempt_end": end,
        "error_type": error.type,
        "error": error.message,
        "traceback": error.traceback,
        "fingerprint": error.fingerprint,
    }
