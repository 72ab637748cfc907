"""The options of tasks and jobs, and their checks."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any, Literal, TypedDict

from pgqueue.errors import OptionError, TaskDefinitionError, UnknownOption
from pgqueue.limits import Limit
from pgqueue.meta import checked_meta, checked_tags
from pgqueue.models import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE
from pgqueue.retention import Keep, keep_of
from pgqueue.retry import DEFAULT_RETRY, Retry
from pgqueue.unique import OnConflict, Unique, storable_key

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff]{1,200}")
LONGEST_SHOWN = 60
"""Characters of a name in an error."""
FIRST_RUN_AT = datetime(2000, 1, 1, tzinfo=UTC)
LAST_RUN_AT = datetime(9999, 12, 31, tzinfo=UTC)
LONGEST_DELAY = timedelta(days=36_525)
SHORTEST_SPAN = timedelta(microseconds=1)
MOST_ATTEMPTS = 30_000
EXECUTORS = ("thread", "process")
ON_DUPLICATE = ("return", "raise")
DEFAULT_ON_DUPLICATE = "return"
LEAST_MEMORY = 2**24
MOST_MEMORY = 2**50
HAS_PROCESS_GROUPS = hasattr(os, "killpg")
CAN_LIMIT_MEMORY = find_spec("resource") is not None


class TaskOptions(TypedDict, total=False):
    """The options of ``@queue.task(...)``."""

    name: str
    aliases: Sequence[str]
    renamed: Mapping[str, str]
    queue: str
    priority: int
    max_attempts: int
    max_interruptions: int
    max_unreadable: timedelta
    timeout: timedelta | None
    transactional: bool
    expires_in: timedelta | None
    retry: Retry
    unique: Unique | None
    unique_key: Callable[..., str | None] | None
    on_duplicate: Literal["return", "raise"]
    executor: Literal["thread", "process"]
    memory_limit: int | None
    secret_args: Sequence[str]
    on_failed: Callable[[int], Any] | None
    keep: Keep | timedelta | None
    limit: Limit | Sequence[Limit]
    fair_by: str | Sequence[str]


class JobOptions(TypedDict, total=False):
    """The options of ``task.options(...)``: those that may differ from one enqueue to the next."""

    delay: timedelta | None
    run_at: datetime | None
    priority: int
    queue: str
    expires_in: timedelta | None
    unique: Unique | None
    unique_key: str | Callable[..., str | None] | None
    on_duplicate: Literal["return", "raise"]
    max_attempts: int
    meta: Mapping[str, Any]
    tags: Sequence[str]


@dataclass(frozen=True, slots=True)
class Options:
    """All options, checked."""

    task: str
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_interruptions: int = 20
    max_unreadable: timedelta = timedelta(days=1)
    timeout: timedelta | None = None
    transactional: bool = False
    expires_in: timedelta | None = None
    retry: Retry = field(default=DEFAULT_RETRY)
    unique: Unique | None = None
    unique_key: str | Callable[..., str | None] | None = None
    on_duplicate: str = DEFAULT_ON_DUPLICATE
    delay: timedelta | None = None
    run_at: datetime | None = None
    executor: str = "thread"
    memory_limit: int | None = None
    secret_args: Sequence[str] = ()
    on_failed: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    aliases: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    keep: Keep | None = None
    """None: the rule of the job's queue, or that of the PgQueue."""
    limit: Limit | Sequence[Limit] = ()
    fair_by: str | Sequence[str] = ()

    @classmethod
    def of_task(cls, name: str, options: Mapping[str, Any]) -> "Options":
        _check_task_name(name)
        _refuse_unknown(f"task {name}", options, TaskOptions, JobOptions)
        given = {key: value for key, value in options.items() if key != "name"}
        if "keep" in given:
            given["keep"] = keep_of(given["keep"], f"task {name}: ")
        checked = cls(task=name, **given)
        checked._check()
        return checked

    def of_job(self, options: Mapping[str, Any]) -> "Options":
        """Return these options, changed for one enqueue."""
        where = f"task {self.task}: "
        _refuse_unknown(f"task {self.task}", options, JobOptions, TaskOptions)
        given = self._in_unique(options)
        changed = replace(self._without_uniqueness(given), **given)
        changed._check()
        _check_known_to_workers(where, self, changed)
        meta, tags = checked_meta(where, changed.meta), checked_tags(where, changed.tags)
        return replace(changed, meta=meta, tags=tags)

    @property
    def uniqueness(self) -> Unique | None:
        """``unique``, or what its short forms ``unique_key`` and ``on_duplicate`` stand for."""
        if self.unique is None and self.unique_key is not None:
            return Unique(key=self.unique_key, on_conflict=self.on_duplicate)  # type: ignore[arg-type]  # checked
        return self.unique

    @property
    def conflict(self) -> OnConflict:
        """What an enqueue does if another job holds its unique key."""
        unique = self.uniqueness
        return "return" if unique is None else unique.on_conflict

    @property
    def frees_key_at_start(self) -> bool:
        """Whether a worker gives back the unique key of a job before its handler starts."""
        return self.unique is not None and self.unique.until == "started"

    def _in_unique(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, with ``on_duplicate`` as part of the ``unique`` of the task."""
        if self.unique is None or "on_duplicate" not in options:
            return options
        if "unique" in options or "unique_key" in options:
            return options
        _check_on_duplicate(f"task {self.task}: ", options["on_duplicate"])
        unique = replace(self.unique, on_conflict=options["on_duplicate"], at_most=None)
        others = {name: value for name, value in options.items() if name != "on_duplicate"}
        return others | {"unique": unique}

    def _without_uniqueness(self, options: Mapping[str, Any]) -> "Options":
        """These options without those that ``unique`` or ``unique_key`` of an enqueue replaces."""
        if "unique" in options:
            return replace(self, unique_key=None, on_duplicate=DEFAULT_ON_DUPLICATE)
        return replace(self, unique=None) if "unique_key" in options else self

    def hiding(self, names: Iterable[str]) -> "Options":
        """Return these options, with more secret arguments."""
        return replace(self, secret_args=(*self.secret_args, *names))

    def _check(self) -> None:
        where = f"task {self.task}: "
        check_queue_name(self.queue, where)
        check_whole(where, "priority", self.priority, 0, 9)
        check_whole(where, "max_attempts", self.max_attempts, 1, MOST_ATTEMPTS)
        check_whole(where, "max_interruptions", self.max_interruptions, 1, MOST_ATTEMPTS)
        _check_max_unreadable(where, self.max_unreadable)
        if self.timeout is not None and not _is_span(self.timeout, least=SHORTEST_SPAN):
            raise OptionError(
                f"{where}timeout is {self.timeout!r}; give a timedelta above zero, or None"
            )
        check_start(where, self.delay, self.run_at)
        _check_expires_in(where, self.expires_in)
        if not isinstance(self.retry, Retry):
            raise OptionError(
                f"{where}retry is {self.retry!r}; give a Retry, e.g. Retry.never(), and the number "
                "of attempts as max_attempts"
            )
        if not isinstance(self.transactional, bool):
            raise OptionError(f"{where}transactional is {self.transactional!r}; give True or False")
        _check_executor(where, self)
        _check_uniqueness(where, self)
        _check_secret_args(where, self.secret_args)
        _check_aliases(where, self.task, self.aliases)
        _check_renamed(where, self.renamed)


def refuse_unknown_secrets(options: Options, parameters: frozenset[str]) -> None:
    """Refuse unknown names: with a misspelt name, a secret argument would be shown."""
    unknown = sorted(set(options.secret_args) - parameters)
    if unknown:
        raise TaskDefinitionError(
            f"task {options.task}: secret_args names {unknown[0]!r}, which is not a parameter of "
            f"the task; it may name {', '.join(sorted(parameters)) or 'nothing'}"
        )


def refuse_wrong_renames(options: Options, parameters: Sequence[str]) -> None:
    """Refuse old names that are parameters, and new names that are not."""
    for old, new in options.renamed.items():
        if old in parameters:
            raise TaskDefinitionError(
                f"task {options.task}: renamed has the old name {old!r}, which is a parameter of "
                "the task; give the name that the parameter had before"
            )
        if new not in parameters:
            raise TaskDefinitionError(
                f"task {options.task}: renamed has the new name {new!r}, which is not a parameter "
                f"of the task; it may name {', '.join(parameters) or 'nothing'}"
            )


def _refuse_unknown(where: str, options: Mapping[str, Any], known: type, others: type) -> None:
    for name in options:
        if name not in known.__annotations__:
            hint = _hint(name, known, others)
            raise UnknownOption(f"{where}: there is no option {name!r}{hint}")


def _hint(name: str, known: type, others: type) -> str:
    if name in others.__annotations__:
        return _BELONGS_TO[others].format(name=name)
    if near := difflib.get_close_matches(name, known.__annotations__, n=1):
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(known.__annotations__)}"


_BELONGS_TO = {
    TaskOptions: " for one enqueue; give it to the task: @queue.task({name}=...)",
    JobOptions: " for a task; give it to one enqueue: task.options({name}=...)",
}


def _check_aliases(where: str, task_name: str, aliases: Any) -> None:
    if not isinstance(aliases, list | tuple | set | frozenset):
        raise OptionError(
            f"{where}aliases is {aliases!r}; give the names that the task had before, as in "
            'aliases=("shop.old_name",)'
        )
    for alias in aliases:
        if not isinstance(alias, str) or not TASK_NAME.fullmatch(alias) or alias == task_name:
            raise OptionError(
                f"{where}aliases has {repr(alias)[:60]}; give names that the task had before, of "
                "1 to 200 characters without spaces"
            )


def _check_renamed(where: str, renamed: Any) -> None:
    is_dict = isinstance(renamed, Mapping)
    if not is_dict or not all(isinstance(name, str) for pair in renamed.items() for name in pair):
        raise OptionError(
            f"{where}renamed is {renamed!r}; give the old and the new names of parameters, as in "
            'renamed={"customer": "customer_id"}'
        )


def _check_task_name(name: Any) -> None:
    if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
        raise OptionError(
            f"the name of a task is {repr(name)[:60]}; use 1 to 200 characters without spaces, or "
            "omit it to have it named by its module and function"
        )


def check_known_task_name(name: Any) -> None:
    """Check a name that is to be that of an existing task."""
    if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
        raise OptionError(
            f"{shown(name)} is no name of a task; give task.name, as in 'shop.jobs.send'"
        )


def shown(name: Any) -> str:
    """A name for an error: as it is, or the beginning of its repr if it is long or no name."""
    is_name = isinstance(name, str) and len(name) <= LONGEST_SHOWN and name.isprintable() and name
    return name if is_name else repr(name)[:LONGEST_SHOWN]


def check_queue_name(queue: Any, where: str = "") -> None:
    if not isinstance(queue, str) or not QUEUE_NAME.fullmatch(queue):
        raise OptionError(
            f"{where}queue is {queue!r}; a queue name has 1 to 64 letters, digits or _ . : -"
        )


def check_application(name: Any) -> None:
    if name != "" and (not isinstance(name, str) or not QUEUE_NAME.fullmatch(name)):
        raise OptionError(
            f"PgQueue: application is {name!r}; give a name of 1 to 64 letters, digits or _ . : -"
        )


def check_whole(where: str, name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{where}{name} is {value!r}; give a whole number from {least} to {most}")


def _check_max_unreadable(where: str, span: Any) -> None:
    if not _is_span(span, least=timedelta(0)):
        raise OptionError(
            f"{where}max_unreadable is {span!r}; give a timedelta from zero to "
            f"{LONGEST_DELAY.days} days"
        )


def check_start(where: str, delay: Any, run_at: Any) -> None:
    """Check when a job is to start: after a delay, at a time, or both None."""
    if delay is not None and not _is_span(delay, least=timedelta(0)):
        raise OptionError(
            f"{where}delay is {delay!r}; give a timedelta from zero to {LONGEST_DELAY.days} days"
        )
    if run_at is None:
        return
    if delay is not None:
        raise OptionError(f"{where}both delay and run_at are given; give one of them")
    if not isinstance(run_at, datetime) or run_at.utcoffset() is None:
        raise OptionError(
            f"{where}run_at is {run_at!r}; give a datetime with a time zone, "
            "e.g. datetime.now(UTC) + timedelta(hours=1)"
        )
    if not FIRST_RUN_AT <= run_at <= LAST_RUN_AT:
        raise OptionError(f"{where}run_at is {run_at}; give a time from the year 2000 to 9999")


def _check_expires_in(where: str, span: Any) -> None:
    if span is not None and not _is_span(span, least=SHORTEST_SPAN):
        raise OptionError(
            f"{where}expires_in is {span!r}; give a timedelta above zero, of at most "
            f"{LONGEST_DELAY.days} days, or None"
        )


def _check_uniqueness(where: str, options: Options) -> None:
    key = options.unique_key
    if key is not None and not isinstance(key, str) and not callable(key):
        raise OptionError(f"{where}unique_key is {key!r}; give a string, a callable or None")
    _check_on_duplicate(where, options.on_duplicate)
    unique = options.unique
    if unique is not None and not isinstance(unique, Unique):
        raise OptionError(
            f"{where}unique is {unique!r}; give a Unique, e.g. Unique(by=('customer_id',))"
        )
    if unique is not None and (key is not None or options.on_duplicate != DEFAULT_ON_DUPLICATE):
        raise OptionError(
            f"{where}both unique and unique_key or on_duplicate are given; say it all in unique, "
            "as in Unique(key=..., on_conflict='raise')"
        )
    own = key if unique is None else unique.key
    if isinstance(own, str):
        storable_key(own, options.task)


def _check_on_duplicate(where: str, on_duplicate: Any) -> None:
    if on_duplicate not in ON_DUPLICATE:
        raise OptionError(f"{where}on_duplicate is {on_duplicate!r}; give 'return' or 'raise'")


def _check_known_to_workers(where: str, of_task: Options, of_job: Options) -> None:
    """Refuse what a worker would not apply: it knows the options of the task."""
    if of_job.uniqueness is not None and of_job.frees_key_at_start != of_task.frees_key_at_start:
        until = "started" if of_task.frees_key_at_start else "finished"
        raise OptionError(
            f"{where}its jobs give their unique keys back when they have {until}, which one "
            f"enqueue cannot change; give unique=Unique(..., until={until!r}), or change the "
            "task"
        )
    if of_job.expires_in != of_task.expires_in and of_task.expires_in is None:
        raise OptionError(
            f"{where}expires_in is given for one enqueue, and the task has none, so no worker "
            "would look at it; give the task an expires_in too"
        )


def _check_executor(where: str, options: Options) -> None:
    if options.executor not in EXECUTORS:
        raise OptionError(f"{where}executor is {options.executor!r}; give 'thread' or 'process'")
    if options.executor == "process" and not HAS_PROCESS_GROUPS:
        raise OptionError(f"{where}executor='process' needs a POSIX system: omit it")
    if options.executor == "process" and options.transactional:
        raise OptionError(
            f"{where}a handler in a process of its own cannot be transactional: its writes are on "
            "a connection of that process, and cannot commit with the end of its job; leave "
            "executor away, or open queue.session() in the handler"
        )
    if options.memory_limit is None:
        return
    check_whole(where, "memory_limit", options.memory_limit, LEAST_MEMORY, MOST_MEMORY)
    if options.executor != "process":
        raise OptionError(f"{where}memory_limit bounds a process: give executor='process' too")
    if not CAN_LIMIT_MEMORY:
        raise OptionError(f"{where}this platform cannot bound a process: leave memory_limit away")


def _check_secret_args(where: str, names: Any) -> None:
    is_list = isinstance(names, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"{where}secret_args is {names!r}; give the names of parameters, as in "
            'secret_args=("token",)'
        )


def _is_span(value: Any, *, least: timedelta) -> bool:
    return isinstance(value, timedelta) and least <= value <= LONGEST_DELAY
