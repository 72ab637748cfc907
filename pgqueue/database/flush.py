"""The Job objects of a Session: loaded by an enqueue, or given a message by a flush."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, event, inspect, select
from sqlalchemy.orm import Session, defer, load_only, make_transient_to_detached, object_session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.interfaces import ORMOption
from sqlalchemy.orm.util import identity_key

from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.callers import may_notify
from pgqueue.database.collecting import collecting_of, note_for_batch
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.models import Job, JobStatus
from pgqueue.repository.enqueue import Enqueues, Placed
from pgqueue.repository.jobs import Jobs, raising_duplicate
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import A_WRITE

MADE_BY_HAND = "pgqueue.made_by_hand"
WITHOUT_NOTIFY = "pgqueue.without_notify"
"""Set in the ``info`` of a Job's state, which is copied by pickle and by nothing else."""


def loaded_job(
    id: int, run_at: datetime, created_at: datetime, *, is_blocked: bool, **values: Any
) -> Job:
    """Return a Job that one of our statements has inserted, as a SELECT would load it."""
    job = dispatch_at_flush(Job())  # a copy of the job may be added
    derived = {
        "held_unique_key": values["unique_key"],
        "status": JobStatus.BLOCKED if is_blocked else JobStatus.PENDING,
    }
    job.is_new = True
    vars(job).update({**_AS_NEW, **values, **derived}, id=id, run_at=run_at, created_at=created_at)
    # The attributes in its dict now count as loaded and unchanged.
    make_transient_to_detached(job)
    return job


_AS_NEW: dict[str, Any] = {
    **dict.fromkeys(("outcome", "result", "last_error", "tags", "meta", "progress")),
    **dict.fromkeys(("started_at", "finished_at", "cancel_requested_at", "kill_requested_at")),
    "attempts": 0,
    "snoozes": 0,
    "interruptions": 0,
}


def found_job(session: Session, placed: Placed) -> Job | None:
    """Return the job that holds a unique key, found, changed or created by an enqueue.

    Returns None if it has been deleted since: an enqueue does not lock a job that it leaves
    unchanged.  Loads the columns that the role may read; of a job on another node, only its id.
    """
    if not placed.is_here:
        elsewhere = dispatch_at_flush(Job())
        elsewhere.is_new = False
        set_committed_value(elsewhere, "id", placed.id)
        make_transient_to_detached(elsewhere)
        return elsewhere
    with session.no_autoflush:
        if placed.is_readable:
            job = _load(session, placed.id, populate_existing=not placed.is_held)
        else:
            job = _load(session, placed.id, load_only(*READ_BY_ENQUEUERS), times=["run_at"])
    if job is not None:
        job.is_new = placed.is_new  # this Session may have created it before
    return job


READ_BY_ENQUEUERS = (Job.id, Job.queue, Job.task, Job.priority, Job.max_attempts)
TIMES = (
    *("run_at", "created_at", "started_at", "finished_at"),
    *("cancel_requested_at", "kill_requested_at"),
)


def _load(
    session: Session,
    id: int,
    *options: ORMOption,
    times: Sequence[str] = TIMES,
    populate_existing: bool = False,
) -> Job | None:
    """Load a job, and its times in the form that depends on no setting of the session.

    By a Session of our own on the connection of the enqueue, whose rows a replica does not have:
    the application's may send reads to one.
    """
    query = (
        select(Job, *(moment(getattr(Job, name)) for name in times))
        .where(Job.id == id)
        .options(*options, *(defer(getattr(Job, name)) for name in TIMES))
    )
    connection = session.connection(bind_arguments=A_WRITE)
    with Session(connection, join_transaction_mode="rollback_only") as reading:
        row = reading.execute(query).one_or_none()
        if row is None:
            return None
        job: Job = row[0]
        _set_loaded(job, dict(zip(times, row[1:], strict=True)))
    known = session.identity_map.get(identity_key(Job, id))
    if known is None:
        Session.add(session, job, _warn=False)  # no flush needs it
        return job
    loaded = {name: value for name, value in vars(job).items() if name in inspect(Job).attrs}
    _set_loaded(known, loaded, overwrite=populate_existing)
    return known


def _set_loaded(job: Job, values: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Set attributes as a SELECT would: those that are not loaded, or all."""
    state = inspect(job, raiseerr=True)
    for name in values if overwrite else values.keys() & state.unloaded:
        set_committed_value(job, name, values[name])


def dispatch_at_flush(job: Job, *, notify: bool = True) -> Job:
    """Make the flush that inserts this new job insert its message too."""
    info = inspect(job, raiseerr=True).info
    del info[MADE_BY_HAND]
    if not notify:
        info[WITHOUT_NOTIFY] = True
    return job


@event.listens_for(Job, "init", propagate=True)
def _mark_as_made_by_hand(job: Job, _args: Any, _values: Any) -> None:
    # The mark is on jobs without a message, not on those with one: merge() copies no mark, and
    # the copies made by merge() and pickle do not call this listener.
    inspect(job, raiseerr=True).info[MADE_BY_HAND] = True


def _gets_message(job: Job) -> bool:
    # A job that has ended is a copy of a row, for example from another database.
    return job.outcome is None and MADE_BY_HAND not in inspect(job, raiseerr=True).info


@event.listens_for(Job, "before_insert", propagate=True)
def _prepare_insert(_mapper: Any, connection: Connection, job: Job) -> None:
    if _gets_message(job):
        refuse_autocommit(connection, f"task {job.task}: session.add(task.job(...))")
        commit_in_two_phases(connection)
        job.held_unique_key = None  # set together with the message, also for a copy
        if (collecting := collecting_of(object_session(job))) is not None:
            job.meta = {**(job.meta or {}), **collecting.meta}


@event.listens_for(Job, "after_insert", propagate=True)
def _dispatch(_mapper: Any, connection: Connection, job: Job) -> None:
    if not _gets_message(job):
        return  # PgQueue.check reports the job unless it has ended
    is_quiet = WITHOUT_NOTIFY in inspect(job, raiseerr=True).info
    notify = not is_quiet and may_notify(connection)
    unique_key = job.unique_key
    collecting = collecting_of(object_session(job))
    after = () if collecting is None else collecting.after

    def dispatch() -> tuple[datetime, datetime]:
        return Enqueues(connection).dispatch(
            job.id,
            unique=unique_key is not None,
            notify=notify and not after,
            limited=job.limit_keys is not None,
            after=after,
        )

    run_at, created_at = raising_duplicate(dispatch, job, unique_key)
    _set_loaded(job, {**_AS_NEW, "run_at": run_at, "created_at": created_at})
    set_committed_value(job, "held_unique_key", unique_key)
    note_for_batch(object_session(job), [job.id])


@event.listens_for(Job, "before_delete", propagate=True)
def _delete_belongings(_mapper: Any, connection: Connection, job: Job) -> None:
    commit_in_two_phases(connection)
    Jobs(connection).delete_belongings(job.id)
