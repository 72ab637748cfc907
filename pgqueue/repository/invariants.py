"""Check: the invariants of all rows, as queries that return the rows that break them.

One statement, so that all rules are checked in one snapshot.  A message or a lease of a job that
has *ended* breaks no rule: a cancel never waits for the holder of either; the next claim deletes
the message, a rescuer the lease.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa

from pgqueue.repository.blocked import has_ended
from pgqueue.repository.tables import (
    CANCELLED,
    FAILED,
    NEWLINE,
    SUCCEEDED,
    Executor,
    batch_jobs,
    batches,
    blocked,
    clock,
    count_rows,
    dead_letters,
    has_key_of_period,
    has_key_until_succeeded,
    jobs,
    leases,
    limit_places,
    message_queue,
    pg,
    waiting_messages,
    workers,
)


@cache
def invariant_violations() -> sa.Executable:
    """Every row that breaks a rule: the rule, the job, and the values found."""
    return sa.union_all(
        *_of_unfinished_jobs(),
        *_of_messages(),
        *_of_leases(),
        *_of_ended_jobs(),
        *_of_waiting_jobs(),
        *_of_batches(),
        *_of_blocked_nodes(),
    ).order_by(sa.literal_column("2"), sa.literal_column("1"))


def _of_unfinished_jobs() -> list[sa.Select[*tuple[Any, ...]]]:
    # EXCEPT takes one pass over each table, whatever the statistics.  NOT IN would search all
    # messages for each job, once they do not fit into work_mem.
    runnable = sa.union_all(
        sa.select(message_queue.c.target_id),
        sa.select(leases.c.target_id),
        sa.select(waiting_messages.c.target_id),
        sa.select(blocked.c.node_id),
    )
    lost = sa.select(jobs.c.id).where(jobs.c.outcome.is_(None)).except_(runnable).subquery("lost")
    overrun = jobs.c.attempts > jobs.c.max_attempts
    return [
        _broken(
            "an unfinished job has a message or a lease",
            lost.c.id,
            sa.literal("it has neither, so no worker will ever run it"),
            lost,
            sa.literal_column("true"),
        ),
        _broken(
            "attempts never exceed max_attempts",
            jobs.c.id,
            pg.concat(jobs.c.attempts, " of ", jobs.c.max_attempts),
            jobs,
            overrun,
        ),
    ]


def _of_messages() -> list[sa.Select[*tuple[Any, ...]]]:
    target = message_queue.c.target_id
    twins = (
        sa.select(target.label("job_id"), count_rows().label("count"))
        .select_from(_unfinished())
        .group_by(target)
        .having(count_rows() > 1)
        .subquery("twins")
    )
    count = pg.concat(twins.c.count, " messages")
    orphan = pg.concat("message ", message_queue.c.id, " points at no job")
    without_job = ~sa.exists(jobs.c.id).where(jobs.c.id == target)
    always: sa.ColumnElement[bool] = sa.literal_column("true")
    copied = ("queue", "priority", "run_at", "task")
    differs = sa.or_(*(message_queue.c[name] != jobs.c[name] for name in copied))
    number = pg.concat("message ", message_queue.c.id)
    return [
        _broken("a message has a job", target, orphan, message_queue, without_job),
        _broken("a job has at most one message", twins.c.job_id, count, twins, always),
        _broken("a message stands where its job says", target, number, _unfinished(), differs),
        _broken(
            "a message beside a lease is the one the lease holds",
            target,
            number,
            _unfinished(),
            sa.exists().where(leases.c.target_id == target),
        ),
    ]


def _unfinished() -> sa.FromClause:
    """Messages with their jobs, if these are unfinished."""
    mine = jobs.c.id == message_queue.c.target_id
    return message_queue.join(jobs, sa.and_(mine, jobs.c.outcome.is_(None)))


def _of_leases() -> list[sa.Select[*tuple[Any, ...]]]:
    without_job = ~sa.exists(jobs.c.id).where(jobs.c.id == leases.c.target_id)
    minute_ago = clock() - sa.literal_column("interval '1 minute'")
    owner_lives = sa.exists().where(
        workers.c.id == leases.c.worker_id,
        sa.or_(workers.c.dead_at.is_(None), workers.c.dead_at > minute_ago),
    )
    owner = pg.concat("worker ", sa.cast(leases.c.worker_id, sa.Text))
    return [
        _broken("a lease has a job", leases.c.target_id, owner, leases, without_job),
        _broken(
            "a lease has an owner that lives, or is rescued within a minute",
            leases.c.target_id,
            owner,
            leases,
            sa.and_(~owner_lives, leases.c.started_at < minute_ago),
        ),
    ]


def _of_ended_jobs() -> list[sa.Select[*tuple[Any, ...]]]:
    died = jobs.c.outcome.in_([FAILED, CANCELLED])
    letter = sa.and_(dead_letters.c.job_id == jobs.c.id, dead_letters.c.outcome == jobs.c.outcome)
    unread = sa.and_(died, ~sa.exists().where(letter))
    misplaced = ~sa.exists(jobs.c.id).where(letter)
    kept = sa.or_(
        sa.and_(jobs.c.outcome == SUCCEEDED, has_key_of_period()),
        sa.and_(jobs.c.outcome == FAILED, has_key_until_succeeded()),
    )
    still_held = sa.and_(jobs.c.outcome.is_not(None), jobs.c.held_unique_key.is_not(None), ~kept)
    never_run = sa.and_(jobs.c.outcome == SUCCEEDED, jobs.c.attempts < 1)
    outcome = pg.concat("outcome ", jobs.c.outcome)
    return [
        _broken("a failed or cancelled job has a dead letter", jobs.c.id, outcome, jobs, unread),
        _broken(
            "a dead letter says what its job says",
            dead_letters.c.job_id,
            pg.concat("dead letter: ", dead_letters.c.outcome),
            dead_letters,
            misplaced,
        ),
        _broken("an ended job holds no unique key", jobs.c.id, outcome, jobs, still_held),
        _broken("a succeeded job was attempted", jobs.c.id, outcome, jobs, never_run),
    ]


def _of_waiting_jobs() -> list[sa.Select[*tuple[Any, ...]]]:
    target, keys = waiting_messages.c.target_id, waiting_messages.c.limit_keys
    copied = ("limit_keys", "queue", "priority", "run_at", "task")
    differs = sa.or_(
        jobs.c.limit_keys.is_(None), *(waiting_messages.c[name] != jobs.c[name] for name in copied)
    )
    mine = sa.and_(jobs.c.id == target, jobs.c.outcome.is_(None))
    without_job = ~sa.exists(jobs.c.id).where(mine)
    with_job = waiting_messages.join(jobs, mine)
    admitted = sa.union_all(
        sa.select(message_queue.c.target_id), sa.select(leases.c.target_id)
    ).subquery("admitted")
    detail = pg.concat("waits for ", pg.replace(keys, NEWLINE, ", "))
    always: sa.ColumnElement[bool] = sa.literal_column("true")

    each_key = pg.unnest(pg.string_to_array(jobs.c.limit_keys, NEWLINE))
    each = each_key.table_valued(sa.column("key", sa.Text)).render_derived(name="each_key")
    place = ("limit_keys", "queue", "priority", "run_at")
    waits = sa.exists().where(
        *(waiting_messages.c[name] == jobs.c[name] for name in place), target == jobs.c.id
    )
    placed = sa.exists().where(
        limit_places.c.limit_key == each.c.key, limit_places.c.job_id == jobs.c.id
    )
    return [
        _broken(
            "a waiting message has an unfinished job", target, detail, waiting_messages, without_job
        ),
        _broken("a waiting message stands where its job says", target, detail, with_job, differs),
        _broken(
            "a waiting job has neither message nor lease",
            target,
            detail,
            waiting_messages.join(admitted, admitted.c.target_id == target),
            always,
        ),
        _broken(
            "an admitted job has a place in each of its limits",
            jobs.c.id,
            pg.concat("no place in ", each.c.key),
            jobs.join(each, always),
            sa.and_(
                jobs.c.outcome.is_(None),
                jobs.c.limit_keys.is_not(None),
                *(~waits, ~placed, ~sa.exists().where(blocked.c.node_id == jobs.c.id)),
            ),
        ),
    ]


def _of_batches() -> list[sa.Select[*tuple[Any, ...]]]:
    """Rules about batches, in one pass over their jobs.  The view does not have them."""
    part, batch = batch_jobs.c, batches.c
    size = (
        sa.select(part.batch_id, count_rows().label("count"), pg.max(part.job_id).label("last"))
        .group_by(part.batch_id)
        .subquery("size")
    )
    known = size.outerjoin(batches, batch.id == size.c.batch_id)
    is_blocked = sa.exists().where(blocked.c.node_id == -batch.id)
    named = pg.concat("batch ", batch.id)
    return [
        _broken(
            "a job of a batch has its batch",
            size.c.last,
            pg.concat("batch ", size.c.batch_id),
            known,
            batch.id.is_(None),
        ),
        _broken(
            "no job is added to a batch after its end",
            size.c.last,
            pg.concat(named, ": ", size.c.count, " jobs, and ", batch.total, " at its end"),
            known,
            size.c.count > batch.total,
        ),
        _broken(
            "a batch is blocked until it ends",
            size.c.last,
            named,
            known,
            batch.ended_at.is_(None) != is_blocked,
        ),
    ]


def _of_blocked_nodes() -> list[sa.Select[*tuple[Any, ...]]]:
    """Rules about the rows of ``blocked``.  The view does not have them.

    A cancel does not wait for a look, and leaves its row to the next one.
    """
    node, watched = blocked.c.node_id, blocked.c.waits_for
    place = sa.union_all(
        sa.select(message_queue.c.target_id),
        sa.select(leases.c.target_id),
        sa.select(waiting_messages.c.target_id),
    ).subquery("place")
    detail = pg.concat("node ", node, " waits for ", watched)
    minute_ago = clock() - sa.literal_column("interval '1 minute'")
    ended_at = sa.func.coalesce(
        sa.select(jobs.c.finished_at).where(jobs.c.id == watched).scalar_subquery(),
        sa.select(batches.c.ended_at).where(batches.c.id == -watched).scalar_subquery(),
        sa.select(jobs.c.created_at).where(jobs.c.id == node).scalar_subquery(),
        sa.select(batches.c.created_at).where(batches.c.id == -node).scalar_subquery(),
        sa.literal_column("timestamptz '-infinity'"),
    )
    return [
        _broken(
            "a blocked job has neither message nor lease",
            node,
            detail,
            blocked.join(place, place.c.target_id == node),
            sa.literal_column("true"),
        ),
        _broken(
            "a blocked node watches something unfinished, or is looked at within a minute",
            node,
            detail,
            blocked,
            sa.and_(has_ended(watched), ended_at < minute_ago),
        ),
    ]


def _broken(
    rule: str,
    job_id: sa.ColumnElement[Any],
    detail: sa.ColumnElement[Any],
    source: sa.FromClause,
    condition: sa.ColumnElement[bool],
) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(
            sa.literal(rule, sa.Text).label("rule"),
            sa.cast(job_id, sa.BigInteger).label("job_id"),
            sa.cast(detail, sa.Text).label("detail"),
        )
        .select_from(source)
        .where(condition)
    )


@dataclass(frozen=True, slots=True)
class Violation:
    """A row that breaks an invariant."""

    rule: str
    job_id: int | None
    detail: str

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.rule}; {self.detail}"


class Invariants:
    """The rows behind one Session or Connection, checked against the rules."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def violations(self) -> list[Violation]:
        return [Violation(*row) for row in self._executor.execute(invariant_violations())]
