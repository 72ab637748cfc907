"""The Job objects of a Session: loaded by an enqueue, or given a message by a flush."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Connection, event, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, defer, load_only, make_transient_to_detached, object_session
from sqlalchemy.orm.attributes import instance_state, manager_of_class, set_committed_value
from sqlalchemy.orm.interfaces import ORMOption
from sqlalchemy.orm.util import identity_key

from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.callers import may_notify
from pgqueue.database.collecting import Collecting, collecting_of
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.database.uncommitted import TASK, note_uncommitted
from pgqueue.errors import DuplicateJob
from pgqueue.models import Job, JobStatus
from pgqueue.repository.enqueue import Enqueues, Placed
from pgqueue.repository.jobs import Jobs, duplicate_of, is_of_unique_key
from pgqueue.repository.messages import StartsAt
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import A_WRITE

MADE_BY_HAND = "pgqueue.made_by_hand"
WITHOUT_NOTIFY = "pgqueue.without_notify"
COLLECTED = "pgqueue.collected"
RAISES = "pgqueue.raises"
"""Set in the ``info`` of a Job's state, which is copied by pickle and by nothing else."""
FLUSHING = "pgqueue.flushing"
"""The name in ``session.info`` of the jobs that the running flush inserts, by connection."""


def loaded_job(
    id: int, run_at: datetime, created_at: datetime, *, is_blocked: bool, **values: Any
) -> Job:
    """Return a Job that one of our statements has inserted, as a SELECT would load it."""
    job = new_job({})
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


def found_job(session: Session | Connection, placed: Placed) -> Job | None:
    """Return the job that holds a unique key, found, changed or created by an enqueue.

    Returns None if it has been deleted since: an enqueue does not lock a job that it leaves
    unchanged.  Loads the columns that the role may read; of a job on another node, only its id.
    """
    if not placed.is_here:
        elsewhere = new_job({})
        elsewhere.is_new = False
        set_committed_value(elsewhere, "id", placed.id)
        make_transient_to_detached(elsewhere)
        return elsewhere
    if isinstance(session, Connection):
        with Session(session, join_transaction_mode="rollback_only") as reading:
            job = found_job(reading, placed)
            reading.expunge_all()
            return job
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


@cache
def _new_instance() -> Callable[[], Job]:
    Job()  # configures the mapper
    new_instance: Callable[[], Job] = manager_of_class(Job).new_instance
    return new_instance


def new_job(values: Mapping[str, Any], *, notify: bool = True) -> Job:
    """Return a new Job with these attributes, which the flush that inserts it gives its message.

    The constructor would set each attribute with its history, which takes longer than the arguments
    take to encode.
    """
    job = _new_instance()()
    vars(job).update(values)
    info = instance_state(job).info
    info[TASK] = values.get("task")
    if not notify:
        info[WITHOUT_NOTIFY] = True
    return job


@event.listens_for(Job, "init", propagate=True)
def _mark_as_made_by_hand(job: Job, _args: Any, _values: Any) -> None:
    # The mark is on jobs without a message, not on those with one: merge() copies no mark, and
    # the copies made by merge() and pickle do not call this listener.
    instance_state(job).info[MADE_BY_HAND] = True


def is_new_job(job: object) -> bool:
    """Whether this is a Job as ``task.job(...)`` returns it, in no Session so far."""
    if not isinstance(job, Job):
        return False
    state = instance_state(job)
    return state.key is None and state.session_id is None and gets_message(job)


def is_quiet(job: Job) -> bool:
    """Whether its queue notifies nobody."""
    return WITHOUT_NOTIFY in instance_state(job).info


def raises_if_taken(job: Job) -> bool:
    """Whether an enqueue of this job raises if its unique key is taken."""
    return RAISES in instance_state(job).info


def gets_message(job: Job) -> bool:
    # A job that has ended is a copy of a row, for example from another database.
    return vars(job).get("outcome") is None and MADE_BY_HAND not in instance_state(job).info


def note_conflict(job: Job) -> None:
    """Note that an enqueue of this job raises if its unique key is taken."""
    instance_state(job).info[RAISES] = True


def collect_in(job: Job, collecting: Collecting) -> None:
    """Let a new job belong to a block, whichever block is open when it is flushed."""
    instance_state(job).info[COLLECTED] = collecting


def _collecting_of(session: Session | None, job: Job) -> Collecting | None:
    own: Collecting | None = instance_state(job).info.get(COLLECTED)
    return own or collecting_of(session)


