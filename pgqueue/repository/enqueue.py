"""Enqueue: a job and its message in one statement of the caller's transaction."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.errors import DuplicateJob
from pgqueue.models import SCHEMA
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import (
    Start,
    columns_for,
    dispatch_of,
    labels,
    start_time,
)
from pgqueue.repository.nodes import CITUS_SCHEMA, KEY_TYPES
from pgqueue.repository.reading import Moment, moment
from pgqueue.repository.tables import (
    Executor,
    array_of,
    document,
    is_key_across_queues,
    jobs,
    json_parameter,
    pg,
    text_parameter,
    wake_up_call,
)
from pgqueue.rules.unique import KEY_OF_PERIOD, Unique, is_across_queues

_TRIES_FOR_A_KEY = 20
"""How often an enqueue is tried while its key is taken by jobs that end before they are read."""

Found = TypeVar("Found")


@cache
def enqueue_job(
    *,
    start: Start,
    unique: bool,
    notify: bool,
    labelled: bool = False,
    limited: bool = False,
    across: bool = False,
    after: bool = False,
) -> sa.Executable:
    """Insert one job and its message; returns the values that the database chose.

    ``labelled`` writes meta and tags too.  ``limited``: the message waits to be admitted.
    ``across``: the unique key is one of all queues.  ``after``: the job waits for other jobs, and
    has no message so far.

    Returns no row if another job holds the unique key.  DO NOTHING, because DO UPDATE of
    the holder costs twelve times as much under contention.
    """
    values: dict[str, Any] = {
        "queue": sa.bindparam("queue", type_=sa.Text),
        "task": sa.bindparam("task", type_=sa.Text),
        "args": json_parameter("args"),
        "priority": sa.bindparam("priority", type_=sa.SmallInteger),
        "max_attempts": sa.bindparam("max_attempts", type_=sa.SmallInteger),
        "run_at": start_time(start),
        **(labels() if labelled else {}),
        **({"limit_keys": sa.bindparam("limit_keys", type_=sa.Text)} if limited else {}),
    }
    if unique:
        values["unique_key"] = sa.bindparam("unique_key", type_=sa.Text)
        values["held_unique_key"] = sa.bindparam("unique_key", type_=sa.Text)
    skip = IfKeyTaken.SKIP_ACROSS if across else IfKeyTaken.SKIP
    if_taken = skip if unique else IfKeyTaken.NEVER
    job = _inserted(pg_insert(jobs).values(values), if_taken, limited=limited)
    woken = wake_up_call() if notify else sa.true()
    times = (moment(job.c.run_at), moment(job.c.created_at))
    written = dispatch_of(job, limited=limited, after=after)
    return sa.select(job.c.id, *times, woken).select_from(job).add_cte(*written)


@cache
def enqueue_jobs(
    *, start: Start, notify: bool, labelled: bool = False, after: bool = False
) -> sa.Executable:
    """Insert a chunk of jobs of one task from one JSON array of arguments; returns their ids."""
    payloads = (
        pg.jsonb_array_elements(json_parameter("documents"))
        .table_valued(sa.column("args", JSONB))
        .render_derived(name="payload")
    )
    own = {"args": payloads.c.args, **(labels() if labelled else {})}
    return _enqueue_from(payloads, own, start, IfKeyTaken.NEVER, notify=notify, after=after)


@cache
def enqueue_keyed_jobs(
    *,
    start: Start,
    notify: bool,
    labelled: bool = False,
    limited: bool = False,
    across: bool = False,
    after: bool = False,
) -> sa.Executable:
    """Insert a chunk of jobs, each with a unique key, limit keys or both; returns the new jobs and
    the holders of taken unique keys.

    The holders are read in the statement's snapshot, so that a holder which ends while the
    statement runs, perhaps waiting for other enqueuers, is still found.
    """
    skip = IfKeyTaken.SKIP_ACROSS if across else IfKeyTaken.SKIP
    new = _enqueue_with_keys(
        start, skip, notify=notify, labelled=labelled, limited=limited, after=after
    )
    wanted = document("documents", sa.column("unique_key", sa.Text))
    holder = sa.select(jobs.c.id, jobs.c.held_unique_key, sa.false(), sa.null())
    return sa.union_all(new, _only_holders(holder, sa.select(wanted.c.unique_key), across=across))


@cache
def enqueue_or_lock_jobs(*, start: Start, notify: bool, labelled: bool = False) -> sa.Executable:
    """Insert a chunk of jobs with unique keys; lock the holders of taken keys until the transaction
    ends, and return only the new jobs.

    DO UPDATE locks a row also if its WHERE is false, and writes nothing then.  Rows are inserted or
    locked one by one in the order of the document, so that two callers who use the same keys in
    one order do not deadlock.
    https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT
    """
    return _enqueue_with_keys(start, IfKeyTaken.LOCK, notify=notify, labelled=labelled)


@cache
def period_of_start(start: Start) -> sa.Executable:
    """When the period begins in which a job is due that is enqueued now, in seconds since 1970."""
    period = sa.cast(sa.bindparam("period", type_=sa.Float), sa.Float)
    since = sa.cast(sa.extract("epoch", start_time(start)), sa.Float)
    return sa.select(sa.cast(pg.floor(since / period) * period, sa.BigInteger))


@cache
def holders_of_unique_keys(*, across: bool) -> sa.Executable:
    """The jobs of a queue, or of all, that hold these keys, and whether the role may read them."""
    all_of_jobs = sa.literal_column(f"""'"{SCHEMA}".jobs', 'SELECT'""", sa.Text)
    may_read = pg.has_table_privilege(all_of_jobs)
    keys = pg.jsonb_array_elements_text(json_parameter("keys"))
    holder = sa.select(jobs.c.id, jobs.c.held_unique_key, may_read)
    return _only_holders(holder, sa.select(keys.column_valued("key")), across=across)


@cache
def dispatch_flushed_job(
    *, unique: bool, notify: bool, limited: bool = False, after: bool = False
) -> sa.Executable:
    """Insert the message of a job that a flush has just inserted, and take its unique key.

    Returns the times that the database chose.
    """
    this_job = jobs.c.id == sa.bindparam("job_id", type_=sa.BigInteger)
    columns = columns_for(limited=limited)
    if unique:
        update = sa.update(jobs).where(this_job).values(held_unique_key=jobs.c.unique_key)
        job = update.returning(*columns, jobs.c.created_at).cte("job")
    else:
        job = sa.select(*columns, jobs.c.created_at).where(this_job).cte("job")
    woken = wake_up_call() if notify else sa.true()
    times = (moment(job.c.run_at), moment(job.c.created_at))
    written = dispatch_of(job, limited=limited, after=after)
    return sa.select(*times, woken).select_from(job).add_cte(*written)


class IfKeyTaken(StrEnum):
    """What an insert does with a row whose unique key is taken."""

    NEVER = "never"
    SKIP = "skip"
    SKIP_ACROSS = "skip across queues"
    """As SKIP, where two indexes may refuse the row: if one of them were the arbiter, a conflict in
    the other would raise."""
    LOCK = "lock"
    """Never with keys across queues: ``Unique`` refuses these with replace and postpone."""


def _only_holders(holder: sa.Select[Any], keys: sa.Select[Any], *, across: bool) -> sa.Select[Any]:
    return holder.where(
        is_key_across_queues() if across else jobs.c.queue == text_parameter("queue"),
        jobs.c.held_unique_key.in_(keys),
        jobs.c.held_unique_key.is_not(None),
    )


def _enqueue_with_keys(
    start: Start,
    if_taken: IfKeyTaken,
    *,
    notify: bool,
    labelled: bool,
    limited: bool = False,
    after: bool = False,
) -> sa.Select[Any]:
    more = [sa.column("limit_keys", sa.Text)] if limited else []
    payloads = document(
        "documents", sa.column("args", JSONB), sa.column("unique_key", sa.Text), *more
    )
    key = payloads.c.unique_key
    own = {"args": payloads.c.args, "unique_key": key, "held_unique_key": key}
    own |= {"limit_keys": payloads.c.limit_keys} if limited else {}
    own |= labels() if labelled else {}
    return _enqueue_from(
        payloads, own, start, if_taken, notify=notify, limited=limited, after=after
    )


def _enqueue_from(
    payloads: Any,
    own: dict[str, Any],
    start: Start,
    if_taken: IfKeyTaken,
    *,
    notify: bool,
    limited: bool = False,
    after: bool = False,
) -> sa.Select[Any]:
    shared = {
        "queue": sa.bindparam("queue", type_=sa.Text),
        "task": sa.bindparam("task", type_=sa.Text),
        "priority": sa.bindparam("priority", type_=sa.SmallInteger),
        "max_attempts": sa.bindparam("max_attempts", type_=sa.SmallInteger),
        "run_at": start_time(start),
    }
    values = {**shared, **own}
    rows = sa.select(*values.values()).select_from(payloads)
    job = _inserted(pg_insert(jobs).from_select(list(values), rows), if_taken, limited=limited)
    woken = wake_up_call() if notify else sa.true()
    # Nobody reads this column: it calls the function, once for all jobs, as its sub-select is
    # uncorrelated.
    woken_count = sa.select(woken).scalar_subquery()
    columns = (job.c.id, job.c.held_unique_key, sa.true(), woken_count)
    return sa.select(*columns).add_cte(*dispatch_of(job, limited=limited, after=after))


def _inserted(job: Any, if_taken: IfKeyTaken, *, limited: bool = False) -> sa.CTE:
    index: dict[str, Any] = {
        "index_elements": [jobs.c.queue, jobs.c.held_unique_key],
        "index_where": jobs.c.held_unique_key.is_not(None),
    }
    match if_taken:
        case IfKeyTaken.SKIP:
            job = job.on_conflict_do_nothing(**index)
        case IfKeyTaken.SKIP_ACROSS:
            job = job.on_conflict_do_nothing()
        case IfKeyTaken.LOCK:
            same = {"held_unique_key": jobs.c.held_unique_key}
            job = job.on_conflict_do_update(**index, set_=same, where=sa.false())
    columns = columns_for(limited=limited)
    cte: sa.CTE = job.returning(*columns, jobs.c.held_unique_key, jobs.c.created_at).cte("job")
    return cte


# Nothing but a call is delegated: no CTE, no condition.
_DELEGATED = {
    key_type: sa.text(
        f'SELECT * FROM "{CITUS_SCHEMA}".enqueue_{name}(CAST(:key AS {name}), CAST(:job AS jsonb))'  # noqa: S608  # the schema name is checked where it is read
    ).columns(id=sa.BigInteger(), run_at=Moment(), created_at=Moment(), is_new=sa.Boolean())
    for key_type, name in KEY_TYPES.items()
}
_WAKE_UP = sa.select(wake_up_call())

NodeKey = int | str | UUID


@dataclass(frozen=True, slots=True)
class NewJob:
    """The values that all jobs of one enqueue have in common."""

    task: str
    queue: str
    priority: int
    max_attempts: int
    notify: bool
    delay: timedelta | None = None
    run_at: datetime | None = None
    meta: str | None = None
    tags: Sequence[str] = ()
    unique: Unique | None = None
    node: NodeKey | None = None
    """On Citus, the key whose node is to have the job."""
    after: tuple[int, ...] = ()
    """The nodes that end before the job starts: see :mod:`pgqueue.repository.blocked`."""

    @property
    def changes_holder(self) -> bool:
        """Whether the enqueue may change the job that holds the unique key, and enqueue none."""
        return self.unique is not None and self.unique.changes_holder

    @property
    def is_labelled(self) -> bool:
        return self.meta is not None or bool(self.tags)

    @property
    def labels(self) -> dict[str, Any]:
        """The meta and the tags as attributes of a Job; empty if the job has neither."""
        if not self.is_labelled:
            return {}
        meta = None if self.meta is None else json.loads(self.meta)
        return {"meta": meta, "tags": list(self.tags) or None}

    @property
    def start(self) -> Start:
        if self.run_at is not None:
            return Start.AT
        return Start.NOW if self.delay is None else Start.AFTER

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "task": self.task,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
        }
        if self.run_at is not None:
            parameters["run_at"] = self.run_at
        elif self.delay is not None:
            parameters["delay"] = self.delay
        if self.is_labelled:
            parameters["meta"] = self.meta
            parameters["tags"] = json.dumps(self.tags) if self.tags else None
        return parameters | waits_of(self.after)


@dataclass(frozen=True, slots=True)
class NewJobRow:
    """What one job of an enqueue has of its own, in its stored form."""

    args: Any
    unique_key: str | None
    limit_keys: str | None = None

    def values(self) -> dict[str, Any]:
        """The columns of the job."""
        keys = {"unique_key": self.unique_key, "limit_keys": self.limit_keys}
        return {"args": self.args, **keys}


class PlacedAs(StrEnum):
    """What the job of a row of an enqueue is."""

    NEW = "new"
    CHANGED = "changed"
    """The job that holds the unique key, replaced or postponed."""
    AT_LATEST = "at latest"
    """The job that holds the unique key, which cannot be postponed further: see ``at_most``."""
    HELD = "held"
    """The job that holds the unique key, as it was."""


class Placed(NamedTuple):
    """The job that a row of an enqueue has created, found or changed."""

    id: int
    how: PlacedAs = PlacedAs.HELD
    is_readable: bool = True
    """Whether the role may read the whole job, or only the columns needed to enqueue."""
    is_here: bool = True
    """False for a job on another node, where this session reads nothing."""
    times: tuple[datetime, datetime] | None = None
    """``run_at`` and ``created_at`` of a new job, where the statement returns them."""

    @property
    def is_new(self) -> bool:
        return self.how is PlacedAs.NEW

    @property
    def is_held(self) -> bool:
        """Whether the key is taken, and the enqueue has done nothing of what it asks for."""
        return self.how is PlacedAs.HELD


class Enqueues:
    """Runs enqueues in the transaction of one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def with_period(self, new: NewJob, keys: Sequence[str | None]) -> list[str | None]:
        """Add the period in which a job is due to unique keys that have one; asks the database."""
        period = None if new.unique is None else new.unique.period
        if period is None or not any(keys):
            return list(keys)
        parameters = {
            name: value for name, value in new.parameters().items() if name in ("run_at", "delay")
        }
        parameters["period"] = period.total_seconds()
        [(begins_at,)] = fetch(self._executor, period_of_start(new.start), parameters)
        return [None if key is None else f"{KEY_OF_PERIOD}{begins_at}:{key}" for key in keys]

    def enqueue(
        self, new: NewJob, text: str, *, unique_key: str | None, limit_keys: str | None = None
    ) -> Placed:
        """Insert a job; returns the values that the database chose, or the job that holds the key.

        ``text``: its arguments as JSON.

        For an enqueue that may change the holder, use
        :class:`~pgqueue.repository.unique_keys.KeyChanges`.
        """
        keys = {"unique_key": unique_key, "limit_keys": limit_keys}
        return until_placed(partial(self.try_to_enqueue, new, text, **keys), new, unique_key)

    def try_to_enqueue(
        self, new: NewJob, text: str, *, unique_key: str | None, limit_keys: str | None = None
    ) -> Placed | None:
        """Insert a job as :meth:`enqueue` does, in one try.

        Returns None if the holder of the key has ended since the insert, so that the key is free
        again.
        """
        if new.node is not None:
            keys = {"unique_key": unique_key, "limit_keys": limit_keys}
            return self._enqueue_on_node(new, {**new.parameters(), "args": text, **keys})
        statement = enqueue_job(
            start=new.start,
            unique=unique_key is not None,
            notify=new.notify,
            labelled=new.is_labelled,
            limited=limit_keys is not None,
            across=is_across_queues(unique_key),
            after=bool(new.after),
        )
        parameters = {**new.parameters(), "args": text}
        if limit_keys is not None:
            parameters["limit_keys"] = limit_keys
        if unique_key is None:
            [row] = fetch(self._executor, statement, parameters)
            return _created(*row[:3])
        parameters["unique_key"] = unique_key
        if rows := fetch(self._executor, statement, parameters):
            return _created(*rows[0][:3])
        return self.holders(new.queue, [unique_key]).get(unique_key)

    def _enqueue_on_node(self, new: NewJob, values: dict[str, Any]) -> Placed | None:
        """Insert a job by a function that Citus calls on a node: see ``schema/on_all_nodes.py``.

        Notifies here, where workers of all nodes listen: a transaction that has sent a notification
        there could not be prepared.
        """
        if new.delay is not None:
            values["delay"] = new.delay.total_seconds()
        parameters = {"key": new.node, "job": json.dumps(values, default=str)}
        call = _DELEGATED.get(type(new.node), _DELEGATED[UUID])  # also for a driver's own UUID
        for id, *times, is_new in fetch(self._executor, call, parameters):
            if not is_new:
                return Placed(id, is_here=False)
            if new.notify:
                fetch(self._executor, _WAKE_UP, {})
            return _created(id, *times)
        return None

    def enqueue_chunk(self, new: NewJob, *, documents: str) -> list[int]:
        """Insert a chunk of jobs from a JSON array of their arguments; returns ids in order."""
        statement = enqueue_jobs(
            start=new.start,
            notify=new.notify,
            labelled=new.is_labelled,
            after=bool(new.after),
        )
        rows = fetch(self._executor, statement, {**new.parameters(), "documents": documents})
        # Identity values are drawn in the order of the array.
        return sorted(row[0] for row in rows)

    def enqueue_keyed_chunk(self, new: NewJob, rows: Sequence[NewJobRow]) -> list[Placed]:
        """Insert a chunk of jobs with keys; for a taken unique key, return the job that holds it.

        The keys must be in ascending order, so that two callers that use the same keys cannot
        deadlock.  For an enqueue that may change holders, use
        :class:`~pgqueue.repository.unique_keys.KeyChanges`.

        Never inserts a key after a greater one.  The holders of taken keys are read after the
        insert, and a holder may have ended by then.  To insert a job for this key now could
        deadlock: another caller may have taken the key meanwhile, and wait for one of our keys.  So
        roll back to the savepoint, which frees our keys, and try each half of the rows separately.
        """

        def try_to_enqueue() -> list[Placed] | None:
            with self._executor.begin_nested() as savepoint:
                placed = self._enqueue_unless_taken(new, rows)
                jobs = [job for job in placed if job is not None]
                if len(jobs) == len(rows):
                    return jobs
                savepoint.rollback()
                return None

        if len(rows) == 1:
            return until_placed(try_to_enqueue, new, rows[0].unique_key)
        if (jobs := try_to_enqueue()) is not None:
            return jobs
        middle = len(rows) // 2
        first = self.enqueue_keyed_chunk(new, rows[:middle])
        return first + self.enqueue_keyed_chunk(new, rows[middle:])

    def _enqueue_unless_taken(self, new: NewJob, rows: Sequence[NewJobRow]) -> list[Placed | None]:
        """Return the new jobs and the holders of taken keys; None for a holder that has ended."""
        statement = enqueue_keyed_jobs(
            start=new.start,
            notify=new.notify,
            labelled=new.is_labelled,
            limited=rows[0].limit_keys is not None,
            across=any(is_across_queues(row.unique_key) for row in rows),
            after=bool(new.after),
        )
        parameters = {**new.parameters(), **documents_of(rows)}
        written = self._executor.execute(statement, parameters)
        without_key: list[int] = []
        created: dict[str, Placed] = {}
        held: dict[str, Placed] = {}
        for id, key, is_new, *_ in written:
            if key is None:
                without_key.append(id)
            elif is_new:
                created[key] = Placed(id, PlacedAs.NEW)
            else:
                held[key] = Placed(id)
        keyless = iter(Placed(id, PlacedAs.NEW) for id in sorted(without_key))
        keys = [row.unique_key for row in rows]
        taken_keys = {key for key in keys if key is not None} - created.keys()
        # The statement's snapshot shows no holder that was committed after it began.
        if taken_keys:
            held |= self.holders(new.queue, sorted(taken_keys))
        placed = {**held, **created}
        return [next(keyless) if key is None else placed.get(key) for key in keys]

    def dispatch(
        self, job_id: int, *, unique: bool, notify: bool, limited: bool, after: tuple[int, ...]
    ) -> tuple[datetime, datetime]:
        """Insert the message of a job that a flush has just inserted, or what it waits for; returns
        ``run_at`` and ``created_at``."""
        statement = dispatch_flushed_job(
            unique=unique, notify=notify, limited=limited, after=bool(after)
        )
        row = self._executor.execute(statement, {"job_id": job_id, **waits_of(after)}).one()
        return row[0], row[1]

    def holders(self, queue: str, keys: Iterable[str]) -> dict[str, Placed]:
        """The jobs that hold these keys, of one queue or of all: all keys have the same scope."""
        keys = list(keys)
        parameters = {"queue": queue, "keys": json.dumps(keys)}
        statement = holders_of_unique_keys(across=any(map(is_across_queues, keys)))
        rows = self._executor.execute(statement, parameters)
        return {key: Placed(id, is_readable=is_readable) for id, key, is_readable in rows}


