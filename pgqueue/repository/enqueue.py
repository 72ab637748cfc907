"""Enqueue: a job and its message in one statement of the caller's transaction."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.arguments.text import LARGEST_TEXT
from pgqueue.errors import DuplicateJob
from pgqueue.models import SCHEMA
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.messages import (
    Start,
    columns_for,
    dispatch_of,
    dispatch_of_each,
    labels,
    start_time,
)
from pgqueue.repository.nodes import CITUS_SCHEMA, KEY_TYPES
from pgqueue.repository.reading import Moment, moment
from pgqueue.repository.tables import (
    Executor,
    array_of,
    clock,
    document,
    given_ids,
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
Row = TypeVar("Row")


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
def enqueue_or_lock_jobs(
    *, start: Start, notify: bool, labelled: bool = False, limited: bool = False
) -> sa.Executable:
    """Insert a chunk of jobs with unique keys; lock the holders of taken keys until the transaction
    ends, and return only the new jobs.

    DO UPDATE locks a row also if its WHERE is false, and writes nothing then.  Rows are inserted or
    locked one by one in the order of the document, so that two callers who use the same keys in
    one order do not deadlock.
    https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT
    """
    return _enqueue_with_keys(
        start, IfKeyTaken.LOCK, notify=notify, labelled=labelled, limited=limited
    )


@cache
def enqueue_mixed_jobs(
    *, keyed: bool, limited: bool, notify: bool, after: bool = False
) -> sa.Executable:
    """Insert a chunk of jobs, each with a task, a queue and options of its own; returns the new
    ones.

    ``keyed`` and ``limited``: whether a job has a unique key, and limits.
    """
    delay, run_at = sa.column("delay", sa.Interval), sa.column("run_at", sa.DateTime(timezone=True))
    columns = [
        *(jobs.c[name] for name in ("queue", "task", "args", "priority", "max_attempts")),
        *(jobs.c[name] for name in ("meta", "tags")),
        *([jobs.c.unique_key] if keyed else []),
        *([jobs.c.limit_keys] if limited else []),
    ]
    given = (sa.column(column.name, column.type) for column in columns)
    row = document("documents", *given, delay, run_at)
    values: dict[str, Any] = {column.name: row.c[column.name] for column in columns}
    no_delay = sa.literal_column("interval '0'", sa.Interval)
    # greatest() ignores NULL; a time is never in the past: see start_time().
    values["run_at"] = sa.func.greatest(
        row.c.run_at, clock() + sa.func.coalesce(row.c.delay, no_delay)
    )
    if keyed:
        values["held_unique_key"] = row.c.unique_key
    rows = sa.select(*values.values()).select_from(row)
    insert = pg_insert(jobs).from_select(list(values), rows)
    job = _inserted(insert, IfKeyTaken.SKIP_ACROSS if keyed else IfKeyTaken.NEVER, limited=limited)
    if after:
        written = dispatch_of(job, limited=limited, after=True)
    else:
        written = dispatch_of_each(job, limited=limited, after=False)
    woken = sa.select(wake_up_call() if notify else sa.true()).scalar_subquery()
    return sa.select(job.c.id, job.c.queue, job.c.held_unique_key, woken).add_cte(*written)


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
def dispatch_flushed_jobs(
    *, unique: bool, notify: bool, limited: bool = False, after: bool = False
) -> sa.Executable:
    """Insert the messages of jobs that a flush has just inserted, and take their unique keys.

    Each flag says whether a job has a unique key or limits, or waits for others.  Returns the ids,
    and the times that the database chose.
    """
    # A join: `= ANY (the parameter)` in a scan of the table reads the parameter for each row.
    of_flush = jobs.c.id == given_ids("job_ids").c.id
    columns = (*columns_for(limited=limited), jobs.c.created_at)
    inserted = sa.select(*columns).where(of_flush)
    if unique:
        keyed = sa.update(jobs).where(of_flush, jobs.c.unique_key.is_not(None))
        holder = keyed.values(held_unique_key=jobs.c.unique_key).returning(*columns).cte("holder")
        without_key = inserted.where(jobs.c.unique_key.is_(None))
        job = sa.union_all(without_key, sa.select(holder)).cte("job")
    else:
        job = inserted.cte("job")
    woken = wake_up_call() if notify else sa.true()
    times = (moment(job.c.run_at), moment(job.c.created_at))
    written = dispatch_of_each(job, limited=limited, after=after)
    woken_once = sa.select(woken).scalar_subquery()
    return sa.select(job.c.id, *times, woken_once).select_from(job).add_cte(*written)


@cache
def clock_now() -> sa.Executable:
    return sa.select(moment(clock()))


@cache
def new_ids() -> sa.Executable:
    """Ids for jobs that are inserted later."""
    table = sa.literal_column(f"""'"{SCHEMA}".jobs'""", sa.Text)
    column = sa.literal_column("'id'", sa.Text)
    sequence = sa.cast(pg.pg_get_serial_sequence(table, column), REGCLASS)
    row = pg.generate_series(sa.literal_column("1"), sa.cast(sa.bindparam("count"), sa.Integer))
    return sa.select(pg.nextval(sequence)).select_from(row.alias("each"))


class IfKeyTaken(StrEnum):
    """What an insert does with a row whose unique key is taken."""

    NEVER = "never"
    SKIP = "skip"
    SKIP_ACROSS = "skip across queues"
    """As SKIP, where two indexes may refuse the row: if one of them were the arbiter, a conflict in
    the other would raise."""
    LOCK = "lock"
    """Never with keys across queues: ``Unique`` refuses these if an enqueue changes the holder."""


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


class MixedRow(NamedTuple):
    """A job of an enqueue of several tasks."""

    task: str
    queue: str
    unique_key: str | None
    values: dict[str, Any]
    """All that is stored of it, as JSON data, with a ``delay``."""

    @property
    def scope(self) -> tuple[str, str | None]:
        """What no other unfinished job may have in common with it, if it has a unique key."""
        return _scope(self.queue, self.unique_key)


@dataclass(frozen=True, slots=True)
class Mixed:
    """What the jobs of an enqueue of several tasks have in common."""

    limited: bool
    """Whether one has limits."""
    notify: bool
    after: tuple[int, ...] = ()
    """The nodes that end before the jobs start."""


def _scope(queue: str, unique_key: str | None) -> tuple[str, str | None]:
    return ("" if is_across_queues(unique_key) else queue, unique_key)


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
        write = partial(self.try_to_enqueue, new, text, **keys)
        return until_placed(write, new.task, new.queue, unique_key)

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
        """
        return self._placed(
            rows,
            partial(self._enqueue_unless_taken, new),
            lambda row: (new.task, new.queue, row.unique_key),
        )

    def enqueue_mixed_chunk(self, rows: Sequence[MixedRow], how: Mixed) -> list[Placed]:
        """Insert a chunk of jobs of several tasks; for a taken unique key, return the job that
        holds it.

        The keys must be in ascending order, behind the jobs without a key.
        """
        documents = json.dumps([row.values for row in rows])
        if len(documents) > LARGEST_TEXT and len(rows) > 1:
            middle = len(rows) // 2
            first = self.enqueue_mixed_chunk(rows[:middle], how)
            return first + self.enqueue_mixed_chunk(rows[middle:], how)
        if all(row.unique_key is None for row in rows):
            written = self._insert_mixed(documents, how, keyed=False)
            # Identity values are drawn in the order of the array.
            return [Placed(id, PlacedAs.NEW) for id in sorted(row[0] for row in written)]
        return self._placed(
            rows,
            partial(self._enqueue_mixed_unless_taken, how),
            lambda row: (row.task, row.queue, row.unique_key),
        )

    def _placed(
        self,
        rows: Sequence[Row],
        write: Callable[[Sequence[Row]], list[Placed | None]],
        names: Callable[[Row], tuple[str, str, str | None]],
    ) -> list[Placed]:
        """Insert jobs of which some have unique keys, until each is placed.

        Never inserts a key after a greater one.  The holders of taken keys are read after the
        insert, and a holder may have ended by then.  To insert a job for this key now could
        deadlock: another caller may have taken the key meanwhile, and wait for one of our keys.  So
        roll back to the savepoint, which frees our keys, and try each half of the rows separately.
        """

        def try_to_enqueue() -> list[Placed] | None:
            with self._executor.begin_nested() as savepoint:
                placed = write(rows)
                jobs = [job for job in placed if job is not None]
                if len(jobs) == len(rows):
                    return jobs
                savepoint.rollback()
                return None

        if len(rows) == 1:
            return until_placed(try_to_enqueue, *names(rows[0]))
        if (jobs := try_to_enqueue()) is not None:
            return jobs
        middle = len(rows) // 2
        first = self._placed(rows[:middle], write, names)
        return first + self._placed(rows[middle:], write, names)

    def _insert_mixed(self, documents: str, how: Mixed, *, keyed: bool) -> Sequence[Any]:
        statement = enqueue_mixed_jobs(
            keyed=keyed, limited=how.limited, notify=how.notify, after=bool(how.after)
        )
        return fetch(self._executor, statement, {"documents": documents, **waits_of(how.after)})

    def _enqueue_mixed_unless_taken(
        self, how: Mixed, rows: Sequence[MixedRow]
    ) -> list[Placed | None]:
        """Return the new jobs and the holders of taken keys; None for a holder that has ended."""
        documents = json.dumps([row.values for row in rows])
        written = self._insert_mixed(documents, how, keyed=True)
        keyless = iter(sorted(id for id, _, key, _ in written if key is None))
        placed = {
            _scope(queue, key): Placed(id, PlacedAs.NEW)
            for id, queue, key, _ in written
            if key is not None
        }
        taken: dict[tuple[str, bool], set[str]] = {}
        for row in rows:
            if (key := row.unique_key) is not None and row.scope not in placed:
                taken.setdefault((row.queue, is_across_queues(key)), set()).add(key)
        for (queue, _), keys in taken.items():
            for key, holder in self.holders(queue, sorted(keys)).items():
                placed[_scope(queue, key)] = holder
        return [
            Placed(next(keyless), PlacedAs.NEW) if row.unique_key is None else placed.get(row.scope)
            for row in rows
        ]

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
        self,
        job_ids: Sequence[int],
        *,
        unique: bool,
        notify: bool,
        limited: bool,
        after: Mapping[int, Sequence[int]],
    ) -> dict[int, tuple[datetime, datetime]]:
        """Insert the messages of jobs that a flush has just inserted, or for which nodes they wait
        (``after``); returns ``run_at`` and ``created_at`` of each."""
        statement = dispatch_flushed_jobs(
            unique=unique, notify=notify, limited=limited, after=bool(after)
        )
        parameters = {"job_ids": array_of(map(str, job_ids))}
        if after:
            edges = [
                {"job_id": job_id, "after_id": node} for job_id in after for node in after[job_id]
            ]
            parameters["edges"] = json.dumps(edges)
        rows = self._executor.execute(statement, parameters)
        return {id: (run_at, created_at) for id, run_at, created_at, _ in rows}

    def now(self) -> datetime:
        """What the database's clock shows."""
        now: datetime = self._executor.execute(clock_now()).scalar_one()
        return now

    def new_ids(self, count: int) -> list[int]:
        """Ids for jobs that are inserted later."""
        return list(self._executor.execute(new_ids(), {"count": count}).scalars())

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
    try_to_place: Callable[[], Found | None], task: str, queue: str, unique_key: str | None
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
        f"task {task}: the unique key {unique_key!r} in queue {queue!r} is held by a job "
        f"this transaction cannot see; enqueue again in a new transaction"
    )