@dataclass(slots=True)
class Flushing:
    """The jobs that a flush inserts by one connection."""

    connection: Connection
    jobs: list[Job] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)
    """When each of them starts, as it was given."""
    is_delayed: bool = False
    now: datetime | None = None

    def add(self, job: Job) -> None:
        """Note a job, and set when it starts.

        SQLAlchemy inserts a row with an expression alone, and rows together that have values for
        the same columns.  So if one of several jobs starts later, all get a value, for which the
        database is asked for the time once.
        """
        starts = vars(job).get("run_at")
        self.jobs.append(job)
        self.starts.append(starts)
        self.is_delayed |= isinstance(starts, StartsAt)
        if not self.is_delayed:
            return
        if len(self.jobs) == 1:
            job.run_at = starts.expression()  # type: ignore[union-attr]  # a StartsAt
        elif self.now is None:
            self.now = Enqueues(self.connection).now()
            for each, given in zip(self.jobs, self.starts, strict=True):
                _set_start(each, given, self.now)
        else:
            _set_start(job, starts, self.now)


def _set_start(job: Job, given: Any, now: datetime) -> None:
    if given is None or isinstance(given, StartsAt):
        job.run_at = now if given is None else given.after(now)


@event.listens_for(Session, "before_flush")
def _forget_failed_flush(session: Session, *_: Any) -> None:
    session.info.pop(FLUSHING, None)


@event.listens_for(Job, "before_insert", propagate=True)
def _prepare_insert(_mapper: Any, connection: Connection, job: Job) -> None:
    if not gets_message(job):
        return  # PgQueue.check reports the job unless it has ended
    session = object_session(job)
    assert session is not None, "only a flush calls this"
    by_connection = session.info.setdefault(FLUSHING, {})
    if connection not in by_connection:
        refuse_autocommit(connection, f"task {job.task}: session.add(task.job(...))")
        commit_in_two_phases(connection)
        by_connection[connection] = Flushing(connection)
    by_connection[connection].add(job)
    job.held_unique_key = None  # set together with the message, also for a copy
    if (collecting := _collecting_of(session, job)) is not None:
        job.meta = {**(job.meta or {}), **collecting.meta}


@event.listens_for(Session, "after_flush")
def _dispatch_inserted(session: Session, _context: Any) -> None:
    for flushing in session.info.pop(FLUSHING, {}).values():
        _dispatch(session, flushing.connection, flushing.jobs)


def _dispatch(session: Session, connection: Connection, jobs: Sequence[Job]) -> None:
    """Give jobs their messages that a flush has inserted, all by one statement."""
    collecting = {job.id: _collecting_of(session, job) for job in jobs}
    after = {id: block.after for id, block in collecting.items() if block and block.after}
    notify = any(job.id not in after and not is_quiet(job) for job in jobs)
    try:
        times = Enqueues(connection).dispatch(
            list(collecting),
            unique=any(job.unique_key is not None for job in jobs),
            notify=notify and may_notify(connection),
            limited=any(job.limit_keys is not None for job in jobs),
            after=after,
        )
    except IntegrityError as error:
        if not is_of_unique_key(error):
            raise
        raise _duplicate_among(jobs, str(error.orig)) from error
    for job in jobs:
        # The end of the flush makes all attributes in its dict count as loaded.
        values = vars(job)
        run_at, created_at = times[job.id]
        new = {**_AS_NEW, "run_at": run_at, "created_at": created_at}
        values.update((name, value) for name, value in new.items() if name not in values)
        values["held_unique_key"] = job.unique_key
        instance_state(job).info.pop(COLLECTED, None)
        if (block := collecting[job.id]) is not None:
            block.job_ids.append(job.id)
        note_uncommitted(session, job.task, job.id)


def _duplicate_among(jobs: Sequence[Job], error: str) -> DuplicateJob:
    """Which of these jobs has a unique key that is taken: PostgreSQL names the key."""
    keyed = {str(job.unique_key): job for job in jobs if job.unique_key is not None}
    for key, job in keyed.items():
        if f"=({job.queue}, {key})" in error or f"=({key})" in error:
            return duplicate_of(repr(job), key)
    return duplicate_of(f"one of {list(keyed.values())}", " or ".join(keyed))


@event.listens_for(Job, "before_delete", propagate=True)
def _delete_belongings(_mapper: Any, connection: Connection, job: Job) -> None:
    commit_in_two_phases(connection)
    Jobs(connection).delete_belongings(job.id)
