"""Actions of operators on many jobs, in portions, each counted in the log of operators.

An action has a row in ``operator_actions``, if the role may write the log; the row is written
before the first job is changed.  A portion changes jobs in ascending order of their ids, and moves
the row's cursor, in one transaction.  So a process that is killed loses nothing, and another one
goes on from there.  A cancel by filter first ends the jobs that wait, newest first, and moves no
cursor for them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, get_type_hints

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from pgqueue.arguments import Payload
from pgqueue.database.bounded import LOCK_TIMEOUT
from pgqueue.database.callers import in_transaction, may_notify
from pgqueue.errors import (
    ArgumentsError,
    DuplicateJob,
    JobNotFound,
    OptionError,
    PayloadError,
    PgQueueError,
    UnknownTask,
)
from pgqueue.filter_line import FINGERPRINT, LAST_ID, line_of, read_fingerprint
from pgqueue.models import JobStatus
from pgqueue.operations import Operations
from pgqueue.redaction import redacted
from pgqueue.repository.cancel import Cancels
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import UNFINISHED, JobFilter, Listing
from pgqueue.repository.operator_actions import MOST_IDS, Action, OperatorActions
from pgqueue.repository.pages import JobLine, Pages, id_above
from pgqueue.rules.limits import without_values
from pgqueue.rules.unique import KEY_ACROSS_QUEUES
from pgqueue.tasks import editing

PORTION = 100
"""Jobs in one transaction."""
READ_AHEAD = 2000
"""Ids that are read at once; those of waiting jobs are in no index, and are sorted."""
WINDOW = 20_000
"""Jobs of any kind among which the next ones are searched, where no index finds them."""
MOST_WAITING = 10_000
"""Waiting jobs of which a cancel reads the messages at once."""
MOST_COUNTED = 10_000
"""Jobs that a preview counts."""
SAMPLES = 10

FILTERS = Payload(JobFilter, task_name="filter", injected=0, hints=get_type_hints(JobFilter))
"""Filters as JSON data, which is checked as the arguments of jobs are."""

NOT_FOUND = "not_found"
KEY_TAKEN = "key_taken"
REFUSED = "refused"
"""The new arguments of the job are wrong, or its handler cannot be killed."""
LOCKED = "locked"
"""Another transaction had locked the job for longer than ``lock_timeout``."""
MISSED = (KEY_TAKEN, REFUSED, LOCKED)
"""A job that matches, and was not changed."""

Act = Callable[[Session, int, datetime | None], Change]
"""Changes a job.  The time: when it is due, if jobs are spread."""
Begin = Callable[[], AbstractContextManager[Session]]
"""Opens a Session, and commits it at the end of the block."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of action on jobs."""

    statuses: tuple[JobStatus, ...]
    """The jobs that it is for."""
    reason_unchanged: str = ""
    """Why one of these jobs was left as it is."""
    is_for_later: bool = False
    """Whether it is only for jobs that are not due yet."""
    is_set_based: bool = False
    """Whether one statement changes many of the jobs that wait."""


WAITING = (JobStatus.PENDING, JobStatus.BLOCKED)
KINDS = {
    "requeue": Kind((JobStatus.FAILED, JobStatus.CANCELLED)),
    "cancel": Kind(UNFINISHED, is_set_based=True),
    "kill": Kind(UNFINISHED, is_set_based=True),
    "run_now": Kind(WAITING, "it is due already", is_for_later=True),
    "change": Kind(WAITING, "it has these values already, or a worker is about to start it"),
}


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeues a job, now or for a time, perhaps with other arguments."""

    queue: Operations
    changes: editing.Changes | None = None

    def __call__(self, session: Session, job_id: int, run_at: datetime | None) -> Change:
        jobs, notify = self._jobs(session, f"requeue of job {job_id}")
        return editing.requeue(
            jobs, job_id, self.changes, self.queue.find, notify=notify, run_at=run_at
        )

    def first(self, session: Session, times: Mapping[int, datetime | None]) -> Mapping[int, Change]:
        """Requeue the first jobs at once, up to one that must be looked at alone."""
        if self.changes is not None:
            return {}
        jobs, notify = self._jobs(session, "requeue of several jobs")
        return jobs.requeue_first(times, notify=notify)

    def _jobs(self, session: Session, purpose: str) -> tuple[Jobs, bool]:
        connection = in_transaction(session, purpose)
        return Jobs(connection), self.queue.notify and may_notify(connection)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action on one job."""

    id: int
    change: str
    reason: str | None = None

    @property
    def is_changed(self) -> bool:
        return self.change not in (Change.UNCHANGED.name.lower(), NOT_FOUND, *MISSED)

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"


