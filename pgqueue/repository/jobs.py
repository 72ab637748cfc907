"""Operations on jobs that exist: cancel, requeue, change, delete, inspect."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from pgqueue.connections.fast_path import fetch
from pgqueue.errors import DuplicateJob, JobNotFound
from pgqueue.models import Job, JobStatus
from pgqueue.repository.admissions import Admissions
from pgqueue.repository.enqueues import KeyHolder, holders
from pgqueue.repository.rows import StatusCount, Violation
from pgqueue.repository.workers import NOTHING_PAUSED
from pgqueue.statements import counts, invariants, operations, progress


class Change(StrEnum):
    """The result of an operator's call.  ``UNCHANGED`` is false, the others are true."""

    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel requested"
    """The job is running; it ends as cancelled when its handler ends."""
    REQUEUED = "requeued"
    DUE_NOW = "due now"
    CHANGED = "changed"
    UNCHANGED = "unchanged"

    def __bool__(self) -> bool:
        return self is not Change.UNCHANGED


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

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def cancel(self, job_id: int) -> Change:
        """End a waiting job as cancelled, or ask the worker of a running job to cancel it.

        Locks the job's row first, and its message only if no transaction holds it.
        """
        job = self._locked(job_id)
        if job.outcome is not None:
            return Change.UNCHANGED
        waits = self._run(operations.delete_messages(), job_id).all() != []
        if not waits and job.limit_keys is not None:
            waits = self._run(operations.delete_waiting_message(), job_id).all() != []
        if not waits and job.leased:
            self._run(operations.request_cancel(), job_id)
            return Change.CANCEL_REQUESTED
        self._run(operations.cancel_job(), job_id)
        return Change.CANCELLED

    def requeue(self, job_id: int, *, notify: bool, edit: Edit | None = None) -> Change:
        """Put a failed or cancelled job back as if new; its old attempts stay on record.

        ``edit`` decides which values it gets before.
        """
        # Leases before jobs, as everywhere: a late settle of this job locks them in that order.
        self._run(operations.delete_lease_of_ended_job(), job_id)
        job = self._locked(job_id)
        if job.outcome not in (JobStatus.FAILED, JobStatus.CANCELLED):
            return Change.UNCHANGED
        self._run(operations.delete_messages(), job_id)
        if self._run(operations.is_with_a_worker(), job_id).scalar():
            # Claimed since before the cancel.  If the claim is rolled back, or settled after all,
            # the job would get two messages and twice its attempts.
            return Change.UNCHANGED
        new = {} if edit is None else edit(self.values(job_id))

        def requeue() -> Change:
            if new:
                self._run_with(operations.edit_job(tuple(sorted(new))), job_id, new)
            limited = job.limit_keys is not None
            self._run(operations.requeue_job(notify=notify, limited=limited), job_id)
            return Change.REQUEUED

        return self._taking_key(requeue, job_id, job.queue, new.get("unique_key", job.unique_key))

    def run_now(self, job_id: int, *, notify: bool) -> Change:
        """Make a waiting job due now; any other job stays as it is."""
        job = self._locked(job_id)
        if job.outcome is not None:
            return Change.UNCHANGED
        moved = self._run(operations.run_now(notify=notify), job_id).first()
        if moved is None and job.limit_keys is not None:
            moved = self._run(operations.run_waiting_now(notify=notify), job_id).first()
        return Change.UNCHANGED if moved is None else Change.DUE_NOW

    def values(self, job_id: int, *, with_args: bool = True) -> JobValues:
        """What an operator may change of a job; raises JobNotFound.  Locks nothing."""
        row = self._run(operations.values_of_job(with_args=with_args), job_id).one_or_none()
        if row is None:
            raise _not_found(job_id)
        return JobValues(*row)

    def change(self, job_id: int, edit: Edit, *, with_args: bool, notify: bool) -> Change:
        """Give a waiting job the values that ``edit`` decides; any other job stays as it is."""
        self._locked(job_id)
        job = self.values(job_id, with_args=with_args)
        new = edit(job) if job.is_waiting else {}
        if not new:
            return Change.UNCHANGED
        if "unique_key" not in new:
            return self._write(job, new, notify=notify)
        write = partial(self._write, job, new, notify=notify)
        return self._taking_key(write, job_id, job.queue, new["unique_key"])

    def _write(self, job: JobValues, new: NewValues, *, notify: bool) -> Change:
        names = tuple(sorted(new))
        statement = operations.change_job(names, notify=notify)
        found = self._run_with(statement, job.id, new).first()
        if found is None and job.limit_keys is not None:
            statement = operations.change_waiting_job(names, notify=notify)
            found = self._run_with(statement, job.id, new).first()
        elif job.limit_keys is not None and "run_at" in new:
            # A job that is to start later gives up its places, as one that waits for them has none.
            Admissions(self._executor).send_back([job.id], paused=NOTHING_PAUSED)
        return Change.UNCHANGED if found is None else Change.CHANGED

    def delete_belongings(self, job_id: int) -> None:
        """Delete the other rows of a job, right before the job itself is deleted.

        Locks lease and job first, in the order of the settle, so that rows which a concurrent
        settle or requeue still writes for the job are there to be deleted.
        """
        self._run(operations.delete_lease(), job_id)
        job = self._run(operations.lock_job(), job_id).first()
        self._run(operations.delete_messages(), job_id)
        if job is not None and job.limit_keys is not None:
            self._run(operations.delete_waiting_message(), job_id)
        self._run(operations.delete_records(), job_id)

    def is_cancel_requested(self, job_id: int) -> bool:
        return bool(self._run(operations.is_cancel_requested(), job_id).scalar())

    def write_progress(self, reports: Sequence[dict[str, Any]]) -> set[int]:
        """Write what handlers report; returns the jobs whose progress was written."""
        parameters = {"reports": json.dumps(reports)}
        return {row[0] for row in fetch(self._executor, progress.write_progress(), parameters)}

    def pause(self, queue: str) -> None:
        self._executor.execute(operations.pause_queue(), {"name": queue})

    def resume(self, queue: str) -> None:
        self._executor.execute(operations.resume_queue(), {"queue_name": queue})

    def pause_task(self, task: str) -> None:
        self._executor.execute(operations.pause_task(), {"task": task})

    def resume_task(self, task: str) -> None:
        self._executor.execute(operations.resume_task(), {"paused_task": task})

    def violations(self) -> list[Violation]:
        return [
            Violation(*row) for row in self._executor.execute(invariants.invariant_violations())
        ]

    def counts(self) -> list[StatusCount]:
        return [StatusCount(*row) for row in self._executor.execute(counts.count_jobs())]

    def _run(self, statement: Any, job_id: int) -> Any:
        return self._executor.execute(statement, {"job_id": job_id})

    def _run_with(self, statement: Any, job_id: int, new: NewValues) -> Any:
        named = {f"{operations.NEW}{name}": value for name, value in new.items()}
        return self._executor.execute(statement, {"job_id": job_id, **named})

    def _taking_key(
        self, action: Callable[[], Change], job_id: int, queue: str, key: str | None
    ) -> Change:
        """Run what takes a unique key; raises DuplicateJob if another job has it."""

        def in_savepoint() -> Change:
            # A taken key must leave the caller's transaction as it was.
            with self._executor.begin_nested():
                return action()

        def holder() -> KeyHolder | None:
            return None if key is None else holders(self._executor, queue, [key]).get(key)

        done: Change = raising_duplicate(in_savepoint, job_id, key, holder)
        return done

    def _locked(self, job_id: int) -> Any:
        job = self._run(operations.lock_job(), job_id).one_or_none()
        if job is None:
            raise _not_found(job_id)
        return job


def raising_duplicate(
    action: Callable[[], Any],
    job: Job | int,
    unique_key: str | None,
    holder: Callable[[], KeyHolder | None] = lambda: None,
) -> Any:
    """Run a statement that may take a unique key; if another job has it, raise DuplicateJob."""
    try:
        return action()
    except IntegrityError as error:
        if "jobs_held_unique_key" not in str(error.orig):
            raise
        name = f"job {job}" if isinstance(job, int) else repr(job)
        found = holder()
        other = f"job {found.id}" if found else "another unfinished job"
        duplicate = DuplicateJob(
            f"{name}: {other} of its queue holds the unique key {unique_key!r}; wait for that job "
            "to end, or use enqueue(), which returns it"
        )
        duplicate.holder = found and found.id
        raise duplicate from error


def _not_found(job_id: int) -> JobNotFound:
    return JobNotFound(
        f"job {job_id} does not exist: it was never committed, or has been deleted; "
        "look the id up in pgqueue.jobs"
    )
