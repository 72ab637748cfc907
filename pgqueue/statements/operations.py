"""An operator's statements: inspect, cancel, requeue or run one job now; pause a queue."""

from functools import cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Executable,
    Text,
    any_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_or_skip

from pgqueue.statements.enqueueing import (
    DISPATCHED,
    UNDER_LIMITS,
    message_of,
    waiting_message_of,
)
from pgqueue.statements.tables import (
    CANCELLED,
    CTID,
    FAILED,
    clock,
    dead_letters,
    deleted_records,
    jobs,
    leases,
    message_queue,
    queues,
    stands_at_place_of,
    text_parameter,
    unreadable_jobs,
    waiting_messages,
    waits_at_place_of,
)
from pgqueue.statements.tables import notify as tell

JOB = bindparam("job_id", type_=BigInteger)
HELD_HERE = literal_column("xmax = pg_catalog.pg_current_xact_id()::xid", Boolean)
"""A message that this transaction has locked: xmax is the last transaction to lock or delete a row.
https://www.postgresql.org/docs/current/ddl-system-columns.html"""


@cache
def lock_job() -> Executable:
    """Read the state of a job and lock its row, so that no worker settles it meanwhile.

    NO KEY UPDATE, so that rows which refer to the job can still be written.
    """
    leased = exists().where(leases.c.target_id == jobs.c.id)
    columns = (jobs.c.task, jobs.c.queue, jobs.c.outcome, jobs.c.unique_key, jobs.c.limit_keys)
    return (
        select(*columns, leased.label("leased"))
        .where(jobs.c.id == JOB)
        .with_for_update(key_share=True)
    )


@cache
def delete_messages() -> Executable:
    """Delete the messages of a job that no transaction holds.  Never waits for a handler.

    A handler's transaction holds its own job's message, which SKIP LOCKED would not skip.
    """
    message = (
        select(CTID)
        .select_from(message_queue)
        .where(stands_at_place_of(JOB), not_(HELD_HERE))
        .with_for_update(skip_locked=True)
    )
    return (
        delete(message_queue)
        .where(any_(func.array(message.scalar_subquery())) == CTID)
        .returning(message_queue.c.id)
    )


@cache
def delete_waiting_message() -> Executable:
    """Delete the message of a job that waits to be admitted.

    The job's row is locked, so no admission has this message, and none waits for it.
    """
    return (
        delete(waiting_messages)
        .where(waits_at_place_of(JOB))
        .returning(waiting_messages.c.target_id)
    )


@cache
def is_held_here() -> Executable:
    """Whether this transaction itself holds the job's message, to run it."""
    return select(exists().where(stands_at_place_of(JOB), HELD_HERE))


@cache
def is_with_a_worker() -> Executable:
    """Whether a job has a message, which another transaction holds, or a lease.

    One query for both: both would miss a claim that commits between two queries.
    """
    leased = exists().where(leases.c.target_id == JOB)
    return select(or_(exists().where(stands_at_place_of(JOB)), leased))


@cache
def delete_left_lease() -> Executable:
    """Delete the lease that a crash left beside a message, once we have the message.

    Does not wait for the lease while it holds the job's row: all others lock leases before jobs.
    A transaction that has the lease deletes the job, stamps an attempt that the ended job
    refuses, or settles one; each deletes the lease too.
    """
    lease = (
        select(CTID)
        .select_from(leases)
        .where(leases.c.target_id == JOB, leases.c.held)
        .with_for_update(skip_locked=True)
    )
    return delete(leases).where(any_(func.array(lease.scalar_subquery())) == CTID)


@cache
def delete_lease() -> Executable:
    """Fence off the worker of a job that is about to be deleted; waits for a concurrent settle."""
    return delete(leases).where(leases.c.target_id == JOB)


@cache
def delete_records() -> Executable:
    """Delete the records of a job, once nothing more can be written about it."""
    gone = select(JOB.label("id")).cte("gone")
    return select(gone.c.id).add_cte(*deleted_records(gone))


@cache
def delete_lease_of_ended_job() -> Executable:
    """Fence off a worker that still runs an ended job: its late settle finds no lease."""
    ended = exists(jobs.c.id).where(jobs.c.id == JOB, _is_dead())
    return delete(leases).where(leases.c.target_id == JOB, ended)


