"""``Operator``: somebody who acts, and whose actions the log of operators keeps."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.database.callers import executor
from pgqueue.errors import OptionError
from pgqueue.models import Job, JobStatus
from pgqueue.operations import engine
from pgqueue.operations.actions import ACTIONS, ON_JOBS, Doing
from pgqueue.operations.engine import Begin, Result
from pgqueue.operations.operations import Operations
from pgqueue.operations.selection import Selection
from pgqueue.repository.error_groups import ErrorGroups, in_hex
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.limits import Limits
from pgqueue.repository.listing import Listing
from pgqueue.repository.operator_actions import MOST_IDS, LogEntry, OperatorActions
from pgqueue.repository.pages import Pages
from pgqueue.tasks import Task
from pgqueue.tasks.editing import Changes

P = ParamSpec("P")
R = TypeVar("R")

logger = redaction.logger(__name__)

SHOWN = 20
"""Jobs that were left as they are, of which the reason is kept."""


class Outcome:
    """What an action on jobs has done so far.

    Iterate over it to do the rest, transaction by transaction; each yields the results of some
    jobs, after the commit.
    """

    entry: LogEntry
    """The action as the log has it; without an id if it is not logged."""
    counts: Counter[str]
    """How many jobs, by what has become of each: ``requeued``, ``unchanged``, ``key_taken`` ..."""
    left: list[Result]
    """The first jobs that were left as they are, with the reasons."""

    def __init__(self, entry: LogEntry, rest: Iterator[tuple[LogEntry, list[Result]]]) -> None:
        self.entry = entry
        self.counts = Counter()
        self.left = []
        self._rest = rest

    @property
    def changed(self) -> int:
        """How many jobs were changed."""
        return self.entry.jobs

    @property
    def skipped(self) -> int:
        """How many jobs were left as they are."""
        return self.entry.skipped

    def __iter__(self) -> Iterator[list[Result]]:
        for entry, results in self._rest:
            self.entry = entry
            self.counts.update(result.change for result in results)
            self.left += [one for one in results if not one.is_changed][: SHOWN - len(self.left)]
            yield results

    def finish(self) -> "Outcome":
        """Do all that is left, and return this."""
        for _ in self:
            pass
        return self

    def __repr__(self) -> str:
        return f"<{self.entry.action}: {self.changed} changed, {self.skipped} skipped>"


class Operator:
    """Acts on jobs, queues, limits, schedules and workers, and writes each action into the log.

    :meth:`PgQueue.operate` returns one.  Each call opens and commits sessions of its own.  An
    action on many jobs commits portion by portion; one that was killed is continued by
    :meth:`go_on`.

    Example::

        ada = queue.operate("ada", reason="the mail server is up again")
        ada.requeue(Selection(task="mail.send", status="failed"), spread=timedelta(minutes=20))
    """

    def __init__(
        self,
        queue: Operations,
        actor: str,
        reason: str = "",
        *,
        begin: Begin | None = None,
        unlogged: Callable[[], object] | None = None,
    ) -> None:
        if not isinstance(actor, str) or not actor:
            raise OptionError("operate: the actor is no text, or an empty one; give a name")
        if not isinstance(reason, str):
            raise OptionError(f"operate: reason is {type(reason).__name__}; give a text")
        self.queue = queue
        self.actor = actor
        self.reason = reason
        self._begin = begin or queue.read_committed
        self._unlogged = unlogged or _warn

    # Jobs

    def requeue(
        self,
        jobs: Selection,
        *,
        spread: timedelta | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Put failed or cancelled jobs back, with all their attempts available again.

        Args:
            jobs: Which jobs.
            spread: Make the jobs due one after the other over this time from now on.
            args: Arguments to change first, by name, in their JSON form.

        Returns:
            What was done, with the reasons of the jobs that were left as they are.

        Raises:
            OptionError: No job that matches can be requeued, or an argument in ``jobs`` is secret.
        """
        changes = None if args is None else Changes(args=args, are_args_stored=True)
        return self.start("requeue", jobs, changes=changes, spread=spread).finish()

    def run_now(self, jobs: Selection) -> Outcome:
        """Make waiting jobs due now; returns and raises as :meth:`requeue` does."""
        return self.start("run_now", jobs).finish()

    def change(
        self,
        jobs: Selection,
        *,
        priority: int | None = None,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        queue: str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Change waiting jobs.

        Args:
            jobs: Which jobs.
            priority: 0 runs first, 9 last.
            delay: Not before, from now.
            run_at: Not before; with a time zone.
            queue: The queue to which the jobs move.
            args: Arguments to change, by name, in their JSON form; others stay.

        Returns and raises as :meth:`requeue` does.
        """
        changes = Changes(
            priority=priority,
            delay=delay,
            run_at=run_at,
            queue=queue,
            args=args,
            are_args_stored=True,
        )
        return self.start("change", jobs, changes=changes).finish()

    def cancel(self, jobs: Selection, *, kill: bool = False) -> Outcome:
        """Cancel jobs: a waiting job ends at once, a running job is asked to stop.

        Args:
            jobs: Which jobs.
            kill: Kill the child processes of running jobs (``executor="process"``).

        Returns and raises as :meth:`requeue` does.
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
    ) -> Outcome:
        """Write an action on jobs into the log, and return it; nothing is changed yet.

        Args:
            action: A key of ``ON_JOBS``.
            jobs: Which jobs.
            changes: What a requeue or a change gives the jobs.
            spread: Over which time from now on the jobs are due.
            limit: At most so many jobs, the oldest first.
            of: How many jobs match, if the caller has counted them.
        """
        if jobs.is_everything and limit is None:
            raise OptionError(
                f"{action}: which jobs? give their ids, or at least one condition, as "
                "Selection(task=...)"
            )
        jobs.check_arguments(self.queue.tasks)
        jobs = jobs.narrowed(ON_JOBS[action])
        with self._begin() as session:
            jobs.check_scope(session)
            log = OperatorActions(session)
            now, last_id = log.now_and_last_job()
            jobs = jobs.at(now)
            if spread is not None:
                of = jobs.upto(last_id).count(session)
            if changes is not None:
                changes = changes.from_now(now)
            options = {
                **({} if changes is None else changes.for_log),
                **engine.spread_of(spread, of),
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
        return self._outcome(entry, changes)

    def go_on(self, action_id: int) -> Outcome:
        """Return an action on jobs that was interrupted, to do what is left of it.

        The log says, once, who goes on with an action of another.

        Raises:
            OptionError: There is no such action, it is finished, or the log does not say all that
                is needed.
        """
        with self._begin() as session:
            log = OperatorActions(session)
            entry = log.one(action_id)
            if entry is None:
                raise OptionError(f"there is no action {action_id}")
            if not is_resumable(entry):
                raise OptionError(f"the log does not say how to go on with action {action_id}")
            is_own = entry.actor == self.actor
            if not is_own and not log.has_continued(self.actor, action_id):
                self._note(session, "continue", {"action": action_id})
        return self._outcome(entry, Changes.from_log(entry.options))

    def try_one(self, jobs: Selection) -> int | None:
        """Requeue the newest failed job of a selection, to see whether it succeeds now.

        Returns its id; None if no job matches.
        """
        which = replace(jobs.which, statuses=frozenset({JobStatus.FAILED}))
        with self._begin() as session:
            newest = Pages(session).page(which, limit=1).jobs
        if not newest:
            return None
        self.requeue(Selection([newest[0].id]))
        return newest[0].id

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
        """Make all workers skip a queue, as :meth:`PgQueue.pause` does."""
        self._done("pause_queue", queue, lambda session: self.queue.pause(session, queue))

    def resume_queue(self, queue: str) -> None:
        """Undo :meth:`pause_queue`."""
        self._done("resume_queue", queue, lambda session: self.queue.resume(session, queue))

    def pause_task(self, task: str) -> None:
        """Make all workers skip a task, as :meth:`PgQueue.pause_task` does."""
        self._done("pause_task", task, lambda session: self.queue.pause_task(session, task))

    def resume_task(self, task: str) -> None:
        """Undo :meth:`pause_task`."""
        self._done("resume_task", task, lambda session: self.queue.resume_task(session, task))

    def pause_key(self, limit: str, key: Any) -> str:
        """Admit no more jobs of a key; returns as :meth:`PgQueue.pause_key` does."""
        return self._of_key("pause_key", limit, key, self.queue.pause_key)

    def resume_key(self, limit: str, key: Any) -> str:
        """Undo :meth:`pause_key`."""
        return self._of_key("resume_key", limit, key, self.queue.resume_key)

    def set_limit(
        self, name: str, capacity: int | None, *, key: Any = None
    ) -> tuple[str, int | None]:
        """Set a capacity, as :meth:`PgQueue.set_limit` does; returns the name, and what it is."""
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
        """Fire no tick of a schedule until :meth:`resume_schedule`.  Raises ScheduleNotFound."""
        self._done("pause_schedule", name, lambda s: self.queue.schedules.pause(s, name))

    def resume_schedule(self, name: str) -> None:
        """Undo :meth:`pause_schedule`; the ticks of the pause are not made up."""
        self._done("resume_schedule", name, lambda s: self.queue.schedules.resume(s, name))

    def trigger_schedule(self, name: str) -> int:
        """Enqueue a job of a schedule now; returns its id.  Raises ScheduleNotFound."""
        with self._begin() as session:
            job_id = self.queue.schedules.trigger(session, name)
            self._note(session, "trigger_schedule", {"schedule": name}, job_ids=[job_id])
        return job_id

    def remove_schedule(self, name: str) -> None:
        """Delete a schedule; its jobs stay.  Raises ScheduleNotFound."""
        self._done("remove_schedule", name, lambda s: self.queue.schedules.remove(s, name))

    def quiet(self, worker_id: UUID) -> bool:
        """Make a worker claim no more jobs; false if no live worker has this id."""
        with self._begin() as session:
            is_quiet = self.queue.quiet(session, worker_id)
            if is_quiet:
                self._note(session, "quiet", {"worker": str(worker_id)})
        return is_quiet

    def mute_error(self, fingerprint: int, task: str, *, hours: int) -> bool:
        """Do not name an error among what needs someone, for some hours; 0: name it again.

        Returns false if the task has no such error.
        """
        with self._begin() as session:
            is_known = ErrorGroups(session).mute(fingerprint, task, timedelta(hours=hours))
            if is_known:
                target = {"error": in_hex(fingerprint), "task": task}
                self._note(session, "mute_error", target, options={"hours": hours})
        return is_known

    def _of_key(self, action: str, limit: str, key: Any, do: Callable[..., str]) -> str:
        with self._begin() as session:
            written = do(session, limit, key)
            self._note(session, action, {"key": written})
        return written

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

    def _outcome(self, entry: LogEntry, changes: Changes | None) -> Outcome:
        def prepare(session: Session) -> Doing:
            return self.queue.doing(executor(session), changes)

        return Outcome(entry, engine.portions(self._begin, entry, prepare))


def is_resumable(entry: LogEntry) -> bool:
    """Whether the log says all that is needed to go on with an action: of new arguments it has
    only the names."""
    is_on_jobs = entry.action in ON_JOBS and bool({"jobs", "filter"} & {*entry.target})
    return is_on_jobs and entry.finished_at is None and "args" not in entry.options


def _before(
    session: Session, jobs: Selection, options: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Of one job, what it was before."""
    if jobs.ids is None or len(jobs.ids) > 1:
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
    """The methods of :class:`Operator` for coroutines, each of which runs in a thread."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    requeue = _in_thread(Operator.requeue)
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
    remove_schedule = _in_thread(Operator.remove_schedule)
    quiet = _in_thread(Operator.quiet)
    mute_error = _in_thread(Operator.mute_error)
    try_one = _in_thread(Operator.try_one)