def _created(id: int, run_at: datetime, created_at: datetime) -> Placed:
    return Placed(id, PlacedAs.NEW, times=(run_at, created_at))


def waits_of(after: tuple[int, ...]) -> dict[str, Any]:
    """The parameters of what a new job waits for.  It watches the node that is likely to end
    last."""
    return {"after": array_of(map(str, after)), "waits_for": max(after)} if after else {}


def documents_of(rows: Sequence[NewJobRow]) -> dict[str, str]:
    """The parameter of a statement with the rows of a chunk."""
    return {"documents": json.dumps([row.values() for row in rows])}


def until_placed(
    try_to_place: Callable[[], Found | None], new: NewJob, unique_key: str | None
) -> Found:
    """Try to place a job until it is placed, or the job that holds its unique key is read.

    A try returns None if the holder has ended between the statement that met it and the one that
    reads it.  Raises DuplicateJob if the holder never becomes visible, as in a transaction whose
    snapshot is older.
    """
    for _ in range(_TRIES_FOR_A_KEY):
        if (placed := try_to_place()) is not None:
            return placed
    raise DuplicateJob(
        f"task {new.task}: the unique key {unique_key!r} in queue {new.queue!r} is held by a job "
        f"this transaction cannot see; enqueue again in a new transaction"
    )
