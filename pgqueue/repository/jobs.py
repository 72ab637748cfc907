"""Jobs that exist: cancel, requeue, copy, change or delete one."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError

from pgqueue.errors import DuplicateJob, OptionError
from pgqueue.meta import OF_BATCH, OF_WORKFLOW, RUNS_WHEN
from pgqueue.models import DEAD
from pgqueue.repository.admit import Admissions
from pgqueue.repository.batches import is_awaited
from pgqueue.repository.blocked import unblock_job, workflow_of
from pgqueue.repository.enqueue import Enqueues, Placed
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import (
    DISPATCHED,
    NEW,
    columns_for,
    dispatch_of,
    is_placed,
)
from pgqueue.repository.nodes import job_not_found
from pgqueue.repository.reading import moment, readable
from pgqueue.repository.restart import KEPT, SOURCE
from pgqueue.repository.tables import (
    AS_IF_NEW,
    CANCELLED,
    LETTER,
    POSITION,
    Executor,
    array_of,
    array_parameter,
    clock,
    dead_letter_of,
    dead_letters,
    delete_unlocked,
    deleted_records,
    dependencies,
    jobs,
    json_parameter,
    leases,
    message_queue,
    pg,
    sees_all,
    stands_at_place_of,
    text_parameter,
    unreadable_jobs,
    waiting_messages,
    waits_at_place_of,
    wake_up_call,
)
from pgqueue.repository.tables import notify as notified
from pgqueue.repository.transactions import CHECK_CONSTRAINTS
from pgqueue.repository.workers import NOTHING_PAUSED
from pgqueue.repository.workflows import (
    Workflows,
    free_jobs,
    has_predecessors,
    is_dead,
    is_followed,
)
from pgqueue.rules.unique import is_across_queues, when_free

R = TypeVar("R")

JOB = sa.bindparam("job_id", type_=sa.BigInteger)
OF_ITS_PLACE = sa.literal_column(
    f"ARRAY['{OF_BATCH}', '{OF_WORKFLOW}', '{RUNS_WHEN}']::text[]", sa.ARRAY(sa.Text)
)
"""What the meta of a job notes of its batch or workflow, to which a copy does not belong."""


@cache
def lock_job() -> sa.Executable:
    """Read the state of a job and lock its row, so that no worker settles it meanwhile.

    NO KEY UPDATE, so that rows which refer to the job can still be written.
    """
    leased = sa.exists().where(leases.c.target_id == jobs.c.id)
    columns = (jobs.c.task, jobs.c.queue, jobs.c.outcome, jobs.c.unique_key, jobs.c.limit_keys)
    return (
        sa.select(*columns, leased.label("leased"))
        .where(jobs.c.id == JOB)
        .with_for_update(key_share=True)
    )


@cache
def delete_messages() -> sa.Executable:
    """Delete the messages of a job that no transaction holds.  Never waits for a claim."""
    messages = delete_unlocked(message_queue, stands_at_place_of(JOB))
    return messages.returning(message_queue.c.id)


@cache
def delete_waiting_message() -> sa.Executable:
    """Delete the message of a job that waits to be admitted.

    The job's row is locked, so no admission has this message, and none waits for it.
    """
    messages = sa.delete(waiting_messages).where(waits_at_place_of(JOB))
    return messages.returning(waiting_messages.c.target_id)


@cache
def is_with_a_worker() -> sa.Executable:
    """Whether a job has a message, which another transaction holds, or a lease.

    One query for both: both would miss a claim that commits between two queries.
    """
    return sa.select(is_placed(JOB))


@cache
def lock_lease() -> sa.Executable:
    """Lock the lease of a job that is to be deleted; waits for a concurrent settle."""
    return sa.select(leases.c.target_id).where(leases.c.target_id == JOB).with_for_update()


@cache
def delete_lease() -> sa.Executable:
    """Fence off the worker that still runs an ended job, which is about to be deleted."""
    return sa.delete(leases).where(leases.c.target_id == JOB)


@cache
def delete_records() -> sa.Executable:
    """Delete the records of a job, once nothing more can be written about it."""
    gone = sa.select(JOB.label("id")).cte("gone")
    return sa.select(gone.c.id).add_cte(*deleted_records(gone))


@cache
def is_awaited_job() -> sa.Executable:
    return sa.select(is_awaited()).where(jobs.c.id == JOB)


@cache
def delete_job() -> sa.Executable:
    return sa.delete(jobs).where(jobs.c.id == JOB)


@cache
def copy_job(*, notify: bool, limited: bool) -> sa.Executable:
    """Enqueue a copy of a job that has ended; returns its id.  Its meta names the old job."""
    noted = pg.jsonb_build_object(SOURCE, jobs.c.id, type_=JSONB)
    empty = sa.literal_column("'{}'::jsonb", JSONB)
    meta = sa.func.coalesce(jobs.c.meta, empty).op("-", return_type=JSONB())(OF_ITS_PLACE)
    values: dict[str, Any] = {
        **{name: jobs.c[name] for name in KEPT},
        "held_unique_key": jobs.c.unique_key,
        "run_at": _not_in_the_past(),
        "meta": meta.op("||")(noted),
    }
    rows = sa.select(*values.values()).where(jobs.c.id == JOB, jobs.c.outcome.is_not(None))
    new = sa.insert(jobs).from_select([*values], rows)
    job = new.returning(*columns_for(limited=limited)).cte("job")
    woken = wake_up_call() if notify else sa.true()
    return sa.select(job.c.id, woken).add_cte(*dispatch_of(job, limited=limited))


@cache
def delete_lease_of_ended_job() -> sa.Executable:
    """Fence off a worker that still runs an ended job: its late settle finds no lease."""
    ended = sa.exists(jobs.c.id).where(jobs.c.id == JOB, is_dead())
    gone = sa.delete(leases).where(leases.c.target_id == JOB, ended)
    return gone.returning(leases.c.target_id)


@cache
def request_cancel(*, kill: bool) -> sa.Executable:
    """Flag a running job.  Its worker reads the flag, and each settle of the job obeys it.

    Its unique key is free from then on: an enqueue makes a new job, and does not hand back one that
    can only end cancelled.
    """
    return (
        sa.update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None))
        .values(
            cancel_requested_at=sa.func.coalesce(jobs.c.cancel_requested_at, clock()),
            held_unique_key=sa.null(),
            **_kill_request(kill=kill),
        )
    )


@cache
def cancel_job(*, kill: bool) -> sa.Executable:
    """End a job as cancelled that is not running.

    A worker that claims it at this moment reads that it has ended, and with ``kill`` kills it.
    """
    job = (
        sa.update(jobs)
        .where(jobs.c.id == JOB, jobs.c.outcome.is_(None))
        .values(
            outcome=CANCELLED,
            finished_at=clock(),
            held_unique_key=sa.null(),
            **_kill_request(kill=kill),
        )
        .returning(*LETTER)
        .cte("job")
    )
    return sa.select(job.c.id).add_cte(dead_letter_of(job))


@cache
def requeue_jobs(*, notify: bool, limited: bool = False) -> sa.Executable:
    """Put failed or cancelled jobs back as if new, with their unique keys and under their limits,
    each for its time or for now; returns their ids.

    The caller must have locked their rows: another requeue would give them messages too.  A job
    that has a message or a lease stays as it is, and so does one that has waited for others.  One
    query looks for both: two could miss a claim that commits between them.
    """
    free = free_jobs()
    job = (
        sa.update(jobs)
        .where(jobs.c.id == free.c.id, is_dead())
        .where(~has_predecessors(), sees_all(dependencies))
        .values(
            **AS_IF_NEW,
            run_at=sa.func.greatest(free.c.run_at, clock()),  # ignores NULL
        )
        .returning(
            *columns_for(limited=limited),
            workflow_of().label("workflow"),
            is_followed().label("followed"),
        )
        .cte("job")
    )
    letter = (
        sa.delete(dead_letters).where(dead_letters.c.job_id.in_(sa.select(job.c.id))).cte("letter")
    )
    met = sa.delete(unreadable_jobs).where(unreadable_jobs.c.job_id.in_(sa.select(job.c.id)))
    woken = notified("rewind") if notify else sa.true()
    message = dispatch_of(job, limited=limited)
    return sa.select(job.c.id, job.c.workflow, job.c.followed, woken).add_cte(
        *message, letter, met.cte("unreadable")
    )


@cache
def run_now(*, notify: bool) -> sa.Executable:
    """Move the message of a waiting job to now; no row if it is due, or if a transaction holds it.

    The new message keeps what the old one says about past attempts.
    """
    return _changed({"run_at": clock()}, message_queue.c.run_at > clock(), notify=notify)


@cache
def run_waiting_now(*, notify: bool) -> sa.Executable:
    """Let a job that waits to be admitted be admitted from now on; no row if it is due."""
    later = waiting_messages.c.run_at > clock()
    return _changed_in_lane({"run_at": clock()}, later, notify=notify)


@cache
def values_of_job(*, with_args: bool) -> sa.Executable:
    """What an operator may change of a job, and what decides whether.  Locks nothing.

    Not every role may read arguments.
    """
    leased = sa.exists().where(leases.c.target_id == jobs.c.id).label("leased")
    names = (
        *("id", "task", "queue", "outcome", "priority", "run_at", "unique_key", "limit_keys"),
        *("max_attempts", "attempts", "tags", "meta"),
    )
    args = jobs.c.args if with_args else sa.null().label("args")
    columns = (*(jobs.c[name] for name in names), leased)
    return sa.select(*map(readable, columns), moment(clock()), args).where(jobs.c.id == JOB)


@cache
def change_job(columns: tuple[str, ...], *, notify: bool) -> sa.Executable:
    """Give a waiting job new values; no row if a transaction holds its message.

    The message is replaced even if it says the same: a claim that has read the old arguments finds
    the old message gone.
    """
    return _changed(new_values(columns), notify=notify)


@cache
def change_waiting_job(columns: tuple[str, ...], *, notify: bool) -> sa.Executable:
    """The same for a job that waits to be admitted."""
    return _changed_in_lane(new_values(columns), notify=notify)


@cache
def edit_job(columns: tuple[str, ...]) -> sa.Executable:
    """Give a job without a message, such as a failed one, new values."""
    return sa.update(jobs).where(jobs.c.id == JOB).values(new_values(columns))


@cache
def jobs_with_keys(*, in_one_queue: bool) -> sa.Executable:
    """The unfinished jobs that hold these unique keys.

    Without a queue, reads the index of the keys that are held, but no jobs beside these.
    """
    of_queue = [jobs.c.queue == text_parameter("queue")] if in_one_queue else []
    return sa.select(jobs.c.id).where(
        jobs.c.held_unique_key == sa.any_(array_parameter("keys", sa.Text)),
        jobs.c.held_unique_key.is_not(None),
        jobs.c.outcome.is_(None),
        *of_queue,
    )


def _kill_request(*, kill: bool) -> dict[str, Any]:
    return {"kill_requested_at": clock()} if kill else {}


def _not_in_the_past() -> sa.ColumnElement[datetime]:
    """The new time of a job: claims would find a message behind their cursors late."""
    return sa.func.greatest(sa.bindparam(f"{NEW}run_at", type_=sa.DateTime(timezone=True)), clock())


def new_values(columns: tuple[str, ...]) -> dict[str, Any]:
    """The new values of these columns of a job."""
    unique_key = sa.bindparam(f"{NEW}unique_key", type_=sa.Text)
    is_held = jobs.c.held_unique_key.is_not(None)
    known: dict[str, Any] = {
        "priority": sa.bindparam(f"{NEW}priority", type_=sa.SmallInteger),
        "run_at": _not_in_the_past(),
        "queue": sa.bindparam(f"{NEW}queue", type_=sa.Text),
        "max_attempts": sa.bindparam(f"{NEW}max_attempts", type_=sa.SmallInteger),
        "tags": json_parameter(f"{NEW}tags"),
        "meta": json_parameter(f"{NEW}meta"),
        "args": json_parameter(f"{NEW}args"),
        "unique_key": unique_key,
        "held_unique_key": sa.case((is_held, sa.cast(unique_key, sa.Text))),
    }
    also = ("held_unique_key",) if "unique_key" in columns else ()
    return {name: known[name] for name in (*columns, *also)}


def _changed(
    values: dict[str, Any], *conditions: sa.ColumnElement[bool], notify: bool
) -> sa.Executable:
    """Give a waiting job new values, and replace its message by one at the new position."""
    message = delete_unlocked(message_queue, stands_at_place_of(JOB), *conditions)
    return replaced(message, values, notify=notify)


def _changed_in_lane(
    values: dict[str, Any], *conditions: sa.ColumnElement[bool], notify: bool
) -> sa.Executable:
    """The same for a job that waits to be admitted, whose message has a key and no id."""
    message = sa.update(waiting_messages).where(waits_at_place_of(JOB), *conditions)
    return moved_in_lane(message, values, notify=notify)


def replaced(messages: sa.Delete, values: dict[str, Any], *, notify: bool) -> sa.Executable:
    """Give the jobs of deleted messages new values, and new messages at their new positions,
    which keep what the old ones say about past attempts; returns the jobs."""
    kept = [message_queue.c[name] for name in ("attempt", "crashes")]
    taken = messages.returning(message_queue.c.target_id, *kept).cte("taken")
    most = [pg.max(taken.c[column.name]).label(column.name) for column in kept]
    one = (  # for a job that had two
        sa.select(taken.c.target_id, *most).group_by(taken.c.target_id).subquery("one")
    )
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id, jobs.c.outcome.is_(None))
        .values(values)
        .returning(*DISPATCHED)
        .cte("job")
    )
    columns = (job.c.queue, job.c.priority, job.c.run_at, job.c.id, job.c.task)
    alone = sa.or_(one.c.crashes > 0, job.c.max_attempts == 1)
    rows = sa.select(*columns, *list(one.c)[1:], alone).select_from(
        job.join(one, one.c.target_id == job.c.id)
    )
    names = [*POSITION, "target_id", "task", *(column.name for column in kept), "alone"]
    new = sa.insert(message_queue).from_select(names, rows)
    woken = notified("rewind") if notify else sa.true()
    return sa.select(job.c.id, woken).add_cte(new.cte("message"))


def moved_in_lane(messages: sa.Update, values: dict[str, Any], *, notify: bool) -> sa.Executable:
    """Give the jobs of waiting messages new values, and the messages their new positions; returns
    the jobs."""
    position = {name: values[name] for name in POSITION if name in values}
    message = (
        messages.values(position or {"run_at": waiting_messages.c.run_at})
        .returning(waiting_messages.c.target_id, *(waiting_messages.c[name] for name in position))
        .cte("message")
    )
    job = (
        sa.update(jobs)
        .where(jobs.c.id == message.c.target_id)
        .values({**values, **{name: message.c[name] for name in position}})
        .returning(jobs.c.id)
        .cte("job")
    )
    return sa.select(job.c.id, notified("rewind") if notify else sa.true())


class Change(StrEnum):
    """The result of an operator's call.  ``UNCHANGED`` is false, the others are true."""

    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel requested"
    """The job is running; it ends as cancelled when its handler ends."""
    REQUEUED = "requeued"
    DUE_NOW = "due now"
    CHANGED = "changed"
    COPIED = "copied"
    DELETED = "deleted"
    UNCHANGED = "unchanged"

    def __bool__(self) -> bool:
        return self is not Change.UNCHANGED