class JobLocked(PgQueueError):
    """Another transaction has locked a job; nothing was changed in this one, which has failed."""

    def __init__(self, job_id: int) -> None:
        super().__init__(f"another transaction has locked job {job_id}; try again")
        self.job_id = job_id


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would do, before it begins."""

    jobs: int
    """How many jobs match; more than MOST_COUNTED are not counted."""
    samples: Sequence[JobLine]
    keys_taken: int
    """How many of them cannot be requeued, because another job has their key."""


def act_of(queue: Operations, kind: str) -> Act:
    """How to change a job by an action that needs nothing but its name."""
    match kind:
        case "requeue":
            return Requeue(queue)
        case "cancel" | "kill":
            is_kill = kind == "kill"
            return lambda session, job_id, _at: queue.cancel(session, job_id, kill=is_kill)
        case "run_now":
            return lambda session, job_id, _at: queue.run_now(session, job_id)
    raise OptionError(f"the log does not say how to go on with {kind}: run its command again")


def is_resumable(action: Action) -> bool:
    """Whether the log says all that is needed to go on with an action."""
    is_known = action.action in KINDS and action.action != "change"
    return is_known and "args" not in action.options and bool({"jobs", "filter"} & {*action.target})


def narrowed(which: JobFilter, kind: str) -> JobFilter:
    """Limit a filter to the statuses that an action is for.  Raises OptionError if none is left."""
    allowed = KINDS[kind].statuses
    statuses = frozenset(allowed) & (which.statuses or frozenset(allowed))
    if not statuses:
        raise OptionError(
            f"{kind} is for jobs that are {' or '.join(allowed)}; these are "
            f"{' or '.join(sorted(which.statuses))}"
        )
    are_due = False if KINDS[kind].is_for_later else which.are_due
    return replace(which, statuses=statuses, are_due=are_due)


def preview(session: Session, kind: str, which: JobFilter) -> Preview:
    """Count the jobs that an action would change, and show the newest of them."""
    log, which = OperatorActions(session), narrowed(which, kind)
    are_requeued = kind == "requeue"
    return Preview(
        log.number_of_jobs(which, limit=MOST_COUNTED + 1),
        Pages(session).page(which, limit=SAMPLES).jobs,
        log.number_of_taken_keys(which, limit=MOST_COUNTED) if are_requeued else 0,
    )


def action_on_filter(
    session: Session,
    kind: str,
    which: JobFilter,
    *,
    actor: str,
    reason: str = "",
    spread: timedelta | None = None,
    options: Mapping[str, Any] | None = None,
    ids: Sequence[int] | None = None,
) -> Action:
    """An action on all jobs that match, up to the highest id of now; it is not in the log yet.

    ``spread``: requeue the jobs for times that are spread over this time from now on.  ``ids``: the
    jobs, ascending, if the caller has found them already.
    """
    log = OperatorActions(session)
    now, last_id = log.now_and_last_job()
    which = _at_time(narrowed(which, kind), now)
    last_id = ids[-1] if ids else last_id
    number_of_jobs = 0
    if spread is not None:
        upto = replace(which, before=_smaller(which.before, last_id + 1))
        number_of_jobs = log.number_of_jobs(upto) if ids is None else len(ids)
    return Action(
        at=now,
        actor=actor,
        action=kind,
        target={"filter": document_of(which)},
        options={**(options or {}), **_spread(spread, number_of_jobs)},
        reason=reason,
        last_id=last_id,
    )


def action_on_ids(
    session: Session,
    kind: str,
    ids: Iterable[int],
    *,
    actor: str,
    reason: str = "",
    spread: timedelta | None = None,
    options: Mapping[str, Any] | None = None,
) -> Action:
    """An action on jobs that are named; it is not in the log yet."""
    ids = sorted(set(ids))
    return Action(
        at=OperatorActions(session).now_and_last_job()[0],
        actor=actor,
        action=kind,
        target={"jobs": ids},
        options={**(options or {}), **_spread(spread, len(ids))},
        reason=reason,
        last_id=ids[-1],
    )


def run(
    begin: Begin, action: Action, act: Act, *, ids: Sequence[int] | None = None, size: int = PORTION
) -> Iterator[tuple[Action, list[Result]]]:
    """Do what is left of an action, each portion in a transaction, and finish it.

    Yields the results of a portion after its commit.  A caller may stop there, and another process
    go on later.  ``ids``: the jobs, ascending, if the caller has found them already.

    A cancel by filter first ends the jobs that wait, many at once, if an index finds them.  Each of
    the other jobs has a transaction of its own: a cancel may wait for a lock, and must hold no
    other job meanwhile.  A job that stays locked for longer than ``lock_timeout`` is skipped.

    Where no index finds the jobs, they are searched in windows, and the cursor moves past each: no
    statement takes long, and one that is stopped is not searched again.
    """
    if KINDS[action.action].is_set_based and "filter" in action.target:
        size = 1
        # Whether the filter has conditions that no index answers.
        is_searched = ids is None and bool(filter_of(action).words_of_row())
        if action.cursor is None and not is_searched:
            ended: set[int] = set()
            for moved, results in _end_waiting(begin, action, ids):
                action = moved
                ended.update(result.id for result in results)
                yield action, results
            ids = None if ids is None else [id for id in ids if id not in ended]
    while action.finished_at is None:
        with begin() as session:
            found, end = ids_left(session, action) if ids is None else (ids, None)
        start = 0
        while start < len(found) and action.finished_at is None:
            action, results = _portion(begin, action, found[start : start + size], act)
            start = bisect_right(found, action.cursor or 0)
            yield action, results
        if end is not None:  # the end of a window: there may be more behind it
            with begin() as session:
                action = _counted(session, _locked(session, action), [], cursor=end)
            yield action, []
        elif ids is not None or not found:
            break
    with begin() as session:
        finish(session, action)


def _portion(
    begin: Begin, action: Action, ids: Sequence[int], act: Act
) -> tuple[Action, list[Result]]:
    """Change jobs in one transaction; up to the first that stays locked, which is skipped.

    A requeue first puts back at once what it can, in a transaction that waits for nothing: one by
    one, jobs are locked in the order of their ids, and with these locked already, two requeues
    could deadlock.
    """
    if isinstance(act, Requeue) and len(ids) > 1:
        with begin() as session:
            moved, results = step(session, action, ids, act, at_once=True)
        if results:
            return moved, results
    locked = None
    while True:
        try:
            with begin() as session:
                return step(session, action, ids, act, locked=locked)
        except JobLocked as error:
            locked = error.job_id
            ids = ids[: ids.index(locked) + 1]


def step(
    session: Session,
    action: Action,
    ids: Sequence[int],
    act: Act,
    *,
    locked: int | None = None,
    at_once: bool = False,
) -> tuple[Action, list[Result]]:
    """Change some jobs, ascending, in the caller's transaction; jobs that have moved on stay.

    Jobs up to the cursor are left out: another process has changed them.  ``locked``: a job that is
    skipped.  Raises JobLocked for another one that is not free within ``lock_timeout``; then the
    transaction has failed.  ``at_once``: only the first jobs that :meth:`Requeue.first` requeues.
    """
    action = _locked(session, action)
    left = [] if action.finished_at else [id for id in ids if id > (action.cursor or 0)]
    reason_unchanged = KINDS[action.action].reason_unchanged
    done = action.jobs + action.skipped
    times = {job_id: _due_time(action, number) for number, job_id in enumerate(left, done)}
    first: Mapping[int, Change] = {}
    if at_once and isinstance(act, Requeue):
        first = act.first(session, times)
        left = list(first)
    results = []
    for job_id in left:
        if job_id == locked:
            results.append(Result(job_id, LOCKED, "another transaction has locked it"))
            continue
        if job_id in first:
            result = Result(job_id, first[job_id].name.lower())
        else:
            result = _change(session, act, job_id, times[job_id])
        if result.change == Change.UNCHANGED.name.lower():
            status = Listing(session).status(job_id)
            is_known = bool(reason_unchanged) and status in KINDS[action.action].statuses
            reason = reason_unchanged if is_known else f"its status is {status}"
            result = replace(result, reason=reason)
        results.append(result)
    return _counted(session, action, results, cursor=left[-1] if left else None), results


def finish(session: Session, action: Action) -> None:
    """Note that nothing is left to do."""
    action = _locked(session, action)
    if action.id is not None and action.finished_at is None:
        OperatorActions(session).move(action, is_finished=True)


def ids_left(session: Session, action: Action) -> tuple[list[int], int | None]:
    """The next jobs of an action that has begun, ascending; and up to which job it was searched, if
    there may be more behind it."""
    after = action.cursor or 0
    if "jobs" in action.target:
        return [id for id in action.target["jobs"] if id > after][:READ_AHEAD], None
    which = filter_of(action)
    which = replace(which, after=max(after, which.after or 0))
    end = None
    if which.words_of_row():
        given = {"after": which.after, "size": WINDOW}
        end = session.execute(id_above(), given).scalar()
        if end is not None:
            # Jobs that came later are no part of the action.
            end = _smaller(end, (which.before or 0) - 1)
            if end <= (which.after or 0):
                return [], None  # or it would search behind its last job for ever
            which = replace(which, before=end + 1)
    found = Listing(session).ids(which, limit=READ_AHEAD)
    return found, None if len(found) == READ_AHEAD else end


def filter_of(action: Action) -> JobFilter:
    """The jobs of an action on all that match, without those that came later."""
    which = filter_from(action.target["filter"])
    return replace(which, before=_smaller(which.before, (action.last_id or 0) + 1))


def document_of(which: JobFilter) -> dict[str, Any]:
    """The conditions of a filter as JSON data."""
    values = {field.name: getattr(which, field.name) for field in fields(which)}
    given = [field.name for field in fields(which) if values[field.name] != field.default]
    return FILTERS.encode({name: values[name] for name in given})


def check_arguments(queue: Operations, which: JobFilter) -> None:
    """Check that the log may keep the values of a filter by arguments.

    Raises OptionError for a secret argument, and for jobs of any task, of which one may have a
    secret argument of this name.
    """
    if not which.args:
        return
    task = queue.tasks.get(which.task or "")
    if task is None:
        raise OptionError(
            "an action on jobs with an argument needs their task, too, one of this application"
        )
    if hidden := sorted({name for name, _ in which.args} & {*task.settings.secret_args}):
        raise OptionError(f"argument {hidden[0]} is secret: no filter finds it")


def target_in_words(action: Action, *, show_arguments: bool) -> str:
    """What an action was done to: the line of a filter, or what was named."""
    if "filter" in action.target:
        try:
            which = filter_from(action.target["filter"])
        except OptionError:  # code of another version has written it
            return str(action.target["filter"]) if show_arguments else "a filter"
        if which.names_arguments and not show_arguments:
            return f"{line_of(which.without_arguments())} and some arguments".strip()
        return line_of(which)
    words = []
    for name, value in action.target.items():
        if name in ("limit", "key") and not show_arguments:
            value = without_values(str(value))
        if isinstance(value, list):
            name = name.removesuffix("s") if len(value) == 1 else name
            value = ", ".join(map(str, value))
        words.append(f"{name} {value}")
    return "; ".join(words)


def error_of(action: Action) -> int | None:
    """The fingerprint of the error by which an action chooses its jobs."""
    named = action.target.get("filter", action.target)
    error = named.get("error") if isinstance(named, dict) else None
    if isinstance(error, str) and FINGERPRINT.fullmatch(error):
        return read_fingerprint(error)
    is_fingerprint = type(error) is int and -LAST_ID <= error <= LAST_ID
    return error if is_fingerprint else None


def filter_from(document: Any) -> JobFilter:
    """The filter with these conditions.  Raises OptionError if this is no filter."""
    try:
        return JobFilter(**FILTERS.decode(document))
    except PayloadError as error:
        raise OptionError(f"this is no filter of jobs: {error}") from error


def _end_waiting(
    begin: Begin, action: Action, ids: Sequence[int] | None
) -> Iterator[tuple[Action, list[Result]]]:
    """Cancel the jobs that wait, the newest first: workers claim the oldest meanwhile."""
    only = None if ids is None else frozenset(ids)
    limit = MOST_WAITING if ids is None else None
    has_more = True
    while has_more:
        with begin() as session:
            waiting = [*Cancels(session).waiting(filter_of(action), only=only, limit=limit)]
        has_more = False
        for chunk in waiting:
            with begin() as session:
                action = _locked(session, action)
                ended = sorted(Cancels(session).end(chunk))
                results = [Result(job_id, Change.CANCELLED.name.lower()) for job_id in ended]
                action = _counted(session, action, results, cursor=None)
            has_more = has_more or (ids is None and bool(ended))
            yield action, results


def _change(session: Session, act: Act, job_id: int, run_at: datetime | None) -> Result:
    try:
        return Result(job_id, act(session, job_id, run_at).name.lower())
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
        raise JobLocked(job_id) from error


def _locked(session: Session, action: Action) -> Action:
    """The action as the log has it now; without an id if it is not, or no longer, in the log."""
    if action.id is None:
        return action
    return OperatorActions(session).locked(action.id) or replace(action, id=None)


def _counted(
    session: Session, action: Action, results: Sequence[Result], *, cursor: int | None
) -> Action:
    changed = [result.id for result in results if result.is_changed]
    moved = replace(
        action,
        jobs=action.jobs + len(changed),
        skipped=action.skipped + len(results) - len(changed),
        first_ids=[*action.first_ids, *changed][:MOST_IDS],
        cursor=action.cursor if cursor is None else cursor,
    )
    if moved.id is not None and moved != action:
        OperatorActions(session).move(moved, is_finished=False)
    return moved


def _spread(spread: timedelta | None, number_of_jobs: int) -> dict[str, Any]:
    return {} if spread is None else {"spread_s": spread.total_seconds(), "of": number_of_jobs}


def _due_time(action: Action, number: int) -> datetime | None:
    """When the job with this number is due, if the jobs are spread."""
    seconds, number_of_jobs = action.options.get("spread_s"), action.options.get("of")
    if seconds is None or not number_of_jobs:
        return None
    return action.at + timedelta(seconds=seconds * min(number, number_of_jobs) / number_of_jobs)


def _at_time(which: JobFilter, now: datetime) -> JobFilter:
    """The filter with times in place of spans, which mean other jobs later."""
    since, until = (
        now - time if isinstance(time, timedelta) else time
        for time in (which.created_after, which.created_before)
    )
    return replace(which, created_after=since, created_before=until)


def _smaller(first: int | None, second: int) -> int:
    return second if first is None else min(first, second)
