"""Defers, lists and cancels jobs."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

import pgqueue
from pgqueue import Change, DuplicateJob, JobNotFound

from .declarations import LOCKED, meta_of, queueing
from .exceptions import AlreadyEnqueued
from .jobs import Job, Status, status_of
from .priorities import priority_of

if TYPE_CHECKING:
    from .app import App


class JobManager:
    """The jobs of an application.  Those for coroutines run in a thread."""

    def __init__(self, app: "App") -> None:
        self._app = app

    def defer_jobs(self, jobs: Sequence[Job], connection: Any = None) -> list[int]:
        """Defer jobs that differ in their arguments only, and return their ids.

        Raises:
            AlreadyEnqueued: A job with their queueing lock waits.
        """
        if not jobs:
            return []
        first, connector = jobs[0], self._app.connector
        options: dict[str, Any] = {"unique": queueing(first.queueing_lock)}
        task = self._app.declarations.find(first).options(
            queue=first.queue,
            priority=priority_of(first.priority),
            run_at=first.scheduled_at,
            meta=meta_of(first),
            **options,
        )
        rows = [{"kwargs": connector.stored(job.task_kwargs), "lock": job.lock} for job in jobs]
        try:
            with self._transaction(connection) as session:
                return list(task.enqueue_many(session, rows))
        except DuplicateJob as error:
            raise AlreadyEnqueued(
                f"job {error.holder} waits with the queueing lock {first.queueing_lock!r}"
            ) from error

    def get_job_status(self, job_id: int) -> Status:
        """Return the status of a job."""
        with self._transaction() as session:
            return self._status(session, job_id)

    def cancel_job_by_id(self, job_id: int, abort: bool = False, delete_job: bool = False) -> bool:
        """Cancel a job that waits, or delete it; with ``abort`` also stop one that runs.

        Returns whether there is such a job.
        """
        queue = self._app.queue
        with self._transaction() as session:
            try:
                status = self._status(session, job_id)
            except JobNotFound:
                return False
            if status is Status.TODO and delete_job:
                queue.delete(session, job_id)
                return True
            may_cancel = status is Status.TODO or (status is Status.DOING and abort)
            return may_cancel and queue.cancel(session, job_id) is not Change.UNCHANGED

    def list_jobs(
        self,
        id: int | None = None,
        queue: str | None = None,
        task: str | None = None,
        status: Status | str | None = None,
        lock: str | None = None,
        queueing_lock: str | None = None,
    ) -> list[Job]:
        """Return the jobs that match, by their ids."""
        found = select(pgqueue.Job).order_by(pgqueue.Job.id)
        if id is not None:
            found = found.where(pgqueue.Job.id == id)
        if queue is not None:
            found = found.where(pgqueue.Job.queue == queue)
        if task is not None:
            found = found.where(pgqueue.Job.task.in_([task, task + LOCKED]))
        with self._transaction() as session:
            jobs = [self._job(row) for row in session.scalars(found)]
        wanted: dict[str, Any] = {"lock": lock, "queueing_lock": queueing_lock}
        wanted["status"] = None if status is None else Status(status)
        return [
            job
            for job in jobs
            if all(value is None or getattr(job, name) == value for name, value in wanted.items())
        ]

    async def get_job_status_async(self, job_id: int) -> Status:
        return await asyncio.to_thread(self.get_job_status, job_id)

    async def cancel_job_by_id_async(
        self, job_id: int, abort: bool = False, delete_job: bool = False
    ) -> bool:
        return await asyncio.to_thread(self.cancel_job_by_id, job_id, abort, delete_job)

    async def list_jobs_async(self, **conditions: Any) -> list[Job]:
        return await asyncio.to_thread(self.list_jobs, **conditions)

    @contextmanager
    def _transaction(self, connection: Any = None) -> Iterator[Any]:
        """A Session whose transaction commits at the end of the block, or that of the caller."""
        if connection is not None:
            yield connection
            return
        with self._app.queue.session() as session, session.begin():
            yield session

    def _status(self, session: Session, job_id: int) -> Status:
        state = self._app.queue.job_state(session, job_id)
        return status_of(state.status, state.error, is_cancel_requested=state.is_cancel_requested)

    def _job(self, row: pgqueue.Job) -> Job:
        is_cancel_requested = row.cancel_requested_at is not None
        return Job(
            id=row.id,
            status=status_of(row.status, row.last_error, is_cancel_requested=is_cancel_requested),
            queue=row.queue,
            task_name=row.task.removesuffix(LOCKED),
            task_kwargs=self._app.connector.loaded(row.args.get("kwargs", {})),
            scheduled_at=row.run_at,
            attempts=row.attempts,
            **(row.meta or {}).get("procrastinate", {}),
        )
