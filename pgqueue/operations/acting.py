"""``Operator``: somebody who acts, and whose actions the log of operators keeps."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.checks import check_text, check_whole, checked_id
from pgqueue.database.callers import executor, translated_errors
from pgqueue.errors import OptionError
from pgqueue.filter_line import LAST_ID, LONGEST_MUTE, in_hex
from pgqueue.models import Job, JobStatus
from pgqueue.operations.actions import ACTIONS, ON_JOBS, ActionContext, JobAction
from pgqueue.operations.engine import ActionRun, Begin
from pgqueue.operations.operations import Operations
from pgqueue.operations.progress import LONGEST_SPREAD, spread_of
from pgqueue.operations.selection import Selection, checked_fingerprint
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.limits import Limits
from pgqueue.repository.listing import Listing
from pgqueue.repository.operator_actions import MOST_IDS, LogEntry, OperatorActions
from pgqueue.tasks import Task
from pgqueue.tasks.editing import Changes

P = ParamSpec("P")
R = TypeVar("R")

logger = redaction.logger(__name__)


class Operator:
    """Acts on jobs, queues, limits, schedules and workers, and writes each action into the log.

    :meth:`PgQueue.operate` returns one.  Each call opens and commits sessions of its own.  An
    action on many jobs commits portion by portion; one that was killed is continued by
    :meth:`go_on`.

    Args:
        queue: The queue.
        actor: Who acts, for the log.
        reason: Why, for the log.
        begin: Returns a context manager that opens a Session, and commits it at the end; by default
            :meth:`PgQueue.read_committed`.
        unlogged: Called if the database role may not write the log; by default logs a warning.  The
            action is done all the same, unless this raises.
        is_limited: Whether the operator may see only some of the jobs: then no result names the job
            that holds a unique key.

    Example:
        >>> ada = queue.operate("ada", reason="the mail server is up again")
        >>> failed = Selection(task="mail", status="failed")
        >>> run = ada.requeue(failed, spread=timedelta(minutes=20))
    """

    def __init__(
        self,
        queue: Operations,
        actor: str,
        reason: str = "",
        *,
        begin: Begin | None = None,
        unlogged: Callable[[], object] | None = None,
        is_limited: bool = False,
    ) -> None:
        if not isinstance(actor, str) or not actor:
            raise OptionError("operate: the actor must be a text that is not empty; give a name")
        check_text("operate: ", "actor", actor)
        check_text("operate: ", "reason", reason)
        self.queue = queue
        self.actor = actor
        self.reason = reason
        self._opened = begin or queue.read_committed
        self._unlogged = unlogged or _warn
        self._is_limited = is_limited

    @contextmanager
    def _begin(self) -> Iterator[Session]:
        with translated_errors(), self._opened() as session:
            yield session

    # Jobs

    def requeue(
        self,
        jobs: Selection,
        *,
        spread: timedelta | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> ActionRun:
        """Put failed or cancelled jobs back, with all their attempts available again.

        That no job matches is no error.

        Args:
            jobs: Which jobs.
            spread: Make the jobs due one after the other over this time from now on.
            args: Arguments to change first, by name, in their JSON form.

        Returns:
            What was done, with the reasons of the jobs that were left as they are.

        Raises:
            OptionError: ``jobs`` has no condition, a status of jobs that cannot be requeued, or an
                argument that is secret.
        """
        changes = None if args is None else Changes(args=args, are_args_stored=True)
        return self.start("requeue", jobs, changes=changes, spread=spread).finish()

    def run_again(self, jobs: Selection, *, spread: timedelta | None = None) -> ActionRun:
        """Enqueue copies of jobs that have ended; the old jobs and their attempts stay.

        Args:
            jobs: Which jobs.
            spread: Make the copies due one after the other over this time from now on.

        Returns:
            What was done, as from :meth:`requeue`; the ``last`` result has the id of the last copy.

        Raises:
            OptionError: As by :meth:`requeue`.
        """
        return self.start("run_again", jobs, spread=spread).finish()

    def delete(self, jobs: Selection) -> ActionRun:
        """Delete jobs that do not run, as :meth:`PgQueue.delete` does.

        Args:
            jobs: Which jobs.

        Returns:
            What was done, as from :meth:`requeue`.

        Raises:
            OptionError: As by :meth:`requeue`.
        """
        return self.start("delete", jobs).finish()

    def run_now(self, jobs: Selection) -> ActionRun:
        """Make waiting jobs due now.

        Args:
            jobs: Which jobs.

        Returns:
            What was done, as from :meth:`requeue`.

        Raises:
            OptionError: As by :meth:`requeue`.
        """
        return self.start("run_now", jobs).finish()

    def change(
        self,
        jobs: Selection,
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
    ) -> ActionRun:
        """Change waiting jobs.

        Args:
            jobs: Which jobs.
            priority: 0 runs first, 9 last.
            delay: Not before, from now.
            run_at: Not before; with a time zone.
            queue: The queue to which the jobs move.
            max_attempts: More than the attempts that a job has used up.
            timeout: How long their handlers may run.
            tags: All tags of the jobs; empty: none.
            meta: Keys of their meta that change; others stay.
            args: Arguments to change, by name, in their JSON form; others stay.

        Returns:
            What was done, as from :meth:`requeue`.

        Raises:
            OptionError: As by :meth:`requeue`, or a value is wrong.
        """
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
            are_args_stored=True,
        )
        return self.start("change", jobs, changes=changes).finish()

    def cancel(self, jobs: Selection, *, kill: bool = False) -> ActionRun:
        """Cancel jobs: a waiting job ends at once, a running job is asked to stop.

        Args:
            jobs: Which jobs.
            kill: Kill the child processes of running jobs (``executor="process"``).

        Returns:
            What was done, as from :meth:`requeue`.

        Raises:
            OptionError: As by :meth:`requeue`.
        """
        return self.start("kill" if kill else "cancel", jobs).finish()

    def start(
        self,
        action: str,
        jobs: Selection,
        *,
        changes: Changes | None = None,
        spread: timedelta | None = None,
        limit: int | None = None,
        of: int | None = None,
    ) -> ActionRun:
        """Write an action on jobs into the log, and return it; nothing is changed yet.

        Args:
            action: A key of ``ON_JOBS``.
            jobs: Which jobs.
            changes: What a requeue or a change gives the jobs.
            spread: Over which time from now on the jobs are due.
            limit: At most so many jobs, the oldest first.
            of: How many jobs match, if the caller has counted them.
        """
        row = _checked_action(action)
        is_span = isinstance(spread, timedelta) and timedelta(0) <= spread <= LONGEST_SPREAD
        if spread is not None and not is_span:
            raise OptionError(f"{action}: spread is {spread!r}; give a timedelta from 0 to a year")
        if limit is not None:
            check_whole(f"{action}: ", "limit", limit, 1, LAST_ID)
        changes = changes or row.changes or (Changes() if row.needs_changes else None)
        jobs = self._checked_jobs(action, jobs, is_bound=limit is not None).narrowed(row)
        with self._begin() as session:
            jobs.check_scope(session)
            now, last_id = OperatorActions(session).now_and_last_job()
            jobs = jobs.at(now)
            if spread is not None:
                of = jobs.upto(last_id).count(session, limit=limit)
            if changes is not None:
                changes = changes.from_now(now)
            options = {
                **({} if changes is None else changes.for_log),
                **spread_of(spread, of),
                **({} if limit is None else {"limit": limit}),
            }
            entry = LogEntry(
                at=now,
                actor=self.actor,
                action=action,
                target=jobs.target,
                options=options,
                reason=self.reason,
                before=_before(session, jobs, options),
                last_id=jobs.ids[-1] if jobs.ids else last_id,
            )
            entry = self._written(session, entry)
        return self._run_of(entry, changes)

    def go_on(self, action_id: int) -> ActionRun:
        """Return an action on jobs that was interrupted, to do what is left of it.

        The log says, once, who goes on with an action of another.

        Args:
            action_id: Its id in the log.

        Returns:
            The action; :meth:`ActionRun.finish` does the rest of it.

        Raises:
            OptionError: There is no such action, it is finished, or the log does not say all that
                is needed.
        """
        with self._begin() as session:
            log = OperatorActions(session)
            entry = log.one(checked_id(action_id, "action"))
            if entry is None:
                raise OptionError(f"there is no action {action_id}")
            if why_not := why_not_resumable(entry):
                raise OptionError(f"action {action_id} {why_not}")
            changes = Changes.from_log(entry.options)
            is_own = entry.actor == self.actor
            if not is_own and not log.has_continued(self.actor, action_id):
                self._note(session, "continue", {"action": action_id})
        return self._run_of(entry, changes)

    def try_one(self, jobs: Selection) -> ActionRun | None:
        """Requeue the newest failed job of a selection, to see whether it succeeds now.

        Args:
            jobs: Which jobs.

        Returns:
            What was done with this job; None if no job matches.

        Raises:
            OptionError: ``jobs`` has no condition, or an argument that is secret.
        """
        jobs = self._checked_jobs("try_one", jobs).in_state(JobStatus.FAILED)
        with self._begin() as session:
            newest = jobs.newest(session)
        return None if newest is None else self.requeue(jobs.only(newest))

    def enqueue(
        self, task: Task[..., Any], args: Mapping[str, Any], *, copy_of: int | None = None
    ) -> Job:
        """Enqueue a job, with arguments in their JSON form.

        Args:
            task: The task, with its options.
            args: The arguments by name.
            copy_of: The id of the job that it is a copy of, for the log.

        Returns:
            The job, or the one that holds its unique key (``is_new`` is false).
        """
        task.payload.bind((), dict(args))  # refuses unknown and missing names
        values = task.payload.decode(dict(args), noun="argument")
        with self._begin() as session:
            job = task.enqueue(session, **values)
            if job.is_new:
                copied = {} if copy_of is None else {"copy_of": copy_of}
                about = {"queue": job.queue, "priority": job.priority, **copied}
                target = {"task": task.name}
                self._note(session, "enqueue", target, options=about, job_ids=[job.id])
            session.flush()
            session.refresh(job)
            session.expunge(job)
        return job

    # Queues, tasks, keys, limits

    def pause_queue(self, queue: str) -> None:
        """Make all workers skip a queue, as :meth:`PgQueue.pause` does.

        Args:
            queue: The name of the queue, or ``"*"`` for all.

        Raises:
            OptionError: No queue can have this name.
        """
        self._done("pause_queue", queue, lambda session: self.queue.pause(session, queue))

    def resume_queue(self, queue: str) -> None:
        """Undo :meth:`pause_queue`.

        Args:
            queue: The name of the queue, or ``"*"`` for all.

        Raises:
            OptionError: No queue can have this name.
        """
        self._done("resume_queue", queue, lambda session: self.queue.resume(session, queue))

    def pause_task(self, task: str) -> None:
        """Make all workers skip a task, as :meth:`PgQueue.pause_task` does.

        Args:
            task: The name of the task.

        Raises:
            OptionError: No task can have this name.
        """
        self._done("pause_task", task, lambda session: self.queue.pause_task(session, task))

    def resume_task(self, task: str) -> None:
        """Undo :meth:`pause_task`.

        Args:
            task: The name of the task.

        Raises:
            OptionError: No task can have this name.
        """
        self._done("resume_task", task, lambda session: self.queue.resume_task(session, task))

    def pause_key(self, limit: str, key: Any) -> str:
        """Admit no more jobs of a key.

        Args:
            limit: A limit by argument, or that of ``fair_by``.
            key: The value of its argument, or a tuple of several.

        Returns:
            The name under which :meth:`PgQueue.limits` shows the key.

        Raises:
            OptionError: As by :meth:`PgQueue.pause_key`.
        """
        return self._of_key("pause_key", limit, key, self.queue.pause_key)

    def resume_key(self, limit: str, key: Any) -> str:
        """Undo :meth:`pause_key`.

        Args:
            limit: A limit by argument, or that of ``fair_by``.
            key: The value of its argument, or a tuple of several.

        Returns:
            The name under which :meth:`PgQueue.limits` has shown the key.

        Raises:
            OptionError: As by :meth:`PgQueue.resume_key`.
        """
        return self._of_key("resume_key", limit, key, self.queue.resume_key)

    def set_limit(
        self, name: str, capacity: int | None, *, key: Any = None
    ) -> tuple[str, int | None]:
        """Set a capacity.

        Args:
            name: The limit.
            capacity: The new one; None for that of the code.
            key: A value of the limit's argument, or a tuple of several: only of this key.

        Returns:
            The name under which the capacity stands, and the capacity in force.

        Raises:
            OptionError: As by :meth:`PgQueue.set_limit`.
        """
        with self._begin() as session:
            before = Limits(session).capacities()
            written = self.queue.set_limit(session, name, capacity, key=key)
            after = Limits(session).capacities()
            was, is_now = (known.get(written, known.get(name)) for known in (before, after))
            self._note(
                session,
                "set_limit",
                {"limit": written},
                before={"capacity": was},
                after={"capacity": is_now},
            )
        return written, is_now

    # Schedules, workers, errors

    def pause_schedule(self, name: str) -> None:
        """Fire no tick of a schedule until :meth:`resume_schedule`.

        Args:
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        self._done("pause_schedule", name, lambda s: self.queue.schedules.pause(s, name))

    def resume_schedule(self, name: str) -> None:
        """Undo :meth:`pause_schedule`; the ticks of the pause are not made up.

        Args:
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        self._done("resume_schedule", name, lambda s: self.queue.schedules.resume(s, name))

    def trigger_schedule(self, name: str) -> int:
        """Enqueue a job of a schedule now.

        Args:
            name: The name of the schedule.

        Returns:
            The id of the job.

        Raises:
            ScheduleNotFound: There is no such schedule.
            UnknownTask: This application does not have the task.
        """
        with self._begin() as session:
            job_id = self.queue.schedules.trigger(session, name)
            self._note(session, "trigger_schedule", {"schedule": name}, job_ids=[job_id])
        return job_id

    def backfill_schedule(
        self, name: str, since: datetime, until: datetime | None = None
    ) -> Sequence[int]:
        """Enqueue a job for each tick of a schedule in a time that has passed.

        Args:
            name: The name of the schedule.
            since: The first tick is at this time or later.
            until: The last tick is before this time.  None: now.

        Returns:
            The ids of the jobs, in the order of their ticks.

        Raises:
            ScheduleNotFound, OptionError, UnknownTask: As by :meth:`Schedules.backfill`.
        """
        with self._begin() as session:
            ids = self.queue.schedules.backfill(session, name, since, until)
            times = {"since": since.isoformat(), "until": until and until.isoformat()}
            about: dict[str, Any] = {"options": times, "job_ids": ids}
            self._note(session, "backfill_schedule", {"schedule": name}, **about)
        return ids

    def remove_schedule(self, name: str) -> None:
        """Delete a schedule; its jobs stay.

        Args:
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        self._done("remove_schedule", name, lambda s: self.queue.schedules.remove(s, name))

    def quiet(self, worker_id: UUID) -> bool:
        """Make a worker claim no more jobs, as :meth:`PgQueue.quiet` does.

        Args:
            worker_id: The id of the worker.

        Returns:
            Whether a live worker has this id.

        Raises:
            ArgumentsError: ``worker_id`` is no UUID.
        """
        return self._of_worker("quiet", worker_id, self.queue.quiet)

    def unquiet(self, worker_id: UUID) -> bool:
        """Make a quiet worker claim jobs again, as :meth:`PgQueue.unquiet` does.

        Args:
            worker_id: The id of the worker.

        Returns:
            Whether a live worker has this id.

        Raises:
            ArgumentsError: ``worker_id`` is no UUID.
        """
        return self._of_worker("unquiet", worker_id, self.queue.unquiet)

    def restart_workflow(self, job_id: int) -> int:
        """Start a workflow again from a job on, as :meth:`PgQueue.restart_workflow` does.

        Args:
            job_id: A job of the workflow, however it has ended.

        Returns:
            The id of the new workflow.

        Raises:
            JobNotFound, OptionError, DuplicateJob: As by :meth:`PgQueue.restart_workflow`.
        """
        with self._begin() as session:
            workflow_id = self.queue.restart_workflow(session, job_id)
            target = {"workflow": str(workflow_id)}
            self._note(session, "restart_workflow", target, job_ids=[job_id])
        return workflow_id

    def signal(self, name: str, key: str | int | UUID = "", payload: Any = None) -> int:
        """Send a signal, as :meth:`PgQueue.signal` does.  The log has its name and key, and not its
        payload.

        Args:
            name: The name of the signal.
            key: Of what the signal is.
            payload: What JSON can express.

        Returns:
            The id of the signal.

        Raises:
            ArgumentsError, PayloadError: As by :meth:`PgQueue.signal`.
        """
        with self._begin() as session:
            signal_id = self.queue.signal(session, name, key, payload)
            self._note(session, "signal", {"signal": f"{name} {key}".strip()})
        return signal_id

    def mute_error(self, error: str | int, task: str, *, hours: int) -> bool:
        """Leave an error out of the lists of problems for some hours.

        Args:
            error: The error, as ``pgqueue failures`` prints it, or its number.
            task: The task that fails with it.
            hours: For how long, at most a week; 0 ends it.

        Returns:
            Whether the task has had such an error.
        """
        check_whole("mute_error: ", "hours", hours, 0, LONGEST_MUTE)
        fingerprint = checked_fingerprint("mute_error: ", error)
        with self._begin() as session:
            is_known = ErrorGroups(session).mute(fingerprint, task, timedelta(hours=hours))
            if is_known:
                target = {"error": in_hex(fingerprint), "task": task}
                self._note(session, "mute_error", target, options={"hours": hours})
        return is_known

    def _checked_jobs(self, what: str, jobs: Selection, *, is_bound: bool = False) -> Selection:
        """Raise OptionError for jobs that an action may not be on."""
        if not isinstance(jobs, Selection):
            raise OptionError(
                f"{what}: the jobs are {type(jobs).__name__}; give a Selection, as "
                "Selection([4711]) or Selection(task=...)"
            )
        if not is_bound:
            jobs.check_not_everything(what)
        jobs.check_arguments(self.queue.tasks)
        return jobs

    def _of_key(self, action: str, limit: str, key: Any, do: Callable[..., str]) -> str:
        with self._begin() as session:
            written = do(session, limit, key)
            self._note(session, action, {"key": written})
        return written

    def _of_worker(self, action: str, worker_id: UUID, do: Callable[..., bool]) -> bool:
        with self._begin() as session:
            lives = do(session, worker_id)
            if lives:
                self._note(session, action, {"worker": str(worker_id)})
        return lives

    def _done(self, action: str, name: str, do: Callable[[Session], object]) -> None:
        with self._begin() as session:
            do(session)
            self._note(session, action, {ACTIONS[action].target.value: name})

    def _note(
        self, session: Session, action: str, target: Mapping[str, Any], **about: Any
    ) -> LogEntry:
        """Write an action that the same transaction has done."""
        ids = about.pop("job_ids", ())
        entry = LogEntry(
            actor=self.actor,
            action=action,
            target=target,
            reason=self.reason,
            jobs=len(ids),
            first_ids=sorted(ids)[:MOST_IDS],
            **about,
        )
        return self._written(session, entry)

    def _written(self, session: Session, entry: LogEntry) -> LogEntry:
        """A role without the right to write the log, as that of workers, can act all the same."""
        log = OperatorActions(session)
        if log.may_write():
            return log.add(entry)
        self._unlogged()
        return entry

    def _run_of(self, entry: LogEntry, changes: Changes | None) -> ActionRun:
        def prepare(session: Session) -> ActionContext:
            return self.queue.action_context(executor(session), changes)

        return ActionRun(entry, self._begin, prepare, names_holder=not self._is_limited)


