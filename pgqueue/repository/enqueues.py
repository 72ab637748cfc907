"""Enqueues: inserts jobs and their messages, or finds or changes the jobs that hold their keys."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.connections.fast_path import fetch
from pgqueue.errors import DuplicateJob
from pgqueue.statements import enqueueing, unique_keys
from pgqueue.statements.enqueueing import Start
from pgqueue.statements.operations import NEW
from pgqueue.unique import KEY_OF_PERIOD, Unique

Executor = Session | Connection

TRIES_FOR_A_KEY = 20
"""How often an enqueue is tried while its key is taken by jobs that end before they are read."""


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
        return parameters


class Enqueued(NamedTuple):
    """The values that the database chose for a new job."""

    id: int
    run_at: datetime
    created_at: datetime


class Row(NamedTuple):
    """One row of an enqueue with unique keys."""

    args: Any
    unique_key: str | None
    limit_keys: str | None = None


class Placed(NamedTuple):
    """The job that a row of an enqueue has created, found or changed."""

    id: int
    is_new: bool
    """False for a job that already held the key."""
    is_changed: bool = False
    """Whether the enqueue has changed the job, or could not postpone it beyond ``at_most``."""


class KeyHolder(NamedTuple):
    """The job that has a unique key."""

    id: int
    is_readable: bool
    """Whether the role may read the whole job, or only the columns needed to enqueue."""


class Enqueues:
    """Runs enqueues in the transaction of one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def held_keys(self, new: NewJob, keys: Sequence[str | None]) -> list[str | None]:
        """Return unique keys in their stored form, which begins with the period, if any."""
        period = None if new.unique is None else new.unique.period
        if period is None or not any(keys):
            return list(keys)
        begins_at = self._period_of_start(new, period)
        return [None if key is None else f"{KEY_OF_PERIOD}{begins_at}:{key}" for key in keys]

    def _period_of_start(self, new: NewJob, period: timedelta) -> int:
        """Return when the period begins in which a new job is due, in seconds since 1970."""
        times = {name: new.parameters()[name] for name in ("run_at", "delay") if getattr(new, name)}
        parameters = {"period": period.total_seconds(), **times}
        [row] = fetch(self._executor, enqueueing.period_of_start(new.start), parameters)
        return int(row[0])

    def enqueue(
        self, new: NewJob, *, args: str, unique_key: str | None, limit_keys: str | None = None
    ) -> Enqueued | KeyHolder:
        """Insert a job; returns the values that the database chose, or the job that holds the key.

        Use :meth:`enqueue_unique_chunk` for an enqueue that may change the holder.
        """
        statement = enqueueing.enqueue_job(
            start=new.start,
            unique=unique_key is not None,
            notify=new.notify,
            labelled=new.is_labelled,
            limited=limit_keys is not None,
        )
        parameters = {**new.parameters(), "args": args}
        if limit_keys is not None:
            parameters["limit_keys"] = limit_keys
        if unique_key is None:
            [row] = fetch(self._executor, statement, parameters)
            return Enqueued(*row[:3])
        parameters["unique_key"] = unique_key
        for _ in range(TRIES_FOR_A_KEY):
            if rows := fetch(self._executor, statement, parameters):
                return Enqueued(*rows[0][:3])
            holder = holders(self._executor, new.queue, [unique_key]).get(unique_key)
            if holder is not None:
                return holder
            # The holder has ended since the insert, so the key is free again.
        raise key_never_free(new, unique_key)

    def enqueue_chunk(self, new: NewJob, *, documents: str) -> list[int]:
        """Insert a chunk of jobs from a JSON array of their arguments; returns ids in order."""
        statement = enqueueing.enqueue_jobs(
            start=new.start, notify=new.notify, labelled=new.is_labelled
        )
        rows = fetch(self._executor, statement, {**new.parameters(), "documents": documents})
        # Identity values are drawn in the order of the array.
        return sorted(row[0] for row in rows)

    def enqueue_unique_chunk(
        self,
        new: NewJob,
        *,
        payloads: Sequence[Any],
        keys: Sequence[str | None],
        limit_keys: Sequence[str | None] = (),
    ) -> list[Placed]:
        """Insert a chunk of jobs with unique keys; for a taken key, return the job that holds it.

        The keys must be in ascending order, so that two callers that use the same keys cannot
        deadlock.  If the enqueue may change holders, each key must occur only once.
        """
        if new.changes_holder:
            return _enqueue_or_change(
                self._executor, new, [Row(*row) for row in zip(payloads, keys, strict=True)]
            )
        all_limit_keys = limit_keys or [None] * len(keys)
        rows = [Row(*row) for row in zip(payloads, keys, all_limit_keys, strict=True)]
        return self._enqueue_in_order(new, rows)

    def _enqueue_in_order(self, new: NewJob, rows: Sequence[Row]) -> list[Placed]:
        """Insert rows by ascending keys; never insert a key after a greater one.

        The holders of taken keys are read after the insert, and a holder may have ended by then.
        To insert a job for this key now could deadlock: another caller may have taken the key
        meanwhile, and wait for one of our keys.  So roll back to the savepoint, which frees our
        keys, and try each half of the rows separately.
        """
        for _ in range(1 if len(rows) > 1 else TRIES_FOR_A_KEY):
            with self._executor.begin_nested() as savepoint:
                placed = self._enqueue_unless_taken(new, rows)
                jobs = [job for job in placed if job is not None]
                if len(jobs) == len(rows):
                    return jobs
                savepoint.rollback()
        if len(rows) == 1:
            raise key_never_free(new, rows[0].unique_key)
        middle = len(rows) // 2
        first = self._enqueue_in_order(new, rows[:middle])
        return first + self._enqueue_in_order(new, rows[middle:])

    def _enqueue_unless_taken(self, new: NewJob, rows: Sequence[Row]) -> list[Placed | None]:
        """Return the new jobs and the holders of taken keys; None for a holder that has ended."""
        statement = enqueueing.enqueue_unique_jobs(
            start=new.start,
            notify=new.notify,
            labelled=new.is_labelled,
            limited=rows[0].limit_keys is not None,
        )
        documents = json.dumps([row._asdict() for row in rows])
        written = self._executor.execute(statement, {**new.parameters(), "documents": documents})
        without_key: list[int] = []
        created: dict[str, Placed] = {}
        held: dict[str, Placed] = {}
        for id, key, is_new, _woken in written:
            if key is None:
                without_key.append(id)
            else:
                (created if is_new else held)[key] = Placed(id, is_new)
        keyless = iter(Placed(id, is_new=True) for id in sorted(without_key))
        taken = {row.unique_key for row in rows if row.unique_key is not None} - created.keys()
        if taken:
            holder_of = holders(self._executor, new.queue, sorted(taken))
            held |= {key: Placed(holder.id, is_new=False) for key, holder in holder_of.items()}
        placed = {**held, **created}
        return [next(keyless) if key is None else placed.get(key) for _, key, _ in rows]

    def dispatch(self, job_id: int, *, unique: bool, notify: bool, limited: bool) -> Enqueued:
        """Insert the message of a job that a flush has just inserted."""
        statement = enqueueing.dispatch_flushed_job(unique=unique, notify=notify, limited=limited)
        row = self._executor.execute(statement, {"job_id": job_id}).one()
        return Enqueued(job_id, *row[:2])