@cache
def request_cancel() -> Executable:
    """Flag a running job.  Its worker reads the flag, and each settle of the job obeys it."""
    return (
        update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None))
        .values(cancel_requested_at=func.coalesce(jobs.c.cancel_requested_at, clock()))
    )


@cache
def cancel_job() -> Executable:
    """End a job as cancelled that is not running."""
    job = (
        update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None))
        .values(outcome=CANCELLED, finished_at=clock(), held_unique_key=null())
        .returning(jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
        .cte("job")
    )
    letter = insert_or_skip(dead_letters).from_select(
        ["job_id", "outcome", "queue", "task", "finished_at"], select(job)
    )
    return select(job.c.id).add_cte(letter.on_conflict_do_nothing().cte("letter"))


@cache
def requeue_job(*, notify: bool, limited: bool = False) -> Executable:
    """Put a failed or cancelled job back as if new, with its unique key and under its limits."""
    job = (
        update(jobs)
        .where(jobs.c.id == JOB, _is_dead())
        .values(
            outcome=null(),
            attempts=0,
            snoozes=0,
            interruptions=0,
            run_at=clock(),
            result=null(),
            progress=null(),
            started_at=null(),
            finished_at=null(),
            cancel_requested_at=null(),
            held_unique_key=jobs.c.unique_key,
        )
        .returning(*(UNDER_LIMITS if limited else DISPATCHED))
        .cte("job")
    )
    message = (waiting_message_of if limited else message_of)(job).cte("message")
    letter = delete(dead_letters).where(dead_letters.c.job_id.in_(select(job.c.id))).cte("letter")
    met = delete(unreadable_jobs).where(unreadable_jobs.c.job_id.in_(select(job.c.id)))
    woken = tell("rewind") if notify else true()
    return select(job.c.id, woken).add_cte(message, letter, met.cte("unreadable"))


@cache
def run_now(*, notify: bool) -> Executable:
    """Move the message of a waiting job to now; no row if it is due, or if a transaction holds it.

    The new message keeps what the old one says about past attempts.
    """
    later = (
        select(CTID)
        .select_from(message_queue)
        .where(stands_at_place_of(JOB), message_queue.c.run_at > clock(), not_(HELD_HERE))
        .with_for_update(skip_locked=True)
    )
    kept = ("attempt", "crashes", "alone")
    taken = (
        delete(message_queue)
        .where(any_(func.array(later.scalar_subquery())) == CTID)
        .returning(*(message_queue.c[name] for name in kept))
        .cte("taken")
    )
    job = (
        update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None), exists(select(taken.c.attempt)))
        .values(run_at=clock())
        .returning(*DISPATCHED)
        .cte("job")
    )
    place = (job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task)
    row = select(*place, *(taken.c[name] for name in kept)).select_from(job.join(taken, true()))
    columns = ["queue", "priority", "run_at", "target_id", "task", *kept]
    message = insert(message_queue).from_select(columns, row.limit(literal_column("1")))
    woken = tell("rewind") if notify else true()
    return select(job.c.id, woken).add_cte(message.cte("message"))


@cache
def run_waiting_now(*, notify: bool) -> Executable:
    """Let a job that waits to be admitted be admitted from now on; no row if it is due."""
    later = waiting_messages.c.run_at > clock()
    message = (
        update(waiting_messages)
        .where(waits_at_place_of(JOB), later)
        .values(run_at=clock())
        .returning(waiting_messages.c.target_id, waiting_messages.c.run_at)
        .cte("message")
    )
    job = (
        update(jobs)
        .where(jobs.c.id == message.c.target_id)
        .values(run_at=message.c.run_at)
        .returning(jobs.c.id)
        .cte("job")
    )
    return select(job.c.id, tell("rewind") if notify else true())


@cache
def is_cancel_requested() -> Executable:
    return select(jobs.c.cancel_requested_at.is_not(None)).where(jobs.c.id == JOB)


@cache
def pause_queue() -> Executable:
    row = insert_or_skip(queues).values(name=bindparam("name", type_=Text), paused_at=clock())
    kept = func.coalesce(queues.c.paused_at, row.excluded.paused_at)
    return row.on_conflict_do_update(index_elements=[queues.c.name], set_={"paused_at": kept})


@cache
def resume_queue() -> Executable:
    name = text_parameter("queue_name")
    return update(queues).where(queues.c.name == name).values(paused_at=null())


def _is_dead() -> ColumnElement[bool]:
    return jobs.c.outcome.in_([FAILED, CANCELLED])
