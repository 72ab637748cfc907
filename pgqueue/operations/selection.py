"""``Selection``: which jobs, by their ids or by conditions.

The commands, the dashboard, the log of operators and Python code all select jobs by it.  The
commands and the dashboard import no repository, so this module exports ``WRITTEN``,
``ValueKind`` and ``RANGES`` for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self, Unpack, get_type_hints

from pgqueue.arguments import Payload
from pgqueue.checks import check, check_text, check_whole, checked_id, instance
from pgqueue.errors import ArgumentsError, JobNotFound, OptionError, PayloadError
from pgqueue.filter_line import (
    LAST_ID,
    LONGEST_SPAN,
    STATUSES,
    line_of,
    parse,
    read_fingerprint,
)
from pgqueue.models import JobStatus
from pgqueue.operations.actions import JobAction
from pgqueue.repository.conditions import RANGES as RANGES
from pgqueue.repository.conditions import WRITTEN as WRITTEN
from pgqueue.repository.conditions import Conditions, JobFilter
from pgqueue.repository.conditions import ValueKind as ValueKind
from pgqueue.repository.job_line import JobLine
from pgqueue.repository.listing import Listing
from pgqueue.repository.messages import FoundJob
from pgqueue.repository.pages import Pages
from pgqueue.repository.tables import Executor
from pgqueue.tasks import Task

WINDOW = 20_000
"""How many jobs one statement looks through, where no index finds those that match."""
MOST_COUNTED = 10_000
"""How many jobs a preview counts at most."""
SAMPLES = 10

IDS_OR_CONDITIONS = "Selection: ids and conditions are given; give one of them"

FILTERS = Payload(JobFilter, task_name="filter", injected=0, hints=get_type_hints(JobFilter))
"""Filters as JSON data, which is checked as the arguments of jobs are."""
ARGUMENTS = instance(Mapping, "a dict of arguments by name")


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would do, before it begins."""

    jobs: int
    """How many jobs match; more than MOST_COUNTED are not counted."""
    samples: Sequence[JobLine]
    keys_taken: int
    """How many of them cannot be requeued, because another job has their key."""


class Window(NamedTuple):
    """The next jobs of a selection, in ascending order of their ids."""

    jobs: Sequence[FoundJob]
    searched_to: int
    """All jobs of the selection up to this id are in this window or in earlier ones."""
    is_last: bool
    """Whether the selection has no jobs after this window."""