def holders(executor: Executor, queue: str, keys: Iterable[str]) -> dict[str, KeyHolder]:
    """Return the unfinished jobs of a queue that hold these keys."""
    parameters = {"queue": queue, "keys": json.dumps(list(keys))}
    rows = executor.execute(enqueueing.holders_of_unique_keys(), parameters)
    return {key: KeyHolder(id, is_readable) for id, key, is_readable in rows}


def _enqueue_or_change(executor: Executor, new: NewJob, rows: Sequence[Row]) -> list[Placed]:
    """Insert jobs, or change the waiting jobs that hold their keys, in one transaction.

    The keys must be ascending, each at most once.  If the holder of a key has started, ``until``
    decides: with "started", a new job takes the key; with "finished", the holder is returned
    unchanged.
    """
    unique = new.unique or Unique()
    placed = _at_bound(executor, new, unique, rows)
    unplaced = [row for row in rows if row.unique_key not in placed]
    without_key = _insert_or_lock(executor, new, unplaced, placed)
    taken = _missing(unplaced, placed)
    if taken:
        placed |= _changed(executor, new, unique, taken)
        started = _missing(taken, placed)
        if started and unique.until == "started":
            freed = _freed(executor, new, started)
            # We have locked the jobs that had these keys, so no other caller can take the keys.
            _insert_or_lock(
                executor, new, [row for row in started if row.unique_key in freed], placed
            )
        if unchanged := [str(row.unique_key) for row in _missing(taken, placed)]:
            holder_of = holders(executor, new.queue, unchanged)
            placed |= {key: Placed(holder.id, is_new=False) for key, holder in holder_of.items()}
    keyless = iter(without_key)
    return [next(keyless) if key is None else placed[key] for _, key, _ in rows]