def why_not_resumable(entry: LogEntry) -> str:
    """Why an action cannot be continued; empty if it can be."""
    if entry.finished_at is not None:
        return "is finished"
    if entry.action not in ON_JOBS or not {"jobs", "filter"} & {*entry.target}:
        return "is on no jobs"
    if "args" in entry.options:
        return "gives jobs new arguments, of which the log has only the names: begin it anew"
    return ""


def _checked_action(name: str) -> JobAction:
    if name not in ON_JOBS:
        raise OptionError(f"there is no action {name!r} on jobs; there are {', '.join(ON_JOBS)}")
    return ON_JOBS[name]


def _before(
    session: Session, jobs: Selection, options: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Of one job, what it was before."""
    if jobs.ids is None or len(jobs.ids) != 1:
        return None
    [job_id] = jobs.ids
    status = Listing(session).status(job_id)
    if status is None:
        return None
    values = Jobs(session).values(job_id, with_args=False)
    changed = {
        "priority": values.priority,
        "run_at": values.run_at.isoformat(),
        "queue": values.queue,
        "max_attempts": values.max_attempts,
        "tags": values.tags,
        "meta": values.meta,
    }
    return {"status": status, **{name: changed[name] for name in changed if name in options}}


def _warn() -> None:
    logger.warning("this role may not write the log of operators: the action is not logged")


def _in_thread(
    method: Callable[Concatenate[Operator, P], R],
) -> "Callable[Concatenate[AsyncOperator, P], Coroutine[Any, Any, R]]":
    async def call(self: "AsyncOperator", /, *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(method, self.operator, *args, **options)

    call.__doc__ = method.__doc__
    return call


class AsyncOperator:
    """An :class:`Operator` for coroutines: it has the same methods, each is awaited and runs in a
    thread.

    :meth:`PgQueue.operate_async` returns one.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    async def go_on(self, action_id: int) -> ActionRun:
        """Do what is left of an action on jobs that was interrupted.

        Args:
            action_id: Its id in the log.

        Returns:
            The action, finished.

        Raises:
            OptionError: As by :meth:`Operator.go_on`.
        """
        return await asyncio.to_thread(lambda: self.operator.go_on(action_id).finish())

    requeue = _in_thread(Operator.requeue)
    run_again = _in_thread(Operator.run_again)
    delete = _in_thread(Operator.delete)
    run_now = _in_thread(Operator.run_now)
    change = _in_thread(Operator.change)
    cancel = _in_thread(Operator.cancel)
    enqueue = _in_thread(Operator.enqueue)
    pause_queue = _in_thread(Operator.pause_queue)
    resume_queue = _in_thread(Operator.resume_queue)
    pause_task = _in_thread(Operator.pause_task)
    resume_task = _in_thread(Operator.resume_task)
    pause_key = _in_thread(Operator.pause_key)
    resume_key = _in_thread(Operator.resume_key)
    set_limit = _in_thread(Operator.set_limit)
    pause_schedule = _in_thread(Operator.pause_schedule)
    resume_schedule = _in_thread(Operator.resume_schedule)
    trigger_schedule = _in_thread(Operator.trigger_schedule)
    backfill_schedule = _in_thread(Operator.backfill_schedule)
    remove_schedule = _in_thread(Operator.remove_schedule)
    quiet = _in_thread(Operator.quiet)
    unquiet = _in_thread(Operator.unquiet)
    restart_workflow = _in_thread(Operator.restart_workflow)
    signal = _in_thread(Operator.signal)
    mute_error = _in_thread(Operator.mute_error)
    try_one = _in_thread(Operator.try_one)
