"""Batches: what is written about them, and the end of one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.errors import BatchEnded, BatchNotFound
from pgqueue.models import JobStatus
from pgqueue.repository.enqueues import Enqueued, Enqueues, NewJob
from pgqueue.retention import Retention
from pgqueue.statements import batches

JOBS_IN_A_STATEMENT = 10_000


class UnreadableCallback(ValueError):
    """Another release has written the callback of a batch."""


@dataclass(frozen=True, slots=True)
class Callback:
    """The job that the end of a batch enqueues."""

    new: NewJob
    args: str
    limit_keys: str | None

    def document(self) -> str:
        """The same as JSON, so that any worker can enqueue the job without knowing its task."""
        new = self.new
        values = {
            "task": new.task,
            "queue": new.queue,
            "priority": new.priority,
            "max_attempts": new.max_attempts,
            "meta": new.meta,
            "tags": list(new.tags),
            "args": self.args,
            "limit_keys": self.limit_keys,
        }
        return json.dumps(values)

    @classmethod
    def of(cls, document: str, *, notify: bool) -> "Callback":
        """Read the JSON.  Raises UnreadableCallback if another release has written other values."""
        values = json.loads(document)
        if not isinstance(values, dict) or values.keys() != TYPES.keys():
            raise UnreadableCallback(
                "its callback has other values than this release reads; start workers of the "
                "release that has created the batch"
            )
        for name, types in TYPES.items():
            if not isinstance(values[name], types):
                raise UnreadableCallback(
                    f"its callback has {type(values[name]).__name__} as {name}, which this release "
                    "cannot read; start workers of the release that has created the batch"
                )
        args, limit_keys = values.pop("args"), values.pop("limit_keys")
        return cls(NewJob(**values, notify=notify), args, limit_keys)


TYPES: Mapping[str, type | tuple[type, ...]] = {
    "task": str,
    "queue": str,
    "priority": int,
    "max_attempts": int,
    "meta": (str, type(None)),
    "tags": list,
    "args": str,
    "limit_keys": (str, type(None)),
}
"""The values of a stored callback.  One more may mean something that must not be left out."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch and its progress, as read by :meth:`PgQueue.get_batch`."""

    id: int
    name: str | None
    meta: Mapping[str, Any]
    total: int
    """How many jobs have been added."""
    ended: int
    """How many of them have succeeded, failed, were cancelled, or were deleted."""
    failed: int
    cancelled: int
    outcome: str | None
    """None while the batch is open, then "succeeded", or "failed" if a job of it has failed."""
    callback_id: int | None
    """The job that the end has enqueued."""
    created_at: datetime
    ended_at: datetime | None


class Candidate(NamedTuple):
    """A batch that may have ended, and which no worker has ended so far."""

    id: int
    since: timedelta
    unreadable: str | None
    """Why this code cannot read a callback of the batch."""


class Counts(NamedTuple):
    """The jobs of a batch."""

    total: int
    unfinished: int
    failed: int
    cancelled: int
    first_unfinished: int | None


