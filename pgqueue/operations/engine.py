"""Does an action on jobs: in portions, each counted in the log of operators.

The row in the log is written before the first job is changed.  The jobs are found in ascending
order of their ids.  Of each portion, one statement first changes the jobs that it can, which waits
for nothing.  The jobs that it has left are changed one by one, each in a transaction of its own,
because this may wait for a lock and must hold no other job meanwhile.  Each transaction also notes
in the row how far the action has come.  So a process that is killed loses nothing, and another one
goes on from there.

:func:`within` does the same in one transaction of the caller, without the log.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from pgqueue.database.bounded import LOCK_TIMEOUT
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
from pgqueue.operations.selection import Selection
from pgqueue.redaction import redacted
from pgqueue.repository.jobs import Change
from pgqueue.repository.listing import FoundJob, Listing
from pgqueue.repository.operator_actions import MOST_IDS, LogEntry, OperatorActions
from pgqueue.rules.unique import KEY_ACROSS_QUEUES

PORTION = 500
"""Jobs that one statement changes; their rows stay locked until its transaction ends."""
READ_AHEAD = 10_000
"""Jobs that are found at once: those that wait are in no index, and are sorted."""

SHOWN = 20
"""Jobs that were left as they are, of which the reason is kept."""

UNCHANGED = Change.UNCHANGED.name.lower()
DEADLOCK = "40P01"

LONGEST_SPREAD = timedelta(days=366)

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"
REFUSED = "refused"
"""The new arguments of the job are wrong, or its handler cannot be killed."""
LOCKED = "locked"
"""Another transaction had locked the job for longer than ``lock_timeout``, or waited for us."""

Begin = Callable[[], AbstractContextManager[Session]]
"""Opens a Session, and commits it at the end of the block."""
Prepare = Callable[[Session], ActionContext]
"""Returns what an action on jobs needs on the connection of a Session."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action on one job."""

    id: int
    change: str
    reason: str | None = None

    @property
    def is_changed(self) -> bool:
        return self.change != UNCHANGED and not self.is_missed

    @property
    def is_missed(self) -> bool:
        """Whether it was to be changed, and could not be."""
        return self.change in (NOT_FOUND, KEY_TAKEN, REFUSED, LOCKED)

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"


class JobLocked(PgQueueError):
    """Another transaction has locked a job; nothing was changed in this one, which has failed."""