class LockedJob(NamedTuple):
    """The state of a job whose row is locked."""

    task: str
    queue: str
    outcome: str | None
    unique_key: str | None
    limit_keys: str | None
    leased: bool


class JobValues(NamedTuple):
    """What an operator may change of a job, and what decides whether."""

    id: int
    task: str
    queue: str
    outcome: str | None
    priority: int
    run_at: datetime
    unique_key: str | None
    limit_keys: str | None
    max_attempts: int
    attempts: int
    tags: Any
    meta: Any
    is_leased: bool
    now: datetime
    """The time of the database."""
    args: Any
    """None if they were not asked for."""

    @property
    def is_waiting(self) -> bool:
        return self.outcome is None and not self.is_leased


NewValues = Mapping[str, Any]
"""New values by the names of columns; ``args`` as JSON text."""

Edit = Callable[[JobValues], NewValues]
"""Decides which values a job gets; empty: it keeps all."""


class Jobs:
    """The jobs behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def lock(self, job_id: int) -> None:
        """Lock the row of a job until the transaction ends.  Raises JobNotFound."""
        self._locked(job_id)

    def cancel(self, job_id: int, *, check_kill: Callable[[str], object] | None = None) -> Change:
        """End a waiting job as cancelled, or ask the worker of a running job to cancel it.

        ``check_kill``: also ask it to kill the handler; called with the task of a running job, to
        raise if its handler cannot be killed.  Locks the job's row first, and its message only if
        no transaction holds it.
        """
        kill = check_kill is not None
        job = self._locked(job_id)
        if job.outcome is not None:
            return Change.UNCHANGED
        waits = self._run(delete_messages(), job_id).all() != []
        if not waits and job.limit_keys is not None:
            waits = self._run(delete_waiting_message(), job_id).all() != []
        if not waits and job.leased:
            if check_kill is not None:
                check_kill(job.task)
            self._run(request_cancel(kill=kill), job_id)
            return Change.CANCEL_REQUESTED
        if not waits:
            self._run(unblock_job(), job_id)
        self._run(cancel_job(kill=kill), job_id)
        return Change.CANCELLED

    def requeue(
        self,
        job_id: int,
        *,
        notify: bool,
        edit: Edit | None = None,
        run_at: datetime | None = None,
    ) -> Change:
        """Put a failed or cancelled job back as if new; its old attempts stay on record.

        ``edit`` decides which values it gets before.  ``run_at``: when it is due; without it, now.
        """
        # Leases before jobs, as everywhere: a late settle of this job locks them in that order.
        self._fetch(delete_lease_of_ended_job(), job_id)
        job = self._locked(job_id)
        if job.outcome not in DEAD:
            return Change.UNCHANGED
        self._fetch(delete_messages(), job_id)
        self._fetch(unblock_job(), job_id)
        [(is_claimed,)] = self._fetch(is_with_a_worker(), job_id)
        if is_claimed:
            # Claimed since before the cancel.  If the claim is rolled back, or settled after all,
            # the job would get two messages and twice its attempts.
            return Change.UNCHANGED
        new = {} if edit is None else edit(self.values(job_id))

        def requeue() -> Change:
            if new:
                self._run_with(edit_job(tuple(sorted(new))), job_id, new)
            limited = job.limit_keys is not None
            done = self.put_back({job_id: run_at}, notify=notify, limited=limited)
            return Change.REQUEUED if done else Change.UNCHANGED

        return self._taking_key(requeue, job_id, job.queue, new.get("unique_key", job.unique_key))

    def run_now(self, job_id: int, *, notify: bool) -> Change:
        """Make a waiting job due now; any other job stays as it is."""
        job = self._locked(job_id)
        if job.outcome is not None:
            return Change.UNCHANGED
        moved = self._run(run_now(notify=notify), job_id).first()
        if moved is None and job.limit_keys is not None:
            moved = self._run(run_waiting_now(notify=notify), job_id).first()
        return Change.UNCHANGED if moved is None else Change.DUE_NOW

    def with_keys(self, keys: Sequence[str], queue: str | None) -> list[int]:
        """The unfinished jobs that hold these unique keys, in a queue or in all."""
        parameters = {"keys": array_of(keys)} | ({} if queue is None else {"queue": queue})
        statement = jobs_with_keys(in_one_queue=queue is not None)
        return [row[0] for row in self._executor.execute(statement, parameters)]

    def values(self, job_id: int, *, with_args: bool = True) -> JobValues:
        """What an operator may change of a job; raises JobNotFound.  Locks nothing."""
        row = self._run(values_of_job(with_args=with_args), job_id).one_or_none()
        if row is None:
            raise job_not_found(self._executor, job_id)
        return JobValues(*row)

    def change(self, job_id: int, edit: Edit, *, with_args: bool, notify: bool) -> Change:
        """Give a waiting job the values that ``edit`` decides; any other job stays as it is."""
        self._locked(job_id)
        job = self.values(job_id, with_args=with_args)
        new = edit(job) if job.is_waiting else {}
        if not new:
            return Change.UNCHANGED
        if not {"unique_key", "queue"} & {*new}:
            return self._write(job, new, notify=notify)
        write = partial(self._write, job, new, notify=notify)
        queue, key = new.get("queue", job.queue), new.get("unique_key", job.unique_key)
        return self._taking_key(write, job_id, queue, key)

    def _write(self, job: JobValues, new: NewValues, *, notify: bool) -> Change:
        names = tuple(sorted(new))
        statement = change_job(names, notify=notify)
        found = self._run_with(statement, job.id, new).first()
        if found is None and job.limit_keys is not None:
            statement = change_waiting_job(names, notify=notify)
            found = self._run_with(statement, job.id, new).first()
        elif job.limit_keys is not None and "run_at" in new:
            # A job that is to start later gives up its places, as one that waits for them has none.
            Admissions(self._executor).send_back([job.id], paused=NOTHING_PAUSED)
        return Change.UNCHANGED if found is None else Change.CHANGED

    def copy(self, job_id: int, *, notify: bool, run_at: datetime | None = None) -> int | None:
        """Enqueue a copy of a job that has ended, for a time or for now; returns its id.

        None if the job has not ended.  Raises JobNotFound and DuplicateJob.
        """
        job = self._locked(job_id)
        if job.outcome is None:
            return None
        statement = copy_job(notify=notify, limited=job.limit_keys is not None)

        def copy() -> int:
            copied: int = self._run_with(statement, job_id, {"run_at": run_at}).scalar_one()
            return copied

        return self._taking_key(copy, job_id, job.queue, job.unique_key)

    def delete(self, job_id: int) -> Change:
        """Delete a job that does not run, and what is on record about it.

        Checks the deferred constraints of the transaction.  Raises JobNotFound, and OptionError for
        a job that cannot be deleted.
        """
        where = f"job {job_id} cannot be deleted:"
        [(is_awaited,)] = self._fetch(is_awaited_job(), job_id) or [(None,)]
        if is_awaited is None:
            raise job_not_found(self._executor, job_id)
        if is_awaited:
            raise OptionError(
                f"{where} a batch, a workflow or another job waits for its end; cancel it, and "
                "delete it when these have ended"
            )
        try:
            with self._executor.begin_nested():
                self.delete_belongings(job_id)
                self._run(delete_job(), job_id)
                self._executor.execute(sa.text(CHECK_CONSTRAINTS))
        except IntegrityError as error:
            raise OptionError(
                f"{where} a row of the application refers to it, and its foreign key has no ON "
                "DELETE; delete the row first"
            ) from error
        return Change.DELETED

    def delete_belongings(self, job_id: int) -> None:
        """Delete the other rows of a job, right before the job itself is deleted.

        Locks lease and job first, in the order of the settle, so that rows which a concurrent
        settle or requeue still writes for the job are there to be deleted.  Raises OptionError for
        a job that runs: its handler would go on, and all of its writes would be lost at its end.
        """
        has_lease = self._run(lock_lease(), job_id).first() is not None
        job = self._run(lock_job(), job_id).first()
        is_unfinished = job is not None and job.outcome is None
        if job is not None and is_unfinished and job.leased:
            raise _with_a_worker(job_id, job.task)
        if has_lease:  # not one that a claim has made since: its settle may wait for the job
            self._run(delete_lease(), job_id)
        self._run(delete_messages(), job_id)
        if job is not None and job.limit_keys is not None:
            self._run(delete_waiting_message(), job_id)
        self._run(unblock_job(), job_id)
        # A claim that is not committed holds the message of the job, or one has just made a lease.
        if job is not None and is_unfinished and self._run(is_with_a_worker(), job_id).scalar():
            raise _with_a_worker(job_id, job.task)
        self._run(delete_records(), job_id)

    def put_back(
        self, times: Mapping[int, datetime | None], *, notify: bool, limited: bool
    ) -> set[int]:
        """Put failed or cancelled jobs back, whose rows the caller has locked; returns them.

        A job that has waited for others waits for them again.  So does what has waited for these
        jobs.
        """
        wanted, workflows = document_of(times), Workflows(self._executor)
        statement = requeue_jobs(notify=notify, limited=limited)
        found = fetch(self._executor, statement, {"wanted": wanted})
        done = {job_id for job_id, *_ in found}
        followed = {job_id: workflow for job_id, workflow, has_more, _ in found if has_more}
        if done != times.keys():
            blocked_again = workflows.block_again(wanted)
            done |= blocked_again.keys()
            followed |= blocked_again
        if followed:
            workflows.restore(followed)
        return done

    def _run(self, statement: Any, job_id: int) -> Any:
        return self._executor.execute(statement, {"job_id": job_id})

    def _run_with(self, statement: Any, job_id: int, new: NewValues) -> Any:
        named = {f"{NEW}{name}": value for name, value in new.items()}
        return self._executor.execute(statement, {"job_id": job_id, **named})

    def _fetch(self, statement: Any, job_id: int) -> Sequence[Any]:
        return fetch(self._executor, statement, {"job_id": job_id})

    def _taking_key(self, action: Callable[[], R], job_id: int, queue: str, key: str | None) -> R:
        """Run what takes a unique key; raises DuplicateJob if another job has it."""
        if key is None:
            return action()

        def in_savepoint() -> R:
            # A taken key must leave the caller's transaction as it was.
            with self._executor.begin_nested():
                return action()

        def holder() -> Placed | None:
            return Enqueues(self._executor).holders(queue, [key]).get(key)

        done: R = raising_duplicate(in_savepoint, job_id, key, holder)
        return done

    def _locked(self, job_id: int) -> LockedJob:
        for row in self._fetch(lock_job(), job_id):
            return LockedJob(*row)
        raise job_not_found(self._executor, job_id)


def _with_a_worker(job_id: int, task: str) -> OptionError:
    return OptionError(
        f"job {job_id} of task {task} cannot be deleted: it runs, or a worker is about to start "
        "it; cancel it, and delete it when it has ended"
    )


def document_of(times: Mapping[int, datetime | None]) -> str:
    return json.dumps(
        [{"id": job_id, "run_at": at and at.isoformat()} for job_id, at in times.items()]
    )


def raising_duplicate(
    action: Callable[[], Any],
    job_id: int,
    unique_key: str | None,
    holder: Callable[[], Placed | None],
) -> Any:
    """Run a statement that may take a unique key; if another job has it, raise DuplicateJob."""
    try:
        return action()
    except IntegrityError as error:
        if not is_of_unique_key(error):
            raise
        raise duplicate_of(f"job {job_id}", unique_key, holder()) from error


def is_of_unique_key(error: IntegrityError) -> bool:
    """Whether a statement has failed because another job holds a unique key."""
    return "jobs_held_unique_key" in str(error.orig)


def duplicate_of(name: str, unique_key: str | None, holder: Placed | None = None) -> DuplicateJob:
    """What to raise for a job whose unique key another job holds."""
    other = f"job {holder.id}" if holder else "another job"
    of_queue = "" if is_across_queues(unique_key) else " of its queue"
    duplicate = DuplicateJob(
        f"{name}: {other}{of_queue} holds the unique key {unique_key!r}; wait until "
        f"{when_free(unique_key)}, or use enqueue(), which returns it"
    )
    duplicate.holder = holder and holder.id
    return duplicate