@dataclass(frozen=True, slots=True, init=False)
class Selection:
    """The jobs with these ids, or all jobs that match every condition.

    Args:
        ids: The ids of jobs.  A selection has ids or conditions, not both.
        status: One status or several, as in ``Job.status``; all of them if it is omitted.
        **conditions: As the options of ``pgqueue jobs`` and a filter line have them: ``task``,
            ``queue``, ``tag``, ``batch``, ``limit_key``, ``unique_key``, ``error`` (as ``pgqueue
            failures`` prints it), ``text`` (of the last error), ``args`` (a dict of arguments in
            their JSON form), ``created_after``, ``created_before`` (a time, or a timedelta until
            now), ``took``, ``attempts`` (at least so many), ``before``, ``after`` (ids).

    Raises:
        OptionError: A condition is unknown, or has a value of another type.

    Example:
        >>> failed = Selection(task="mail", status="failed", created_after=timedelta(hours=2))
        >>> run = queue.operate("ada").requeue(failed)
    """

    ids: tuple[int, ...] | None
    which: JobFilter

    def __init__(
        self,
        ids: Iterable[int] | None = None,
        *,
        status: JobStatus | str | Iterable[JobStatus | str] = (),
        **conditions: Unpack[Conditions],
    ) -> None:
        if not isinstance(status, str | Iterable):
            raise OptionError(
                f"Selection: status is {status!r}; give one status, or a list of them"
            )
        wanted = [status] if isinstance(status, str) else list(status)
        given: dict[str, Any] = dict(conditions)
        for name, value in given.items():
            if value is None:  # or a variable that is None would select more jobs
                raise OptionError(f"Selection: {name} is None; leave it out, or give a value")
        if ids is not None and (given or wanted):
            raise OptionError(IDS_OR_CONDITIONS)
        object.__setattr__(self, "ids", None if ids is None else _checked_ids(ids))
        object.__setattr__(self, "which", _checked_filter(given, wanted))

    @classmethod
    def of(cls, which: JobFilter, ids: Iterable[int] | None = None) -> Self:
        """The jobs of a filter; with ``ids``, these jobs: the filter is then only a scope."""
        made = object.__new__(cls)
        object.__setattr__(made, "ids", None if ids is None else tuple(sorted(set(ids))))
        object.__setattr__(made, "which", which)
        return made

    def also(
        self, *, status: Iterable[JobStatus | str] = (), **conditions: Unpack[Conditions]
    ) -> Self:
        """Return the selection with more conditions.

        A condition replaces one of the same name that the selection has.

        Args:
            status: One status or several; omit it to keep those of the selection.
            **conditions: As of a selection; None is the same as a condition that is not given.

        Returns:
            The new selection.

        Raises:
            OptionError: The selection has ids, or a condition is wrong.
        """
        given = {name: value for name, value in conditions.items() if value is not None}
        more = _checked_filter(given, [*status]).given()
        if self.ids is not None and more:
            raise OptionError(IDS_OR_CONDITIONS)
        return self.of(replace(self.which, **more), self.ids)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the jobs of a filter line, as ``task:send status:failed created:>2h``.

        Args:
            line: The line.

        Returns:
            The selection.

        Raises:
            OptionError: No filter has such a line.
        """
        found = parse(line)
        return cls([found]) if isinstance(found, int) else cls.of(found)

    @classmethod
    def from_target(cls, target: Mapping[str, Any]) -> Self:
        """The jobs of an action in the log.

        Raises:
            OptionError: Code of another version has written the filter.
        """
        if "jobs" in target:
            return cls(target["jobs"])
        try:
            return cls.of(JobFilter(**FILTERS.decode(target.get("filter"))))
        except PayloadError as error:
            raise OptionError(f"this is no filter of jobs: {error}") from error

    @property
    def target(self) -> dict[str, Any]:
        """The selection as JSON data, for the log."""
        if self.ids is not None:
            return {"jobs": list(self.ids)}
        return {"filter": FILTERS.encode(self.which.given())}

    @property
    def line(self) -> str:
        """The filter line; without the queues and tags of a limited user."""
        return line_of(self.which)

    @property
    def is_everything(self) -> bool:
        return self.ids is None and replace(self.which, queues=None, tags=None) == JobFilter()

    def check_not_everything(self, where: str) -> None:
        """Raise OptionError without ids and without a condition; ``where``: for which call."""
        if self.is_everything:
            raise OptionError(f"{where}: which jobs? give their ids, or at least one condition")

    def in_state(self, word: str | None) -> Self:
        """The selection with another state in place of its own.

        ``word``: a word that a filter line may have after ``status:``, as ``due`` or ``failed``;
        None for jobs in any state.
        """
        any_state: dict[str, Any] = {"statuses": frozenset(), "are_due": None, "are_retried": None}
        which = replace(self.which, **{**any_state, **STATUSES.get(word or "", {})})
        return self.of(which, self.ids)

    @property
    def is_scoped(self) -> bool:
        """Whether the selection has only jobs that a limited user may see."""
        return self.which.queues is not None or self.which.tags is not None

    def scoped(self, queues: Iterable[str] | None, tags: Iterable[str] | None) -> Self:
        """The jobs of the selection that a limited user may see.

        ``queues``, ``tags``: a job must be in one of these queues, and have one of these tags; None
        for no limit.
        """
        which = replace(
            self.which,
            queues=None if queues is None else frozenset(queues),
            tags=None if tags is None else frozenset(tags),
        )
        return self.of(which, self.ids)

    def narrowed(self, action: JobAction) -> Self:
        """The jobs of a filter that an action is for; ids stay as they are.

        Raises:
            OptionError: The action is for none of the jobs.
        """
        if self.ids is not None:
            return self
        if action.is_for_later and self.which.are_due:
            raise OptionError(f"{action.name} is for jobs that are not due yet; these are due")
        allowed = frozenset(action.statuses)
        statuses = allowed & (self.which.statuses or allowed)
        if not statuses:
            raise OptionError(
                f"{action.name} is for jobs that are {' or '.join(action.statuses)}; these are "
                f"{' or '.join(sorted(self.which.statuses))}"
            )
        are_due = False if action.is_for_later else self.which.are_due
        return self.of(replace(self.which, statuses=statuses, are_due=are_due))

    def at(self, now: datetime) -> Self:
        """The selection with a time in place of each timedelta, counted back from ``now``.

        So it selects the same jobs later.
        """
        since, until = (
            now - time if isinstance(time, timedelta) else time
            for time in (self.which.created_after, self.which.created_before)
        )
        which = replace(self.which, created_after=since, created_before=until)
        return self.of(which, self.ids)

    def upto(self, last_id: int | None) -> Self:
        """The jobs of a filter up to an id, without later ones; ids stay as they are."""
        if last_id is None or self.ids is not None:
            return self
        before = self.which.before
        before = last_id + 1 if before is None else min(before, last_id + 1)
        return self.of(replace(self.which, before=before))

    def check_arguments(self, tasks: Mapping[str, Task[..., Any]], *, for_log: bool = True) -> None:
        """Refuse to search by an argument that is secret.

        Without a task, an argument is secret if it is in any task of the application.

        Args:
            tasks: The tasks of the application, by name.
            for_log: Whether the log keeps the filter: it must name a task that is known then.

        Raises:
            OptionError: An argument is secret, or may be.
        """
        if not self.which.args:
            return
        task = tasks.get(self.which.task or "")
        if task is None and for_log:
            raise OptionError(
                "an action on jobs with an argument needs their task, too, one of this application"
            )
        searched = tasks.values() if task is None else [task]
        secret = {name for each in searched for name in each.settings.secret_args}
        if hidden := sorted({name for name, _ in self.which.args} & secret):
            raise OptionError(f"argument {hidden[0]} is secret: no filter finds it")

    def matching(self, session: Executor, job_ids: Sequence[int]) -> set[int]:
        """The ids of those of some jobs that match all conditions except the status."""
        return set(Listing(session).matching(self.which, job_ids))

    def newest(self, session: Executor) -> int | None:
        """The id of the newest job; None if there is no job."""
        if self.ids is not None:
            listing = Listing(session)
            matching = listing.matching(self.which, self.ids)
            statuses = {id: listing.status(id) for id in matching}
            return max((id for id in matching if statuses[id] in self.which.statuses), default=None)
        found = Pages(session).page(self.which, limit=1).jobs
        return found[0].id if found else None

    def only(self, job_id: int) -> Self:
        """One job of the selection, in the same scope."""
        scope = JobFilter(queues=self.which.queues, tags=self.which.tags)
        return self.of(scope, [job_id])

    def check_scope(self, session: Executor) -> None:
        """Raise JobNotFound for an id of a job that does not match the rest of the selection."""
        if self.ids is None or self.which == JobFilter():
            return
        if missing := set(self.ids) - set(Listing(session).matching(self.which, self.ids)):
            raise JobNotFound(f"there is no job {min(missing)}")

    def count(self, session: Executor, *, limit: int | None = None) -> int:
        """Return how many jobs match, or how many ids are given.

        Args:
            session: A Session or Connection to read with.
            limit: Count no further than this.

        Returns:
            The number.
        """
        if self.ids is not None:
            return len(self.ids[:limit])
        return Listing(session).count(self.which, limit=limit)

    def preview(self, session: Executor, action: JobAction) -> Preview:
        """Count the jobs that an action would change, and show the newest of them.

        Raises:
            OptionError: The selection has ids, or the action is for none of its jobs.
        """
        if self.ids is not None:
            raise OptionError("preview: ids are given; only jobs that match conditions are counted")
        which, listing = self.narrowed(action).which, Listing(session)
        return Preview(
            listing.count(which, limit=MOST_COUNTED + 1),
            Pages(session).page(which, limit=SAMPLES).jobs,
            listing.taken_keys(which, limit=MOST_COUNTED) if action.runs_again else 0,
        )

    def next_window(self, session: Executor, *, after: int, limit: int) -> Window:
        """Search the jobs whose ids are above ``after``, and return at most ``limit`` of them.

        Where no index finds the jobs, one statement looks through at most ``WINDOW`` jobs of any
        kind.  So no statement takes long, and an interrupted search continues where it has stopped.
        """
        if self.ids is not None:
            jobs = [FoundJob(id) for id in self.ids if id > after][:limit]
            return _window(jobs, after=after, limit=limit, end=None)
        listing = Listing(session)
        after = max(after, self.which.after or 0)
        which, end = replace(self.which, after=after), None
        if which.clauses_of_row():
            end = listing.next_id(after, size=WINDOW)
        if end is not None:
            # Later jobs do not belong to the selection: without this bound, a search could follow
            # the jobs that are enqueued meanwhile for ever.
            end = end if which.before is None else min(end, which.before - 1)
            if end <= after:
                return Window([], after, is_last=True)
            which = replace(which, before=end + 1)
        return _window(listing.found(which, limit=limit), after=after, limit=limit, end=end)


def _window(jobs: Sequence[FoundJob], *, after: int, limit: int, end: int | None) -> Window:
    """``end``: the id at which the search has stopped; None if it has looked through all jobs."""
    is_full = len(jobs) == limit
    if end is not None and not is_full:
        return Window(jobs, end, is_last=False)
    return Window(jobs, jobs[-1].id if jobs else after, is_last=not is_full)


def _checked_filter(given: dict[str, Any], statuses: Sequence[JobStatus | str]) -> JobFilter:
    for name in given:
        if name not in WRITTEN:
            raise OptionError(
                f"Selection: there is no condition {name!r}; there are {', '.join(WRITTEN)}"
            )
    if "args" in given:
        check("Selection: ", "args", given["args"], ARGUMENTS)
        given["args"] = tuple(given["args"].items())
    if "error" in given:
        given["error"] = checked_fingerprint("Selection: ", given["error"])
    try:
        given["statuses"] = frozenset(map(JobStatus, statuses))
    except ValueError:
        known_words = ", ".join(status.value for status in JobStatus)
        raise OptionError(
            f"Selection: status is {statuses!r}; give one or several of {known_words}"
        ) from None
    try:
        for name, value in given.items():
            _check_value(name, value)
        FILTERS.dumps(FILTERS.encode(given))
    except (ArgumentsError, PayloadError) as error:
        what = str(error).removeprefix("task filter: argument ").partition(": convert")[0]
        raise OptionError(f"Selection: {what}") from error
    return JobFilter(**given)


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise OptionError(f"Selection: ids is {ids!r}; give a list of ids, as [4711]")
    return tuple(sorted({checked_id(id) for id in ids}))


def checked_fingerprint(where: str, error: Any) -> int:
    """The number of an error that is given so, or as ``pgqueue failures`` prints it."""
    try:
        if isinstance(error, str):
            return read_fingerprint(error)
        if type(error) is int and -LAST_ID <= error <= LAST_ID:
            return error
    except ValueError:
        pass
    raise OptionError(f"{where}{error!r} is no error as `pgqueue failures` prints it") from None


def _check_value(name: str, value: Any) -> None:
    """Refuse what PostgreSQL cannot store or compare."""
    if isinstance(value, str):
        check_text("Selection: ", name, value)
    elif isinstance(value, timedelta) and abs(value) > LONGEST_SPAN:
        raise OptionError(f"Selection: {name} is {value}, which is longer than a hundred years")
    elif name in WRITTEN and (kind := WRITTEN[name].metadata["kind"]) in RANGES:
        check_whole("Selection: ", name, value, *RANGES[kind])
