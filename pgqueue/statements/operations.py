"""An operator's statements: inspect, cancel, requeue or change one job; pause a queue."""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Executable,
    SmallInteger,
    Text,
    bindparam,
    case,
    cast,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_or_skip

from pgqueue.statements.enqueueing import DISPATCHED, UNDER_LIMITS, message_of, waiting_message_of
from pgqueue.statements.reading import moment, readable
from pgqueue.statements.tables import (
    CANCELLED,
    FAILED,
    PLACE,
    clock,
    dead_letters,
    delete_unlocked,
    deleted_records,
    jobs,
    json_parameter,
    leases,
    message_queue,
    paused_tasks,
    queues,
    stands_at_place_of,
    text_parameter,
    unreadable_jobs,
    waiting_messages,
    waits_at_place_of,
)
from pgqueue.statements.tables import notify as notified

JOB = bindparam("job_id", type_=BigInteger)
NEW = "new_"
"""Begins the names of parameters: in an UPDATE, one with a column's name is added to SET."""


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
    """Delete the messages of a job that no transaction holds.  Never waits for a claim."""
    messages = delete_unlocked(message_queue, stands_at_place_of(JOB))
    return messages.returning(message_queue.c.id)


@cache
def delete_waiting_message() -> Executable:
    """Delete the message of a job that waits to be admitted.

    The job's row is locked, so no admission has this message, and none waits for it.
    """
    messages = delete(waiting_messages).where(waits_at_place_of(JOB))
    return messages.returning(waiting_messages.c.target_id)


@cache
def is_with_a_worker() -> Executable:
    """Whether a job has a message, which another transaction holds, or a lease.

    One query for both: both would miss a claim that commits between two queries.
    """
    leased = exists().where(leases.c.target_id == JOB)
    return select(or_(exists().where(stands_at_place_of(JOB)), leased))


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
    woken = notified("rewind") if notify else true()
    return select(job.c.id, woken).add_cte(message, letter, met.cte("unreadable"))


@cache
def run_now(*, notify: bool) -> Executable:
    """Move the message of a waiting job to now; no row if it is due, or if a transaction holds it.

    The new message keeps what the old one says about past attempts.
    """
    return _changed({"run_at": clock()}, message_queue.c.run_at > clock(), notify=notify)


@cache
def run_waiting_now(*, notify: bool) -> Executable:
    """Let a job that waits to be admitted be admitted from now on; no row if it is due."""
    later = waiting_messages.c.run_at > clock()
    return _changed_in_lane({"run_at": clock()}, later, notify=notify)


@cache
def values_of_job(*, with_args: bool) -> Executable:
    """What an operator may change of a job, and what decides whether.  Locks nothing.

    Not every role may read arguments.
    """
    leased = exists().where(leases.c.target_id == jobs.c.id).label("leased")
    names = ("id", "task", "queue", "outcome", "priority", "run_at", "unique_key", "limit_keys")
    args = jobs.c.args if with_args else null().label("args")
    columns = (*(jobs.c[name] for name in names), leased)
    return select(*map(readable, columns), moment(clock()), args).where(jobs.c.id == JOB)


@cache
def change_job(columns: tuple[str, ...], *, notify: bool) -> Executable:
    """Give a waiting job new values; no row if a transaction holds its message.

    The message is replaced even if it says the same: a claim that has read the old arguments finds
    the old message gone.
    """
    return _changed(_new_values(columns), notify=notify)


@cache
def change_waiting_job(columns: tuple[str, ...], *, notify: bool) -> Executable:
    """The same for a job that waits to be admitted."""
    return _changed_in_lane(_new_values(columns), notify=notify)


@cache
def edit_job(columns: tuple[str, ...]) -> Executable:
    """Give a job without a message, such as a failed one, new values."""
    return update(jobs).where(jobs.c.id == JOB).values(_new_values(columns))


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


@cache
def pause_task() -> Executable:
    row = insert_or_skip(paused_tasks).values(task=text_parameter("task"))
    return row.on_conflict_do_nothing()


@cache
def resume_task() -> Executable:
    return delete(paused_tasks).where(paused_tasks.c.task == text_parameter("paused_task"))


def _is_dead() -> ColumnElement[bool]:
    return jobs.c.outcome.in_([FAILED, CANCELLED])


def _new_values(columns: tuple[str, ...]) -> dict[str, Any]:
    """The new values of these columns of a job."""
    moment = bindparam(f"{NEW}run_at", type_=DateTime(timezone=True))
    unique_key = bindparam(f"{NEW}unique_key", type_=Text)
    is_held = jobs.c.held_unique_key.is_not(None)
    known: dict[str, Any] = {
        "priority": bindparam(f"{NEW}priority", type_=SmallInteger),
        # Never in the past: claims find a message behind their cursors late.
        "run_at": func.greatest(moment, clock()),
        "args": json_parameter(f"{NEW}args"),
        "unique_key": unique_key,
        "held_unique_key": case((is_held, cast(unique_key, Text))),
    }
    also = ("held_unique_key",) if "unique_key" in columns else ()
    return {name: known[name] for name in (*columns, *also)}


def _changed(values: dict[str, Any], *conditions: ColumnElement[bool], notify: bool) -> Executable:
    """Give a waiting job new values, and replace its message by one at the new place."""
    message = delete_unlocked(message_queue, stands_at_place_of(JOB), *conditions)
    kept = ("attempt", "crashes", "alone")
    taken = message.returning(*(message_queue.c[name] for name in kept)).cte("taken")
    job = (
        update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None), exists(select(taken.c.attempt)))
        .values(values)
        .returning(*DISPATCHED)
        .cte("job")
    )
    columns = (job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task)
    row = select(*columns, *(taken.c[name] for name in kept)).select_from(job.join(taken, true()))
    names = [*PLACE, "target_id", "task", *kept]
    new = insert(message_queue).from_select(names, row.limit(literal_column("1")))
    woken = notified("rewind") if notify else true()
    return select(job.c.id, woken).add_cte(new.cte("message"))


def _changed_in_lane(
    values: dict[str, Any], *conditions: ColumnElement[bool], notify: bool
) -> Executable:
    """The same for a job that waits to be admitted, whose message has a key and no id."""
    place = {name: values[name] for name in ("priority", "run_at") if name in values}
    message = (
        update(waiting_messages)
        .where(waits_at_place_of(JOB), *conditions)
        .values(place or {"run_at": waiting_messages.c.run_at})
        .returning(waiting_messages.c.target_id, *(waiting_messages.c[name] for name in place))
        .cte("message")
    )
    job = (
        update(jobs)
        .where(jobs.c.id == message.c.target_id)
        .values({**values, **{name: message.c[name] for name in place}})
        .returning(jobs.c.id)
        .cte("job")
    )
    return select(job.c.id, notified("rewind") if notify else true())
