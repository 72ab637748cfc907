"""Does an action on jobs: in portions, each counted in the log of operators.

The row in the log is written before the first job is changed.  The jobs are found in ascending
order of their ids.  Of each portion, one statement first changes the jobs that it can, which waits
for nothing.  The jobs that it has left are changed one by one, each in a transaction of its own,
because this may wait for a lock and must hold no other job meanwhile.  Each transaction also moves
the row's cursor.  So a process that is killed loses nothing, and another one goes on from there.
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
from pgqueue.operations.actions import ACTIONS, Action, Doing
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

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"
REFUSED = "refused"
"""The new arguments of the job are wrong, or its handler cannot be killed."""
LOCKED = "locked"
"""Another transaction had locked the job for longer than ``lock_timeout``."""
MISSED = (KEY_TAKEN, REFUSED, LOCKED)
"""A job that matches, and was not changed."""

Begin = Callable[[], AbstractContextManager[Session]]
"""Opens a Session, and commits it at the end of the block."""
Prepare = Callable[[Session], Doing]
"""Returns the action for the connection of a Session."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action on one job."""

    id: int
    change: str
    reason: str | None = None

    @property
    def is_changed(self) -> bool:
        return self.change not in (UNCHANGED, NOT_FOUND, *MISSED)

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"


UNCHANGED = Change.UNCHANGED.name.lower()


class JobLocked(PgQueueError):
    """Another transaction has locked a job; nothing was changed in this one, which has failed."""


def portions(
    begin: Begin, entry: LogEntry, prepare: Prepare
) -> Iterator[tuple[LogEntry, list[Result]]]:
    """Do what is left of an action, and finish it.

    Yields the results of each transaction after its commit, with the action as the log has it then.
    A caller may stop there, and another process go on later.
    """
    selection = Selection.from_target(entry.target).upto(entry.last_id)
    action = ACTIONS[entry.action]
    while entry.finished_at is None and (room := _room(entry)):
        with begin() as session:
            found, end = selection.found(session, after=entry.cursor or 0, limit=room)
        for start in range(0, len(found), PORTION):
            portion = found[start : start + PORTION]
            for moved, results in _portion(begin, entry, action, portion, prepare):
                entry = moved
                yield entry, results
        if end is not None:  # the end of a window: there may be more behind it
            with begin() as session:
                entry = _counted(session, _locked(session, entry), [], cursor=end)
            yield entry, []
        elif len(found) < room:
            break
    with begin() as session:
        _finish(session, entry)


def within(selection: Selection, action: Action, doing: Doing) -> Counter[Change]:
    """Do an action on jobs in the caller's transaction; return how many jobs, by the result.

    It is not in the log.
    """
    counts: Counter[Change] = Counter()
    after, limit = 0, READ_AHEAD
    while True:
        found, end = selection.found(doing.connection, after=after, limit=limit)
        for start in range(0, len(found), PORTION):
            portion = found[start : start + PORTION]
            done = {} if action.many is None else action.many(doing, portion, {})
            counts.update(done.values())
            for job in portion:
                if job.id not in done:
                    counts[_change_or_gone(doing, action, job.id)] += 1
        if end is None and len(found) < limit:
            return +counts
        after = found[-1].id if end is None else end


def _portion(
    begin: Begin, entry: LogEntry, action: Action, found: Sequence[FoundJob], prepare: Prepare
) -> Iterator[tuple[LogEntry, list[Result]]]:
    """Change some jobs: at once those that one statement can, then the others one by one."""
    # Jobs that are named are changed one by one: each has its result, in order.
    if action.many is not None and "filter" in entry.target:
        with begin() as session:
            entry, results = _at_once(session, entry, action, found, prepare)
        if results:
            yield entry, results
        done = {result.id for result in results}
        found = [job for job in found if job.id not in done]
    for job in found:
        if entry.finished_at is not None:
            return
        try:
            with begin() as session:
                entry, results = _one(session, entry, action, job.id, prepare)
        except JobLocked as error:
            with begin() as session:
                results = [Result(job.id, LOCKED, str(error))]
                entry = _counted(session, _locked(session, entry), results, cursor=job.id)
        yield entry, results