def _missing(rows: Sequence[Row], placed: dict[str, Placed]) -> list[Row]:
    return [row for row in rows if row.unique_key is not None and row.unique_key not in placed]


def _at_bound(
    executor: Executor, new: NewJob, unique: Unique, rows: Sequence[Row]
) -> dict[str, Placed]:
    """Return the waiting jobs that cannot be postponed further.

    They are not locked, so a worker can claim them however many callers try to postpone them.
    """
    if unique.at_most is None or unique.on_conflict != "postpone":
        return {}
    parameters = {**_names_and_documents(new, rows), "at_most": unique.at_most}
    at_bound = executor.execute(unique_keys.holders_at_bound(), parameters)
    return {key: Placed(id, is_new=False, is_changed=True) for id, key in at_bound}


def _insert_or_lock(
    executor: Executor, new: NewJob, rows: Sequence[Row], placed: dict[str, Placed]
) -> list[Placed]:
    """Insert the jobs whose keys are free, and lock the holders of the other keys.

    Adds the new jobs with a key to ``placed``, and returns those without a key, in order.  Waits
    for other transactions that have one of the keys.
    """
    if not rows:
        return []
    statement = enqueueing.enqueue_or_lock_jobs(
        start=new.start, notify=new.notify, labelled=new.is_labelled
    )
    written = executor.execute(statement, {**new.parameters(), **_documents(rows)}).all()
    placed |= {key: Placed(id, is_new=True) for id, key, *_ in written if key is not None}
    ids = sorted(id for id, key, *_ in written if key is None)
    return [Placed(id, is_new=True) for id in ids]


def _changed(
    executor: Executor, new: NewJob, unique: Unique, rows: Sequence[Row]
) -> dict[str, Placed]:
    statement = unique_keys.change_holders(
        start=new.start,
        replace=unique.on_conflict == "replace",
        bounded=unique.at_most is not None,
        notify=new.notify,
        labelled=new.is_labelled,
    )
    bound = {} if unique.at_most is None else {"at_most": unique.at_most}
    named = {f"{NEW}{name}": value for name, value in new.parameters().items()}
    parameters = {**named, **_documents(rows), **bound}
    changed = executor.execute(statement, parameters)
    return {key: Placed(id, is_new=False, is_changed=True) for id, key, _ in changed}


def _freed(executor: Executor, new: NewJob, rows: Sequence[Row]) -> set[str]:
    parameters = _names_and_documents(new, rows)
    return set(executor.execute(unique_keys.free_keys(), parameters).scalars())


def _names_and_documents(new: NewJob, rows: Sequence[Row]) -> dict[str, Any]:
    names = {f"{NEW}task": new.task, f"{NEW}queue": new.queue}
    return {**names, **_documents(rows)}


def _documents(rows: Sequence[Row]) -> dict[str, str]:
    return {"documents": json.dumps([row._asdict() for row in rows])}


def key_never_free(new: NewJob, unique_key: str | None) -> DuplicateJob:
    return DuplicateJob(
        f"task {new.task}: the unique key {unique_key!r} in queue {new.queue!r} is held by a job "
        f"this transaction cannot see; enqueue again in a new transaction"
    )