class Outcome:
    """An action on jobs, and what it has done so far.

    Iterate over it to do the rest, transaction by transaction; each yields the results of some
    jobs, after the commit.  Who stops there leaves the rest to :meth:`Operator.go_on`.
    """

    entry: LogEntry
    """The action as the log has it; without an id if it is not logged."""
    counts: Counter[str]
    """How many jobs, by what has become of each: ``requeued``, ``unchanged``, ``key_taken`` ..."""
    left: list[Result]
    """The first twenty jobs that were left as they are, with the reasons."""
    last: Result | None
    """The result for the last job so far."""

    def __init__(
        self, entry: LogEntry, begin: Begin, prepare: Prepare, *, names_holder: bool
    ) -> None:
        """``names_holder``: whether a result may name the job that holds a unique key."""
        self.entry = entry
        self.counts = Counter()
        self.left = []
        self.last = None
        self._begin = begin
        self._prepare = prepare
        self._action = ON_JOBS[entry.action]
        self._jobs = Selection.from_target(entry.target).upto(entry.last_id)
        self._names_holder = names_holder
        self._rest = self._steps()

    @property
    def changed(self) -> int:
        """How many jobs were changed."""
        return self.entry.jobs

    @property
    def skipped(self) -> int:
        """How many jobs were left as they are."""
        return self.entry.skipped

    def __iter__(self) -> Iterator[list[Result]]:
        for results in self._rest:
            self.counts.update(result.change for result in results)
            self.left += [one for one in results if not one.is_changed][: SHOWN - len(self.left)]
            self.last = results[-1] if results else self.last
            yield results

    def finish(self) -> "Outcome":
        """Do the rest of the action; returns this outcome."""
        for _ in self:
            pass
        return self

    def __repr__(self) -> str:
        return f"<{self.entry.action}: {self.changed} changed, {self.skipped} skipped>"

    def _steps(self) -> Iterator[list[Result]]:
        while self.entry.finished_at is None:
            yield from self._one_by_one(self.entry.left_ids)  # of a process that was killed
            room = _room(self.entry)
            with self._begin() as session:
                after = self.entry.cursor or 0
                found, end = self._jobs.found(session, after=after, limit=room)
            for start in range(0, len(found), PORTION):
                yield from self._portion(found[start : start + PORTION])
            if end is not None:  # the end of a window: there may be more behind it
                with self._begin() as session:
                    self._lock(session)
                    self._count(session, [], cursor=end)
                yield []
            elif len(found) < room or not _room(self.entry):
                self._end()

    def _portion(self, found: Sequence[FoundJob]) -> Iterator[list[Result]]:
        """Change some jobs: at once those that one statement can, then the others one by one."""
        # Jobs that are named are changed one by one: each has its result, in order.
        if self._jobs.ids is not None:
            yield from self._one_by_one([job.id for job in found])
            return
        with self._begin() as session:
            results = self._at_once(session, found)
        yield results
        yield from self._one_by_one(self.entry.left_ids)

    def _at_once(self, session: Session, found: Sequence[FoundJob]) -> list[Result]:
        entry = self._lock(session)
        # Another process with this action may have passed these jobs, or used up its limit.
        left = [job for job in found if job.id > (entry.cursor or 0)][: _room(entry)]
        if entry.finished_at is not None or not left:
            return []
        # Since they were found, some may have moved on, to where they are not meant any more.
        matching = self._jobs.matching(session, [job.id for job in left])
        number = entry.jobs + entry.skipped
        times = {job.id: _due_time(entry, at) for at, job in enumerate(left, number)}
        still = [job for job in left if job.id in matching]
        wanted = {job.id: times[job.id] for job in still}
        done = self._action.many(self._prepare(session), still, wanted)
        results = [Result(job_id, change.name.lower()) for job_id, change in done.items()]
        left_ids = [*entry.left_ids, *(job.id for job in left if job.id not in done)]
        self._count(session, results, cursor=left[-1].id, left_ids=left_ids)
        return results

    def _one_by_one(self, job_ids: Sequence[int]) -> Iterator[list[Result]]:
        for job_id in job_ids:
            try:
                with self._begin() as session:
                    results = self._one(session, job_id)
            except JobLocked as error:
                with self._begin() as session:
                    results = self._one(session, job_id, instead=Result(job_id, LOCKED, str(error)))
            yield results

    def _one(self, session: Session, job_id: int, *, instead: Result | None = None) -> list[Result]:
        """Change one job; no result if another process has done it.  ``instead``: its result."""
        entry = self._lock(session)
        is_left = job_id in entry.left_ids
        if entry.finished_at is not None or not (is_left or job_id > (entry.cursor or 0)):
            return []
        run_at = _due_time(entry, entry.jobs + entry.skipped)
        result = instead or self._result(session, job_id, run_at)
        left_ids = [id for id in entry.left_ids if id != job_id]
        cursor = entry.cursor or 0 if is_left else job_id
        self._count(session, [result], cursor=cursor, left_ids=left_ids)
        return [result]

    def _result(self, session: Session, job_id: int, run_at: datetime | None) -> Result:
        listing, action = Listing(session), self._action
        if self._jobs.ids is None:
            status = listing.status(job_id)
            is_meant = status in self._jobs.which.statuses
            if not is_meant or job_id not in self._jobs.matching(session, [job_id]):
                why = "it does not match any more" if is_meant else f"its status is {status}"
                return Result(job_id, UNCHANGED, why)
        result = _change(
            self._prepare(session), action, job_id, run_at, names_holder=self._names_holder
        )
        if result.change != UNCHANGED:
            return result
        status = listing.status(job_id)
        is_known = bool(action.why_unchanged) and status in action.statuses
        why = action.why_unchanged if is_known else f"its status is {status}"
        return replace(result, reason=why)

    def _lock(self, session: Session) -> LogEntry:
        """Read how far the action has come; without an id if it is not, or no longer, in the log.

        Other processes wait until this transaction ends.
        """
        if self.entry.id is not None:
            locked = OperatorActions(session).locked(self.entry)
            self.entry = locked or replace(self.entry, id=None)
        return self.entry

    def _count(
        self,
        session: Session,
        results: Sequence[Result],
        *,
        cursor: int,
        left_ids: Sequence[int] | None = None,
    ) -> None:
        """Note in the log how far the action has come."""
        entry = self.entry
        changed = [result.id for result in results if result.is_changed]
        self.entry = replace(
            entry,
            jobs=entry.jobs + len(changed),
            skipped=entry.skipped + len(results) - len(changed),
            first_ids=[*entry.first_ids, *changed][:MOST_IDS],
            cursor=max(cursor, entry.cursor or 0),
            left_ids=entry.left_ids if left_ids is None else left_ids,
        )
        if entry.id is not None and entry.finished_at is None and self.entry != entry:
            OperatorActions(session).move(self.entry, is_finished=False)

    def _end(self) -> None:
        """Note that nothing is left to do, unless another process is still at it."""
        with self._begin() as session:
            entry, log = self._lock(session), OperatorActions(session)
            if entry.finished_at is None and not entry.left_ids:
                if entry.id is not None:
                    log.move(entry, is_finished=True)
                    self._lock(session)
                else:
                    self.entry = replace(entry, finished_at=log.now_and_last_job()[0])


