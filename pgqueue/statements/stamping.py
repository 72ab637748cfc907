"""Stamp: in transaction mode, commit that an attempt has started before its handler starts.

The message is deleted in a transaction that a crash undoes, so the used attempt must be recorded
elsewhere: in the lease, committed on a separate connection.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Executable,
    Select,
    SmallInteger,
    Text,
    Uuid,
    and_,
    bindparam,
    case,
    cast,
    exists,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.sql.dml import ReturningDelete

from pgqueue.statements.tables import (
    clock,
    crashed,
    delete_unlocked,
    job_attempts,
    jobs,
    leases,
    message_queue,
    pg,
    text_parameter,
)

JOB = bindparam("job_id", type_=BigInteger)
MESSAGE = bindparam("of_message_id", type_=BigInteger)
WORKER = bindparam("by_worker_id", type_=Uuid)
# Not the column's names: in an UPDATE, such a parameter would be added to SET.
SEEN = bindparam("seen_attempt", type_=SmallInteger)
SEEN_MESSAGE = bindparam("seen_message_id", type_=BigInteger)
NEXT = bindparam("next_attempt", type_=SmallInteger)
CRASHES = bindparam("past_crashes", type_=SmallInteger)
LAZILY = pg.set_config("synchronous_commit", "off", true()).label("lazily")
"""A stamp must survive the worker, not the server: its commit need not wait for the disk.  Set for
this transaction only, so that other clients of a pooler are not affected."""


@cache
def stamp_first() -> Executable:
    """Stamp an attempt whose job has no lease.  No row: another was first, or the job has ended.

    Or the message is gone, because the transaction that held it has broken: a late stamp would
    be a lease that no worker settles and no worker rescues.
    """
    unfinished = select(jobs.c.id, MESSAGE, NEXT, CRASHES, WORKER, true()).where(
        jobs.c.id == JOB, jobs.c.outcome.is_(None), exists().where(_is_the_message())
    )
    return (
        insert_or_skip(leases)
        .from_select(
            ["target_id", "message_id", "attempt", "crashes", "worker_id", "held"], unfinished
        )
        .on_conflict_do_nothing()
        .returning(leases.c.attempt, leases.c.crashes, LAZILY)
    )


@cache
def stamp_after_crash() -> Executable:
    """Take over the stamp that was seen: compare its attempt, and set the next.

    No row: another worker was first.  A stamp of the same message was left by a crash, which is
    recorded here too; a stamp of an older message came too late, and nothing was started.
    """
    old = (
        select(leases.c.worker_id, leases.c.started_at).where(leases.c.target_id == JOB).cte("old")
    )
    same = leases.c.message_id == MESSAGE
    taken_over = (
        update(leases)
        .where(
            leases.c.target_id == JOB,
            leases.c.message_id == SEEN_MESSAGE,
            leases.c.attempt == SEEN,
            leases.c.held,
        )
        .values(
            message_id=MESSAGE,
            attempt=case((same, leases.c.attempt + 1), else_=NEXT),
            crashes=case((same, leases.c.crashes + 1), else_=CRASHES),
            worker_id=WORKER,
            started_at=clock(),
        )
        .returning(leases.c.attempt, leases.c.crashes, LAZILY)
        .cte("taken_over")
    )
    attempt: Select[*tuple[Any, ...]] = select(
        JOB.label("job"), MESSAGE.label("message"), SEEN.label("seen"), *old.c
    )
    is_crash = SEEN_MESSAGE == MESSAGE
    past = crashed(attempt.select_from(taken_over.join(old, true())).where(is_crash))
    return select(taken_over.c.attempt, taken_over.c.crashes).add_cte(past)


@cache
def has_crashed_before() -> Executable:
    """Whether a claim has taken over this attempt's message from a crash of transaction mode.

    The crash is recorded under the same message; after any other crash the job has another one.
    """
    before = and_(
        job_attempts.c.job_id == JOB,
        job_attempts.c.message_id == MESSAGE,
        job_attempts.c.attempt < NEXT,
        job_attempts.c.outcome == literal_column("'crashed'"),
    )
    return select(exists().where(before))


@cache
def take_message() -> ReturningDelete[int]:
    """Delete a message that this transaction holds or that is not locked; otherwise no row."""
    return delete_unlocked(message_queue, _is_the_message()).returning(message_queue.c.id)


@cache
def wait_for_message() -> Executable:
    """Lock a message as soon as its holder releases it, before claims that would skip it."""
    return select(message_queue.c.id).where(_is_the_message()).with_for_update()


def _is_the_message() -> ColumnElement[bool]:
    """By its own key, not by its job's columns: another transaction may have changed these."""
    run_at = cast(bindparam("of_run_at", type_=Text), DateTime(timezone=True))
    return and_(
        message_queue.c.queue == text_parameter("of_queue"),
        message_queue.c.priority == bindparam("of_priority", type_=SmallInteger),
        message_queue.c.run_at == run_at,
        message_queue.c.id == MESSAGE,
    )