def _at_once(
    session: Session, entry: LogEntry, action: Action, found: Sequence[FoundJob], prepare: Prepare
) -> tuple[LogEntry, list[Result]]:
    assert action.many is not None
    entry = _locked(session, entry)
    left = [] if entry.finished_at else [job for job in found if job.id > (entry.cursor or 0)]
    if not left:
        return entry, []
    begun_with = entry.jobs + entry.skipped
    times = {job.id: _due_time(entry, number) for number, job in enumerate(left, begun_with)}
    done = action.many(prepare(session), left, times)
    results = [Result(job_id, change.name.lower()) for job_id, change in done.items()]
    first_left = next((job.id for job in left if job.id not in done), None)
    cursor = left[-1].id if first_left is None else first_left - 1
    return _counted(session, entry, results, cursor=cursor), results


def _one(
    session: Session, entry: LogEntry, action: Action, job_id: int, prepare: Prepare
) -> tuple[LogEntry, list[Result]]:
    """Change one job; no result if another process has done it."""
    entry = _locked(session, entry)
    if entry.finished_at is not None or job_id <= (entry.cursor or 0):
        return entry, []
    run_at = _due_time(entry, entry.jobs + entry.skipped)
    result = _change(prepare(session), action, job_id, run_at)
    if result.change == UNCHANGED:
        status = Listing(session).status(job_id)
        is_known = bool(action.why_unchanged) and status in action.statuses
        reason = action.why_unchanged if is_known else f"its status is {status}"
        result = replace(result, reason=reason)
    return _counted(session, entry, [result], cursor=job_id), [result]


def _change(doing: Doing, action: Action, job_id: int, run_at: datetime | None) -> Result:
    assert action.one is not None
    try:
        return Result(job_id, action.one(doing, job_id, run_at).name.lower())
    except JobNotFound as error:
        return Result(job_id, NOT_FOUND, str(error))
    except DuplicateJob as error:
        holder = f"job {error.holder}" if error.holder else "another job"
        of_queue = "" if KEY_ACROSS_QUEUES in str(error) else " of its queue"
        return Result(job_id, KEY_TAKEN, f"{holder}{of_queue} has its unique key")
    except (ArgumentsError, OptionError, PayloadError, UnknownTask) as error:
        return Result(job_id, REFUSED, redacted(" ".join(str(error).split())))
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_TIMEOUT:
            raise
        raise JobLocked("another transaction has locked it") from error


def _change_or_gone(doing: Doing, action: Action, job_id: int) -> Change:
    assert action.one is not None
    try:
        return action.one(doing, job_id, None)
    except JobNotFound:  # deleted as it succeeded, by keep=timedelta(0)
        return Change.UNCHANGED


def _finish(session: Session, entry: LogEntry) -> None:
    """Note that nothing is left to do."""
    entry = _locked(session, entry)
    if entry.id is not None and entry.finished_at is None:
        OperatorActions(session).move(entry, is_finished=True)


def _locked(session: Session, entry: LogEntry) -> LogEntry:
    """The action as the log has it now; without an id if it is not, or no longer, in the log."""
    if entry.id is None:
        return entry
    return OperatorActions(session).locked(entry.id) or replace(entry, id=None)


def _counted(
    session: Session, entry: LogEntry, results: Sequence[Result], *, cursor: int
) -> LogEntry:
    changed = [result.id for result in results if result.is_changed]
    moved = replace(
        entry,
        jobs=entry.jobs + len(changed),
        skipped=entry.skipped + len(results) - len(changed),
        first_ids=[*entry.first_ids, *changed][:MOST_IDS],
        cursor=max(cursor, entry.cursor or 0),
    )
    if moved.id is not None and moved != entry:
        OperatorActions(session).move(moved, is_finished=False)
    return moved


def _room(entry: LogEntry) -> int:
    """How many jobs are looked for next."""
    limit = entry.options.get("limit")
    left = READ_AHEAD if limit is None else limit - entry.jobs - entry.skipped
    return max(0, min(READ_AHEAD, left))


def spread_of(spread: timedelta | None, jobs: int | None) -> Mapping[str, float]:
    """How jobs are spread, for the log."""
    of = {} if jobs is None else {"of": jobs}
    return of if spread is None else {"spread_s": spread.total_seconds(), **of}


def _due_time(entry: LogEntry, number: int) -> datetime | None:
    """When the job with this number is due, if the jobs are spread."""
    seconds, number_of_jobs = entry.options.get("spread_s"), entry.options.get("of")
    if seconds is None or not number_of_jobs:
        return None
    return entry.at + timedelta(seconds=seconds * min(number, number_of_jobs) / number_of_jobs)