def within(selection: Selection, action: JobAction, context: ActionContext) -> Counter[Change]:
    """Do an action on jobs in the caller's transaction; return how many jobs, by the result.

    It is not in the log.
    """
    counts: Counter[Change] = Counter()
    after, limit = 0, READ_AHEAD
    while True:
        found, end = selection.found(context.connection, after=after, limit=limit)
        for start in range(0, len(found), PORTION):
            portion = found[start : start + PORTION]
            now = {job.id: None for job in portion}
            done = action.many(context, portion, now)
            counts.update(done.values())
            for job in portion:
                if job.id not in done:
                    counts[_change_or_gone(context, action, job.id)] += 1
        if end is None and len(found) < limit:
            return +counts
        after = found[-1].id if end is None else end


def _change(
    context: ActionContext,
    action: JobAction,
    job_id: int,
    run_at: datetime | None,
    *,
    names_holder: bool,
) -> Result:
    try:
        return Result(job_id, action.one(context, job_id, run_at).name.lower())
    except JobNotFound as error:
        return Result(job_id, NOT_FOUND, str(error))
    except DuplicateJob as error:
        holder = f"job {error.holder}" if error.holder and names_holder else "another job"
        of_queue = "" if KEY_ACROSS_QUEUES in str(error) else " of its queue"
        return Result(job_id, KEY_TAKEN, f"{holder}{of_queue} has its unique key")
    except (ArgumentsError, OptionError, PayloadError, UnknownTask) as error:
        return Result(job_id, REFUSED, redacted(" ".join(str(error).split())))
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) not in (LOCK_TIMEOUT, DEADLOCK):
            raise
        raise JobLocked("another transaction has locked it") from error


def _change_or_gone(context: ActionContext, action: JobAction, job_id: int) -> Change:
    try:
        return action.one(context, job_id, None)
    except JobNotFound:  # deleted as it succeeded, by keep=timedelta(0)
        return Change.UNCHANGED


def _room(entry: LogEntry) -> int:
    """How many jobs are looked for next."""
    limit = entry.options.get("limit")
    if not isinstance(limit, int):
        return READ_AHEAD
    return max(0, min(READ_AHEAD, limit - entry.jobs - entry.skipped - len(entry.left_ids)))


def spread_of(spread: timedelta | None, jobs: int | None) -> Mapping[str, float]:
    """How jobs are spread, for the log."""
    of = {} if jobs is None else {"of": jobs}
    return of if spread is None else {"spread_s": spread.total_seconds(), **of}


def _due_time(entry: LogEntry, number: int) -> datetime | None:
    """When the job with this number is due, if the jobs are spread."""
    seconds, number_of_jobs = entry.options.get("spread_s"), entry.options.get("of")
    if not isinstance(seconds, int | float) or not isinstance(number_of_jobs, int):
        return None
    if number_of_jobs <= 0 or not 0 <= seconds <= LONGEST_SPREAD.total_seconds():
        return None  # a hand has written it
    return entry.at + timedelta(seconds=seconds * min(number, number_of_jobs) / number_of_jobs)
