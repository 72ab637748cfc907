"""Does an action on jobs: in portions, each recorded in the log of operators.

The row in the log is written before the first job is changed.  The jobs are found in ascending
order of their ids.  For each portion of them, one statement first changes the jobs that it can,
and waits for no lock.  The others are then changed one by one, each in its own transaction, because
such a transaction may wait for a lock, and must hold no lock of another job meanwhile.  Each
transaction also records in the row how far the action has come.  So a process that is killed loses
nothing, and another one continues there.

:func:`within` does an action in one transaction of the caller, without the log.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from pgqueue.database.sqlstates import DEADLOCK, LOCK_TIMEOUT, sqlstate_of
from pgqueue.errors import (
    ArgumentsError,
    DuplicateJob,
    JobNotFound,
    OptionError,
    PayloadError,
    PgQueueError,
    UnknownTask,
)
from pgqueue.operations.actions import ON_JOBS, ActionContext, JobAction
from pgqueue.operations.progress import Progress
from pgqueue.operations.results import Effect, Result
from pgqueue.operations.selection import Selection
from pgqueue.redaction import redacted
from pgqueue.repository.jobs import Change
from pgqueue.repository.listing import Listing
from pgqueue.repository.messages import FoundJob
from pgqueue.repository.operator_actions import LogEntry
from pgqueue.rules.unique import KEY_ACROSS_QUEUES

PORTION = 500
"""Jobs that one statement changes; their rows stay locked until its transaction ends."""
READ_AHEAD = 10_000
"""Jobs that one search finds: no index has waiting jobs by their ids, so each search sorts them."""

SHOWN = 20
"""How many results of unchanged jobs are kept."""

Begin = Callable[[], AbstractContextManager[Session]]
"""Opens a Session, and commits it at the end of the block."""
Prepare = Callable[[Session], ActionContext]
"""Returns what an action on jobs needs on the connection of a Session."""


class JobLocked(PgQueueError):
    """Another transaction has locked a job.  Rolls back this one, which cannot go on."""


class ActionRun:
    """An action on jobs, and what it has done so far.

    Iterate over it to do the rest, transaction by transaction: each step yields the results of some
    jobs, after the commit.  Leave the loop to stop early; :meth:`Operator.go_on` continues the
    action.
    """

    counts: Counter[str]
    """How many jobs, by what the action has done to each: ``requeued``, ``unchanged``,
    ``key_taken`` ..."""
    left: list[Result]
    """The results of the first twenty jobs that were not changed, with the reasons."""
    last: Result | None
    """The result for the last job so far."""

    def __init__(
        self, entry: LogEntry, begin: Begin, prepare: Prepare, *, names_holder: bool
    ) -> None:
        """``names_holder``: whether a result may name the job that holds a unique key."""
        self.counts = Counter()
        self.left = []
        self.last = None
        self._begin = begin
        self._prepare = prepare
        self._action = ON_JOBS[entry.action]
        self._jobs = Selection.from_target(entry.target).upto(entry.last_id)
        self._names_holder = names_holder
        self._progress = Progress(entry)
        self._rest = self._steps()

    @property
    def entry(self) -> LogEntry:
        """The action as the log has it; without an id if it is not logged."""
        return self._progress.entry

    @property
    def changed(self) -> int:
        """How many jobs were changed."""
        return self.entry.jobs

    @property
    def skipped(self) -> int:
        """How many jobs were not changed."""
        return self.entry.skipped

    def __iter__(self) -> Iterator[list[Result]]:
        for results in self._rest:
            self.counts.update(result.change for result in results)
            self.left += [one for one in results if not one.is_changed][: SHOWN - len(self.left)]
            self.last = results[-1] if results else self.last
            yield results

    def finish(self) -> "ActionRun":
        """Do the rest of the action.

        Returns:
            This object.
        """
        for _ in self:
            pass
        return self

    def __repr__(self) -> str:
        return f"<{self.entry.action}: {self.changed} changed, {self.skipped} skipped>"

    def _steps(self) -> Iterator[list[Result]]:
        progress = self._progress
        while not progress.is_finished:
            yield from self._one_by_one(progress.left_ids)  # of a process that was killed
            with self._begin() as session:
                window = self._jobs.next_window(
                    session, after=progress.cursor, limit=progress.room(READ_AHEAD)
                )
            for portion in _portions(window.jobs):
                yield from self._portion(portion)
            if window.is_last or not progress.room(1):
                self._end()
            elif window.searched_to > progress.cursor:
                self._move_cursor(window.searched_to)
                yield []

    def _portion(self, portion: Sequence[FoundJob]) -> Iterator[list[Result]]:
        if self._jobs.ids is not None:  # named jobs: each has its result, in their order
            yield from self._one_by_one([job.id for job in portion])
            return
        with self._begin() as session:
            results = self._at_once(session, portion)
        yield results
        yield from self._one_by_one(self._progress.left_ids)

    def _at_once(self, session: Session, portion: Sequence[FoundJob]) -> list[Result]:
        """Change as many jobs of a portion as one statement can, and leave the others."""
        progress = self._progress
        progress.lock(session)
        # Another process with this action may have passed these jobs, or used up its limit.
        jobs = [job for job in portion if job.id > progress.cursor][: progress.room(PORTION)]
        if progress.is_finished or not jobs:
            return []
        # Jobs may have changed since they were found, and not match any more.
        matching = self._jobs.matching(session, [job.id for job in jobs])
        numbered = enumerate(jobs, progress.number_done)
        due = [(job, progress.due_at(number)) for number, job in numbered if job.id in matching]
        times = {job.id: at for job, at in due}
        changes = self._action.many(self._prepare(session), [job for job, _ in due], times)
        results = [Result(job_id, Effect[change.name]) for job_id, change in changes.items()]
        left = [job.id for job in jobs if job.id not in changes]
        progress.record(session, results, cursor=jobs[-1].id, left=left)
        return results

    def _one_by_one(self, job_ids: Sequence[int]) -> Iterator[list[Result]]:
        for job_id in job_ids:
            try:
                with self._begin() as session:
                    results = self._one(session, job_id)
            except JobLocked as error:
                locked = Result(job_id, Effect.LOCKED, str(error))
                with self._begin() as session:
                    results = self._one(session, job_id, result=locked)
            yield results

    def _one(self, session: Session, job_id: int, *, result: Result | None = None) -> list[Result]:
        """Change one job, and record the result; nothing if another process has changed it.

        ``result``: only record this result, of a transaction that has rolled back.
        """
        self._progress.lock(session)
        if self._progress.is_done(job_id):
            return []
        result = result or self._result(session, job_id)
        self._progress.record(session, [result], cursor=job_id)
        return [result]

    def _result(self, session: Session, job_id: int) -> Result:
        """Change one job, if it still matches; wait for its lock."""
        listing, action = Listing(session), self._action
        if self._jobs.ids is None:
            status = listing.status(job_id)
            is_meant = status in self._jobs.which.statuses
            if not is_meant or job_id not in self._jobs.matching(session, [job_id]):
                why = "it does not match any more" if is_meant else f"its status is {status}"
                return Result(job_id, Effect.UNCHANGED, why)
        result = self._act(self._prepare(session), job_id)
        if result.change is not Effect.UNCHANGED:
            return result
        status = listing.status(job_id)
        is_known = bool(action.why_unchanged) and status in action.statuses
        why = action.why_unchanged if is_known else f"its status is {status}"
        return replace(result, reason=why)

    def _act(self, context: ActionContext, job_id: int) -> Result:
        """Change one job; an error that only this job causes becomes its result."""
        run_at = self._progress.due_at(self._progress.number_done)
        try:
            change = self._action.one(context, job_id, run_at)
            copy_id = context.copies.get(job_id)
            return Result(job_id, Effect[change.name], copy_id=copy_id)
        except JobNotFound as error:
            return Result(job_id, Effect.NOT_FOUND, str(error))
        except DuplicateJob as error:
            is_named = error.holder and self._names_holder
            holder = f"job {error.holder}" if is_named else "another job"
            of_queue = "" if KEY_ACROSS_QUEUES in str(error) else " of its queue"
            return Result(job_id, Effect.KEY_TAKEN, f"{holder}{of_queue} has its unique key")
        except (ArgumentsError, OptionError, PayloadError, UnknownTask) as error:
            return Result(job_id, Effect.REFUSED, redacted(" ".join(str(error).split())))
        except OperationalError as error:
            if sqlstate_of(error) not in (LOCK_TIMEOUT, DEADLOCK):
                raise
            raise JobLocked("another transaction has locked it") from error

    def _move_cursor(self, searched_to: int) -> None:
        with self._begin() as session:
            self._progress.lock(session)
            if not self._progress.is_finished:
                self._progress.record(session, [], cursor=searched_to)

    def _end(self) -> None:
        """Finish, unless another process has left jobs that are still to be changed."""
        with self._begin() as session:
            self._progress.lock(session)
            if not self._progress.is_finished and not self._progress.left_ids:
                self._progress.finish(session)


def within(selection: Selection, action: JobAction, context: ActionContext) -> Counter[Change]:
    """Do an action on jobs in the caller's transaction, without the log.

    Returns:
        How many jobs, by the result.
    """
    counts: Counter[Change] = Counter()
    after, is_last = 0, False
    while not is_last:
        jobs, after, is_last = selection.next_window(
            context.connection, after=after, limit=READ_AHEAD
        )
        for portion in _portions(jobs):
            changes = action.many(context, portion, {job.id: None for job in portion})
            counts.update(changes.values())
            left = [job.id for job in portion if job.id not in changes]
            counts.update(_change_or_gone(context, action, job_id) for job_id in left)
    return counts


def _change_or_gone(context: ActionContext, action: JobAction, job_id: int) -> Change:
    try:
        return action.one(context, job_id, None)
    except JobNotFound:  # deleted as it succeeded, by keep=timedelta(0)
        return Change.UNCHANGED


def _portions(jobs: Sequence[FoundJob]) -> Iterator[Sequence[FoundJob]]:
    for start in range(0, len(jobs), PORTION):
        yield jobs[start : start + PORTION]