class Batches:
    """The batches behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def add(self, name: str | None, meta: str | None, application: str) -> int:
        """Insert a batch; returns its id."""
        row = {"name": name, "meta": meta}
        if application:
            row["of_application"] = application
        statement = batches.add_batch(named=bool(application))
        return int(self._executor.execute(statement, row).scalar_one())

    def set_callbacks(
        self, batch_id: int, on_success: Callback | None, on_failure: Callback | None
    ) -> None:
        parameters = {
            "batch_id": batch_id,
            "on_success": on_success and on_success.document(),
            "on_failure": on_failure and on_failure.document(),
        }
        self._executor.execute(batches.set_callbacks(), parameters)

    def keep_open(self, batch_id: int) -> None:
        """Keep a batch from ending before this transaction does.

        Raises BatchEnded or BatchNotFound.
        """
        parameters = {"batch_id": batch_id}
        if self._executor.execute(batches.keep_open(), parameters).first() is not None:
            return
        if self._executor.execute(batches.is_known(), parameters).first() is None:
            raise not_found(batch_id)
        raise BatchEnded(
            f"batch {batch_id} has ended, and its callback may have run, so no job can be added; "
            "create another batch"
        )

    def add_jobs(self, batch_id: int, job_ids: Sequence[int]) -> None:
        for start in range(0, len(job_ids), JOBS_IN_A_STATEMENT):
            part = list(job_ids[start : start + JOBS_IN_A_STATEMENT])
            self._executor.execute(batches.add_jobs(), {"batch_id": batch_id, "job_ids": part})

    def candidates(self, *, after: int, limit: int) -> list[int]:
        """The first batches after an id that may have ended.  Locks nothing."""
        parameters = {"after": after, "limit": limit}
        return list(self._executor.execute(batches.candidates(), parameters).scalars())

    def overdue(self) -> list[Candidate]:
        """All batches that may have ended."""
        rows = self._executor.execute(batches.candidates_in_full())
        return [Candidate(id, since, _fault_of(callbacks)) for id, *callbacks, since in rows]

    def end(self, batch_id: int, *, notify: bool) -> bool | None:
        """Lock a batch that may have ended, and end it if it has; returns whether it has, None if
        another transaction has locked it.

        Needs a transaction in READ COMMITTED: each statement after the lock must see what the last
        addition has committed.  Raises UnreadableCallback.
        """
        row = self._run(batches.lock_candidate(), batch_id).first()
        if row is None:
            return None
        waited_for, *callbacks = row
        counts = Counts(0, 0, 0, 0, self._next_unfinished(batch_id, waited_for or 0))
        if counts.first_unfinished is None:
            # Once more from the first job on: one may have been requeued, or added behind.
            counts = Counts(*self._run(batches.count_jobs(), batch_id).one())
        if counts.first_unfinished is not None:
            self._run(batches.wait_for(), batch_id, job_id=counts.first_unfinished)
            return False
        self._end(batch_id, counts, callbacks[bool(counts.failed)], notify=notify)
        return True

    def state(self, batch_id: int) -> BatchState:
        """Return a batch with its progress; raises BatchNotFound."""
        row = self._run(batches.batch_states(one=True), batch_id).first()
        if row is None:
            raise not_found(batch_id)
        return _state_of(row)

    def states(self, limit: int) -> list[BatchState]:
        """Return the newest batches."""
        rows = self._executor.execute(batches.batch_states(one=False), {"limit": limit})
        return [_state_of(row) for row in rows]

    def next_due(self, retention: Retention, *, after: int) -> int | None:
        """The first batch after an id whose time is over."""
        parameters = {**_rules_of(retention), "after": after}
        found: int | None = self._executor.execute(batches.next_due_batch(), parameters).scalar()
        return found

    def prune(self, batch_id: int, retention: Retention, size: int) -> int:
        """Delete up to ``size`` rows of a batch whose time is over; returns how many."""
        found = self._run(batches.prune_batch(), batch_id, **_rules_of(retention), size=size)
        return int(found.scalar_one())

    def _next_unfinished(self, batch_id: int, after: int) -> int | None:
        found: int | None = self._run(batches.next_unfinished(), batch_id, after=after).scalar()
        return found

    def _end(self, batch_id: int, counts: Counts, document: str | None, *, notify: bool) -> None:
        callback_id = None
        if document is not None:
            callback = Callback.of(document, notify=notify)
            enqueued = Enqueues(self._executor).enqueue(
                callback.new, args=callback.args, unique_key=None, limit_keys=callback.limit_keys
            )
            assert isinstance(enqueued, Enqueued), "it has no unique key"
            callback_id = enqueued.id
        self._run(
            batches.end_batch(),
            batch_id,
            outcome=JobStatus.FAILED.value if counts.failed else JobStatus.SUCCEEDED.value,
            total=counts.total,
            failed=counts.failed,
            cancelled=counts.cancelled,
            callback_id=callback_id,
        )

    def _run(self, statement: Any, batch_id: int, **parameters: Any) -> Any:
        return self._executor.execute(statement, {"batch_id": batch_id, **parameters})


def _rules_of(retention: Retention) -> dict[str, str]:
    keep = retention.parameters()["keep_of_others"]
    return {"keep_of_others": keep, "of_application": retention.application}


def _fault_of(documents: Sequence[str | None]) -> str | None:
    try:
        for document in documents:
            if document is not None:
                Callback.of(document, notify=False)
    except UnreadableCallback as error:
        return str(error)
    return None


def not_found(batch_id: int) -> BatchNotFound:
    return BatchNotFound(
        f"batch {batch_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.batches"
    )


def _state_of(row: Any) -> BatchState:
    id, name, meta, *others = row
    return BatchState(id, name, json.loads(meta) if meta else {}, *others)
