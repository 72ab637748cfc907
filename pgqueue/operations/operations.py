"""``Operations``: what an application and its operators ask and do, apart from enqueuing.

Each call works in the caller's transaction: its changes take effect with the caller's commit.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Never, TypeVar, Unpack
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.checks import (
    check_known_task_name,
    check_queue_name,
    check_queue_or_all,
    check_text,
    check_whole,
    checked_id,
    checked_signal,
    shown,
)
from pgqueue.database.callers import (
    AnySession,
    executor,
    in_transaction,
    may_notify,
    translated_errors,
)
from pgqueue.errors import ArgumentsError, DuplicateJob, OptionError, PayloadError
from pgqueue.handler.error_reports import storable_result
from pgqueue.models import UNFINISHED, JobStatus
from pgqueue.operations.actions import ON_JOBS, ActionContext
from pgqueue.operations.engine import within
from pgqueue.operations.selection import Selection
from pgqueue.repository.batches import Batches, BatchState
from pgqueue.repository.conditions import JobConditions, JobFilter
from pgqueue.repository.health import Health, StatusCount
from pgqueue.repository.invariants import Invariants, Violation
from pgqueue.repository.job_state import JobState, JobStates
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.limits import Limits, LimitState
from pgqueue.repository.pauses import Pauses
from pgqueue.repository.restart import Restarts
from pgqueue.repository.signals import Signals
from pgqueue.repository.workers import Workers, WorkerState
from pgqueue.repository.workflows import Workflows
from pgqueue.rules.limits import Limit, Limited, by_name, check_capacity, checked_key, key_of
from pgqueue.rules.unique import stored_forms, when_free
from pgqueue.schedules import Schedules
from pgqueue.tasks import Task
from pgqueue.tasks.editing import CHANGEABLE, Changes

MOST_BATCHES = 1_000_000

R = TypeVar("R")


class Operations:
    """The part of :class:`PgQueue` that works on jobs, batches, queues, limits and workers."""

    notify: bool
    tasks: dict[str, Task[..., Any]]
    find: Callable[[str], Task[..., Any]]
    queue_limits: dict[str, tuple[Limit, ...]]
    schedules: Schedules
    retention: Any
    read_committed: Callable[[], AbstractContextManager[Session]]

    @property
    def limited(self) -> Limited:
        """The limits of this application.  Raises TaskDefinitionError if two limits have the same
        name and differ."""
        own = {name: task.own_limits for name, task in self.tasks.items()}
        of_tasks = [limit for limits in own.values() for limit in limits]
        return Limited(
            by_name([*of_tasks, *chain.from_iterable(self.queue_limits.values())]),
            frozenset(name for name, limits in own.items() if limits),
            frozenset(self.queue_limits),
        )

    def action_context(
        self, connection: Connection, changes: Changes | None = None
    ) -> ActionContext:
        """Return what an action on jobs needs on a connection."""
        notify = self.notify and may_notify(connection)
        known = ((task.name, *task.settings.aliases) for task in self.tasks.values())
        tasks = set(chain.from_iterable(known))
        return ActionContext(connection, self.find, notify, changes, tasks, self.queue_limits)

    def lock_job(self, session: AnySession, job_id: int) -> None:
        """Lock the row of a job until the transaction ends: no worker settles it meanwhile, and no
        operator changes it.  Raises JobNotFound."""
        Jobs(in_transaction(session, f"lock of job {job_id}")).lock(checked_id(job_id))

    @translated_errors()
    def job_state(self, session: AnySession, job_id: int) -> JobState:
        """Return the state of a job by one statement, without loading a :class:`Job`.

        For pages that ask often whether a job has ended.

        Args:
            session: A Session or Connection to read with.
            job_id: The id of the job.

        Returns:
            Status, attempt, progress, result, error and position.

        Raises:
            JobNotFound: There is no such job.
        """
        return JobStates(executor(session)).of(checked_id(job_id))

    @translated_errors()
    def get_batch(self, session: AnySession, batch_id: int) -> BatchState:
        """Return a batch with its progress.  Reads all of its jobs until it has ended.

        Args:
            session: A Session or Connection to read with.
            batch_id: The id of the batch.

        Returns:
            The batch, as it is now.

        Raises:
            BatchNotFound: There is no such batch.
        """
        return Batches(executor(session)).state(checked_id(batch_id, "batch"))

    @translated_errors()
    def progress_of(self, session: AnySession, batch_id: int) -> BatchState:
        """Return a batch as a worker has last counted it: one row, however many jobs it has.

        While jobs of the batch end, a worker counts every second, or more rarely if a count takes
        longer than 20 ms: counts take at most a fiftieth of the time.  While nothing changes, it
        counts once a minute.  :meth:`get_batch` counts exactly.

        Args:
            session: A Session or Connection to read with.
            batch_id: The id of the batch.

        Returns:
            The batch, as it was counted last.

        Raises:
            BatchNotFound: There is no such batch.
        """
        return Batches(executor(session)).progress(checked_id(batch_id, "batch"))

    def results(self, session: AnySession, job_id: int, task: Task[..., R]) -> Iterator[R]:
        """Return the results of the jobs for which a job of a workflow has waited.

        Args:
            session: A Session; of a transactional handler, ``ctx.session``.
            job_id: The job that has waited; in its handler, ``ctx.job_id``.
            task: Whose results.  Jobs of it for which the job waited are read, also those of a
                group, if they have succeeded.

        Returns:
            The results, in the order of the jobs' ids, as JSON gives them back.  They are read in
            portions, so that a hundred thousand of them need not fit into memory.

        Example:
            >>> @queue.task
            ... def load(session: Session, ctx: JobContext, file: int) -> int:
            ...     return sum(queue.results(session, ctx.job_id, transform))
        """
        names = (task.name, *task.settings.aliases)
        with translated_errors():
            yield from Workflows(executor(session)).results(checked_id(job_id), names)

    @translated_errors()
    def batches(self, session: AnySession, limit: int = 100) -> list[BatchState]:
        """Return the newest batches with their progress.

        Args:
            session: A Session or Connection to read with.
            limit: How many at most.

        Returns:
            The batches, the newest first.
        """
        check_whole("batches: ", "limit", limit, 0, MOST_BATCHES)
        return Batches(executor(session)).states(limit)

    @translated_errors()
    def cancel(
        self,
        session: AnySession,
        job_id: int,
        *,
        kill: bool = False,
    ) -> Change:
        """Cancel a job in the caller's transaction.

        A waiting job ends as cancelled.  A running job is asked to stop
        (:meth:`JobContext.is_cancelled`; in an async handler, ``CancelledError`` is raised) and
        ends as cancelled however its handler ends; the writes of a transactional handler then roll
        back.  A job that has ended stays as it is.

        Args:
            session: A Session or Connection, in whose transaction the job is changed.
            job_id: The id of the job.
            kill: End the child process of a running job (``executor="process"``) by SIGKILL, with
                the processes that its handler has started, within a second after the commit.  Also
                for a job that was asked to stop before.  A worker of an older version only asks the
                handler.

        Returns:
            What the call has done.

        Raises:
            JobNotFound: There is no such job.
            OptionError: With ``kill``, if the handler of a running job runs in the worker's own
                process.
            UnknownTask: With ``kill``, if this application does not have the task of a running job.

        Example:
            >>> change = queue.cancel(session, job.id)
            >>> assert change is Change.CANCELLED
        """
        return self._act("kill" if kill else "cancel", session, job_id)

    @translated_errors()
    def cancel_where(
        self,
        session: AnySession,
        *,
        status: JobStatus | str | Collection[JobStatus | str] = UNFINISHED,
        **conditions: Unpack[JobConditions],
    ) -> dict[Change, int]:
        """Cancel all jobs that match, in the caller's transaction.

        At least one condition besides ``status`` is needed, and all must hold.  The jobs are
        cancelled in the order of their ids, those that wait by one statement for each five hundred.
        Each job that a worker has claimed is asked to stop, as :meth:`cancel` does.  The rows of
        the jobs stay locked until the transaction ends, so commit soon; with very many jobs use
        :meth:`PgQueue.operate`, which commits in between.  Beside other operators it may fail with
        a deadlock (SQLSTATE 40P01), as it locks rows in an order of its own: roll back, and repeat
        the transaction.

        Args:
            session: A Session or Connection, in whose transaction the jobs are changed.
            status: One or several of pending, blocked and running; all three by default.
            **conditions: ``task``, ``queue`` and ``tag``, by name; ``batch``, by its id;
                ``limit_key``, a key under which the jobs count, as in ``Job.limit_keys``;
                ``unique_key``, as given to the enqueue, or as in ``Job.unique_key`` (two queues may
                each have a job with it).

        Returns:
            How many jobs, by what was done to each.

        Raises:
            OptionError: No condition is given, one is no text, or the status is one of jobs that
                have ended.
            ArgumentsError: ``batch`` is no id.

        Example:
            >>> changed = queue.cancel_where(session, task="mail", tag="campaign 12")
        """
        statuses = [status] if isinstance(status, str) else list(status)
        if wrong := [one for one in statuses if one not in UNFINISHED]:
            raise OptionError(
                f"cancel_where: status {wrong[0]!r} is none of {', '.join(UNFINISHED)}: jobs that "
                "have ended cannot be cancelled"
            )
        Selection.of(JobFilter(**conditions)).check_not_everything("cancel_where")
        for name, value in conditions.items():
            if name == "batch" and value is not None:
                checked_id(value, "batch")
            elif value is not None:
                check_text("cancel_where: ", name, value)
        which = JobFilter(frozenset(map(JobStatus, statuses)), **conditions)
        return self._cancel_all(session, Selection.of(which), "cancel of several jobs")

    @translated_errors()
    def cancel_batch(self, session: AnySession, batch_id: int) -> dict[Change, int]:
        """Cancel the jobs of a batch that have not ended, as :meth:`cancel_where` does.

        Args:
            session: A Session or Connection, in whose transaction the jobs are changed.
            batch_id: The id of the batch.

        Returns:
            How many jobs, by what was done to each.

        Raises:
            BatchNotFound: There is no such batch.
        """
        self.progress_of(session, batch_id)
        return self.cancel_where(session, batch=batch_id)

    @translated_errors()
    def cancel_by_key(
        self,
        session: AnySession,
        key: str,
        queue: str | None = None,
    ) -> dict[Change, int]:
        """Cancel the unfinished job that holds a unique key.

        Finds the job by an index.  A job that has released its key, because its handler has started
        (``until="started"``) or because it was asked to stop before, is not found, nor is a job
        whose enqueue has not been committed.

        Args:
            session: A Session or Connection, in whose transaction the job is changed.
            key: The key that was given to the enqueue.  A key that is made of arguments or belongs
                to a period is given as in ``Job.unique_key``.
            queue: The name of a queue; without it, the job with this key in each queue.

        Returns:
            What was done, as :meth:`cancel_where` returns it; an empty dict if no job holds the
            key.

        Raises:
            OptionError: The key is no text, or no queue can have this name.
        """
        check_text("cancel_by_key: ", "key", key)
        if queue is not None:
            check_queue_name(queue, "cancel_by_key: ")
        connection = in_transaction(session, "cancel by a unique key")
        found = Jobs(connection).with_keys(stored_forms(key), queue)
        return self._cancel_all(session, Selection(found), "cancel by a unique key")

    @translated_errors()
    def requeue(
        self,
        session: AnySession,
        job_id: int,
        *,
        args: Mapping[str, Any] | None = None,
    ) -> Change:
        """Put a failed or cancelled job back, with all its attempts available again.

        The records of past attempts stay, but not the arguments that these attempts had.  Any other
        job stays as it is.  So does a job that was cancelled while a worker was about to start it,
        as long as the worker holds the job.

        Args:
            session: A Session or Connection, in whose transaction the job is changed.
            job_id: The id of the job.
            args: Arguments to change first, by name, as :meth:`change` does.

        Returns:
            What the call has done.

        Raises:
            JobNotFound: There is no such job.
            DuplicateJob: Another unfinished job holds the unique key.
            ArgumentsError, PayloadError, UnknownTask: With ``args``, as by :meth:`change`.
        """
        job_id = checked_id(job_id)
        return self._act("requeue", session, job_id, None if args is None else Changes(args=args))

    @translated_errors()
    def run_again(self, session: AnySession, job_id: int) -> int:
        """Enqueue a copy of a job that has ended, which runs now; the old job stays as it is.

        The copy has the task, queue, arguments, priority, attempts, unique key, limits, tags and
        meta of the job, and names the job in its meta, as ``pgqueue.copy_of``.  It belongs to no
        batch and no workflow.  For a failed job :meth:`requeue` runs the same job again.

        Args:
            session: A Session or Connection.
            job_id: The job.

        Returns:
            The id of the copy.

        Raises:
            JobNotFound: There is no such job.
            OptionError: The job has not ended.
            DuplicateJob: Another job holds the unique key; also the job itself, if its key is that
                of a period.
        """
        context = self._context_of("run_again", session, job_id)
        if not ON_JOBS["run_again"].one(context, job_id, None):
            raise OptionError(f"job {job_id} has not ended; enqueue another one")
        return context.copies[job_id]

    @translated_errors()
    def delete(self, session: AnySession, job_id: int) -> None:
        """Delete a job that does not run, with its attempts and all else on record about it.

        Workers delete ended jobs by themselves, when their time is over.  ``session.delete(job)``
        does the same for a loaded Job.  Checks the deferred constraints of the transaction.

        Args:
            session: A Session or Connection.
            job_id: A job that waits or has ended.

        Raises:
            JobNotFound: There is no such job.
            OptionError: The job runs, an open batch or workflow or another job waits for its end,
                or a row of the application refers to it.

        Example:
            >>> queue.delete(session, job.id)
        """
        self._act("delete", session, job_id)

    @translated_errors()
    def change(
        self,
        session: AnySession,
        job_id: int,
        *,
        priority: int | None = None,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        timeout: timedelta | None = None,
        tags: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        **others: Never,
    ) -> Change:
        """Change a job that waits: where, when and how it runs, or some of its arguments.

        A unique key that was made of the arguments changes with them.  An argument by which the job
        counts in a limit cannot change, nor a key of meta of which its keys are made, and a job
        moves to another queue only if neither has limits.  A job that waits for its retry keeps its
        count of attempts.

        A running or ended job stays as it is, and so does one that already has these values.

        Args:
            session: A Session or Connection, in whose transaction the job is changed.
            job_id: The id of the job.
            priority: From 0, which starts first, to 9.
            delay: Not before this time from now has passed.
            run_at: Not before this time, a datetime with a time zone; a time in the past means now.
            queue: The queue to which the job moves.
            max_attempts: More than the attempts that the job has used up.
            timeout: As of the task's option.
            tags: All tags of the job.
            meta: The keys that change; the others stay.
            args: The arguments to change by name; the others stay.  All are checked as by an
                enqueue.
            **others: No other option can change; each is refused by its name.

        Returns:
            What the call has done.

        Raises:
            JobNotFound: There is no such job.
            OptionError: A value is wrong, none is given, limits hold the job in its queue, or a key
                of its meta cannot change.
            ArgumentsError, PayloadError: The arguments do not fit the task.
            UnknownTask: This application does not have the task whose arguments change, or the meta
                of a job that has a unique key or limits.
            DuplicateJob: Another unfinished job has the new unique key.
        """
        job_id = checked_id(job_id)
        for name in others:
            raise OptionError(
                f"change of job {job_id}: {name} cannot be changed, only {', '.join(CHANGEABLE)}; "
                "enqueue another job with it, and cancel this one"
            )
        changes = Changes(
            priority=priority,
            delay=delay,
            run_at=run_at,
            queue=queue,
            max_attempts=max_attempts,
            timeout=timeout,
            tags=tags,
            meta=meta,
            args=args,
        )
        return self._act("change", session, job_id, changes)

    @translated_errors()
    def run_now(self, session: AnySession, job_id: int) -> Change:
        """Make a waiting job due now, whether it was delayed, snoozed or waits for its retry.

        Uses up no attempt.  A job that is due, running or ended stays as it is.

        Args:
            session: A Session or Connection, in whose transaction the job is changed.
            job_id: The id of the job.

        Returns:
            What the call has done.

        Raises:
            JobNotFound: There is no such job.
        """
        return self._act("run_now", session, job_id)

    @translated_errors()
    def restart_workflow(self, session: AnySession, job_id: int) -> int:
        """Start a workflow that has ended again, from one of its jobs on, as a new workflow.

        The new workflow has copies of the job and of all jobs that follow it, and of the callbacks.
        A copy that waited for other jobs too reads their old results.  The old workflow stays as
        it is.  A requeue, in contrast, lets the same jobs run again, and is for those that have
        failed or were cancelled.

        Args:
            session: A Session or Connection.
            job_id: A job of the workflow, however it has ended.

        Returns:
            The id of the new workflow.  Its first job starts within two seconds after the commit.

        Raises:
            JobNotFound: There is no such job.
            OptionError: The job belongs to no workflow, or to one that has not ended, or is its
                callback.
            DuplicateJob: Another job holds the unique key of a job that would be copied.

        Example:
            >>> workflow_id = queue.restart_workflow(session, failed.id)
        """
        where = f"restart from job {checked_id(job_id)}"
        connection = in_transaction(session, where)
        Jobs(connection).lock(job_id)
        restarts = Restarts(connection)
        workflow = restarts.workflow_of(job_id)
        if workflow is None:
            raise OptionError(f"{where}: it belongs to no workflow; enqueue it again")
        if not workflow.has_ended:
            raise OptionError(
                f"{where}: its workflow {workflow.id} has not ended; wait for its end, or cancel "
                "its jobs"
            )
        if not workflow.is_member:
            raise OptionError(
                f"{where}: it is a callback of workflow {workflow.id}; requeue it, or enqueue it "
                "again"
            )
        nodes, taken = restarts.following(job_id, workflow)
        if taken:
            key = nodes[taken[0]]
            raise DuplicateJob(
                f"{where}: the unique key {key!r} of job {taken[0]}, which would be copied, is "
                "held by this job or by another one, so nothing was changed; requeue this job if "
                f"it has failed, or wait until {when_free(key, 'the holder')}"
            )
        return restarts.restart(workflow, nodes)

    @translated_errors()
    def signal(
        self, session: AnySession, name: str, key: str | int | UUID = "", payload: Any = None
    ) -> int:
        """Send a signal in the caller's transaction, for jobs that wait for it.

        Jobs wait by :meth:`JobContext.wait_for`.  Those that do are woken within milliseconds
        after the commit, however long the transaction was open; without a worker that sleeps, or
        without notifications, within two seconds.  A job that begins to wait later receives the
        signal too, if it was enqueued before.

        Args:
            session: A Session or Connection.
            name: At most 200 characters without white space.
            key: Of what the signal is, for example the id of an order.
            payload: What JSON can express, at most 1 MiB.

        Returns:
            The id of the signal.  It is deleted after 30 days.

        Raises:
            ArgumentsError: A signal cannot have this name or key.
            PayloadError: The payload cannot be written as JSON.

        Example:
            >>> queue.signal(session, "paid", order.id, {"by": "card"})
        """
        name, key = checked_signal("signal", name, key)
        try:
            payload = storable_result(payload)
        except PayloadError as error:
            raise PayloadError(f"signal {name!r}: its payload is {error}") from error
        connection = in_transaction(session, f"signal {name!r}")
        text = None if payload is None else json.dumps(payload)
        notify = self.notify and may_notify(connection)
        return Signals(connection).add(name, key, text, notify=notify)

    @translated_errors()
    def pause(self, session: AnySession, queue: str) -> None:
        """Make all workers skip a queue, within two seconds; enqueuing continues.

        Args:
            session: A Session or Connection, in whose transaction the pause is written.
            queue: The name of the queue; ``"*"``: all queues, also those to come.

        Raises:
            OptionError: No queue can have this name.
        """
        check_queue_or_all(queue)
        Pauses(executor(session)).pause_queue(queue)

    @translated_errors()
    def resume(self, session: AnySession, queue: str) -> None:
        """Undo :meth:`pause`.

        Args:
            session: A Session or Connection, in whose transaction the pause ends.
            queue: The name of the queue; ``"*"``: ends the pause of all queues.  Those that were
                paused by their names stay paused.

        Raises:
            OptionError: No queue can have this name.
        """
        check_queue_or_all(queue)
        Pauses(executor(session)).resume_queue(queue)

    @translated_errors()
    def pause_task(self, session: AnySession, task: str) -> None:
        """Make all workers skip the jobs of a task, within two seconds; enqueuing continues.

        Its schedules continue to enqueue.  A task that this application does not have can be paused
        too.

        Args:
            session: A Session or Connection, in whose transaction the pause is written.
            task: The name of the task, as in ``task.name``.

        Raises:
            OptionError: No task can have this name.
        """
        check_known_task_name(task)
        Pauses(executor(session)).pause_task(task)

    @translated_errors()
    def resume_task(self, session: AnySession, task: str) -> None:
        """Undo :meth:`pause_task`.

        Args:
            session: A Session or Connection, in whose transaction the pause ends.
            task: The name of the task.

        Raises:
            OptionError: No task can have this name.
        """
        check_known_task_name(task)
        Pauses(executor(session)).resume_task(task)

    @translated_errors()
    def pause_key(self, session: AnySession, limit: str, key: Any) -> str:
        """Admit no more jobs of one value of an argument; enqueuing continues.

        Jobs that have been admitted go on.  The same as :meth:`set_limit` with the capacity 0.

        Args:
            session: A Session or Connection, in whose transaction the pause is written.
            limit: The name of a limit by the argument, or of ``fair_by``, as in :meth:`limits`.
            key: The value, or a tuple of several.

        Returns:
            The name under which :meth:`limits` shows the key.

        Raises:
            OptionError: There is no such limit, or it cannot have this key.
        """
        return self.set_limit(session, limit, 0, key=(None,) if key is None else key)

    @translated_errors()
    def resume_key(self, session: AnySession, limit: str, key: Any) -> str:
        """Undo :meth:`pause_key`: the key has the capacity of the other keys again.

        Args:
            session: A Session or Connection, in whose transaction the pause ends.
            limit: The name of the limit.
            key: The value, or a tuple of several.

        Returns:
            The name under which :meth:`limits` has shown the key.

        Raises:
            OptionError: There is no such limit, or it cannot have this key.
        """
        return self.set_limit(session, limit, None, key=(None,) if key is None else key)

    @translated_errors()
    def workers(self, session: AnySession) -> list[WorkerState]:
        """Return the live workers, each with the jobs that it holds.

        A worker is live as long as no other has declared it dead.  ``heartbeat_age`` shows how old
        its last heartbeat is, and ``attempts_ended`` what it had done by then; ``version`` is that
        of its application.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The workers, in the order of their starts.
        """
        return Workers(executor(session)).live()

    @translated_errors()
    def quiet(self, session: AnySession, worker_id: UUID) -> bool:
        """Make a worker claim no more jobs, within a second; it ends the jobs that it has claimed.

        The worker does not exit until it is stopped, because a service manager would restart a
        worker that exits by itself.  :meth:`unquiet` undoes this call.  Commit at once: until then,
        the worker's heartbeat waits.

        Args:
            session: A Session or Connection, in whose transaction the worker is told so.
            worker_id: The id of the worker, as in :meth:`workers`.

        Returns:
            Whether a live worker has this id.

        Raises:
            ArgumentsError: ``worker_id`` is no UUID.
        """
        return Workers(executor(session)).make_quiet(_checked_worker(worker_id))

    @translated_errors()
    def unquiet(self, session: AnySession, worker_id: UUID) -> bool:
        """Undo :meth:`quiet`: the worker claims jobs of its queues again, within two seconds.

        A worker that is not quiet stays as it is.  Commit at once, as after :meth:`quiet`.

        Args:
            session: A Session or Connection, in whose transaction the worker is told so.
            worker_id: The id of the worker, as in :meth:`workers`.

        Returns:
            Whether a live worker has this id.

        Raises:
            ArgumentsError: ``worker_id`` is no UUID.
        """
        return Workers(executor(session)).end_quiet(_checked_worker(worker_id))

    @translated_errors()
    def set_limit(
        self,
        session: AnySession,
        name: str,
        capacity: int | None,
        *,
        key: Any = None,
    ) -> str:
        """Set the capacity of a limit: how many jobs run at once, or start in the period of a rate.

        All workers use the new capacity from their next admission on.  Jobs that have been admitted
        go on; with 0, no more are admitted.

        Args:
            session: A Session or Connection, in whose transaction the capacity is written.
            name: The name of the limit, as in :meth:`limits`.
            capacity: A whole number from 0; None returns to the capacity in the code.
            key: Set the capacity of this key only: the value of the limit's argument, or a tuple of
                several.  Without it, the capacity is that of all keys that have no capacity of
                their own.

        Returns:
            The name under which :meth:`limits` shows the capacity.

        Raises:
            OptionError: The capacity is no such number, is more than 1 in a strict limit, the limit
                cannot have the key, or neither this application nor a worker has declared the
                limit.

        Example:
            >>> shown = queue.set_limit(session, "bank", 2)
        """
        where = f"limit {shown(name)}: "
        if capacity is not None:
            check_capacity(where, capacity)
        limits, own = Limits(executor(session)), self.limited.limits
        if name in own and name not in limits.rules():
            limits.declare_new([own[name]])
        rule = limits.rules().get(name)
        if rule is None:
            known = ", ".join(sorted(limits.rules().keys() | own.keys())) or "none"
            raise OptionError(f"{where}there is no such limit; known are {known}")
        if rule.is_strict and (capacity or 0) > 1:
            raise OptionError(f"{where}its order is strict, and the capacity {capacity}; give 1")
        if key is None:
            limits.set_capacity(name, capacity)
            return name
        values = checked_key(where, own.get(name), key)
        is_secret = any(task.has_secret_key(name) for task in self.tasks.values())
        of_key = key_of(name, values, is_secret=is_secret)
        limits.set_capacity_of_key(name, of_key, capacity)
        return of_key

    @translated_errors()
    def limits(self, session: AnySession) -> list[LimitState]:
        """Return the limits that workers have declared, with the number of held places and of jobs
        that wait.  Reads all of these jobs.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The limits, by name.
        """
        return Limits(executor(session)).all()

    @translated_errors()
    def check(self, session: AnySession) -> list[Violation]:
        """Return every row that breaks an invariant.  Reads all jobs.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The broken rules; empty if all is sound.

        Example:
            >>> assert queue.check(session) == []
        """
        return Invariants(executor(session)).violations()

    @translated_errors()
    def counts(self, session: AnySession) -> list[StatusCount]:
        """Return the number of jobs by queue and status.

        Each status is counted in the table that has its jobs; only the succeeded ones are counted
        in ``jobs``, which reads all of it.  Of damaged jobs, which :meth:`check` reports, one that
        stands in no table is not counted, and one with a message and a lease counts twice.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The numbers, each with its queue and status.
        """
        return Health(executor(session)).counts(succeeded=True)

    def _act(
        self, action: str, session: AnySession, job_id: int, changes: Changes | None = None
    ) -> Change:
        """Do an action on one job in the caller's transaction."""
        context = self._context_of(action, session, job_id, changes)
        return ON_JOBS[action].one(context, job_id, None)

    def _context_of(
        self, action: str, session: AnySession, job_id: int, changes: Changes | None = None
    ) -> ActionContext:
        connection = in_transaction(session, f"{action} of job {checked_id(job_id)}")
        return self.action_context(connection, changes)

    def _cancel_all(
        self, session: AnySession, selection: Selection, where: str
    ) -> dict[Change, int]:
        context = self.action_context(in_transaction(session, where))
        return dict(within(selection, ON_JOBS["cancel"], context))


def _checked_worker(worker_id: Any) -> UUID:
    if not isinstance(worker_id, UUID):
        raise ArgumentsError(
            f"a worker's id is needed here, a UUID, not {type(worker_id).__name__}"
        )
    return worker_id
