"""The options of tasks, jobs and workers.

:class:`Options` and :class:`OptionsOfWorker` declare each once: name, type, default, check, whether
one enqueue may change it, and its line in the reference.  The command line makes the options of
``pgqueue worker`` of them.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import Any, Literal, TypedDict
from uuid import UUID

from pgqueue.checks import (
    AT_ONCE,
    SHORTEST_SPAN,
    TASK_NAME,
    Check,
    anything,
    check,
    check_queue_or_pattern,
    check_start,
    check_whole,
    instance,
    key,
    node_key,
    one_of,
    optional,
    parameter_names,
    queue_name,
    queues_to_serve,
    renames,
    span,
    span_between,
    start,
    task_names,
    whole,
)
from pgqueue.errors import OptionError, TaskDefinitionError, UnknownOption
from pgqueue.meta import RESERVED, checked_meta, checked_tags
from pgqueue.models import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE
from pgqueue.rules.limits import Limit
from pgqueue.rules.retention import Keep, keep_of
from pgqueue.rules.retry import DEFAULT_RETRY, Retry
from pgqueue.rules.served_queues import is_pattern
from pgqueue.rules.unique import OnConflict, Unique, storable_key

MOST_ATTEMPTS = 30_000
DEFAULT_ON_DUPLICATE = "return"
LEAST_MEMORY = 2**24
MOST_MEMORY = 2**50
MOST_WEIGHT = 1000
A_YEAR = timedelta(days=365)
HAS_PROCESS_GROUPS = hasattr(os, "killpg")
CAN_LIMIT_MEMORY = find_spec("resource") is not None
BOTH = "task and enqueue"


class TaskOptions(TypedDict, total=False):
    """The options of ``@queue.task(...)``, for type checkers.  :class:`Options` describes each."""

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
    on_success: Callable[..., Any] | None
    results: Literal["optional", "required"]
    keep: Keep | timedelta | None
    limit: Limit | Sequence[Limit]
    fair_by: str | Sequence[str]


class JobOptions(TypedDict, total=False):
    """The options of ``task.options(...)``: those that may differ from one enqueue to the next."""

    delay: timedelta | None
    run_at: datetime | None
    priority: int
    queue: str
    timeout: timedelta | None
    expires_in: timedelta | None
    unique: Unique | None
    unique_key: str | Callable[..., str | None] | None
    on_duplicate: Literal["return", "raise"]
    max_attempts: int
    retry: Retry
    meta: Mapping[str, Any]
    tags: Sequence[str]
    node: int | str | UUID | None


class WorkerOptions(TypedDict, total=False):
    """The options of ``Worker(queue, queues, ...)``, for type checkers.
    :class:`OptionsOfWorker` describes each.
    """

    concurrency: int
    poll_interval: timedelta
    grace: timedelta
    age_after: timedelta | None
    max_jobs_per_child: int
    ahead: int
    statistics: bool
    log_jobs: Literal["info", "debug"] | None
    max_jobs: int | None
    max_idle: timedelta | None


def seconds(stored: Any, of_task: timedelta | None) -> timedelta:
    """Return a timedelta that meta has in seconds."""
    return timedelta(seconds=stored)


def as_noted(value: Any) -> Any:
    """Return the value of an option as meta has it."""
    match value:
        case timedelta():
            return value.total_seconds()
        case Retry():
            return value.stored()
    return value


def option(
    default: Any,
    check: Check,
    help: str,
    *,
    by_default: str = "",
    is_for: str = "task",
    from_meta: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Declare an option.

    ``help``: its line in the reference.  ``by_default``: there, a default that its value does not
    explain.  ``is_for``: "task", "enqueue", "task and enqueue" or "worker".  ``from_meta``: the
    value that one enqueue gives is noted in the meta of its job, and this function makes it of its
    JSON and of the value of the task, such as ``seconds`` a timedelta; None stays None.
    """
    about = {
        "check": check,
        "help": help,
        "by_default": by_default,
        "is_for": is_for,
        "from_meta": from_meta,
    }
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a task, or of one enqueue."""

    task: str
    aliases: Sequence[str] = option(
        (), task_names, "names that the task had before, whose jobs it also runs"
    )
    renamed: Mapping[str, str] = option(
        {}, renames, 'names that parameters had before, as `{"old": "new"}`'
    )
    queue: str = option(DEFAULT_QUEUE, queue_name, "the queue of the jobs", is_for=BOTH)
    priority: int = option(
        DEFAULT_PRIORITY, whole(0, 9), "from 0, which starts first, to 9", is_for=BOTH
    )
    max_attempts: int = option(
        DEFAULT_MAX_ATTEMPTS,
        whole(1, MOST_ATTEMPTS),
        "how often a job may start before it fails",
        is_for=BOTH,
    )
    max_interruptions: int = option(
        20,
        whole(1, MOST_ATTEMPTS),
        "the stop of a worker that interrupts a job uses up no attempt, but one of these",
    )
    max_unreadable: timedelta = option(
        timedelta(days=1),
        span(AT_ONCE),
        "how long a job waits for a worker that can read its arguments, before it fails",
        by_default="a day",
    )
    timeout: timedelta | None = option(
        None,
        optional(span(SHORTEST_SPAN)),
        "how long a handler may run: a timedelta",
        is_for=BOTH,
        from_meta=seconds,
    )
    expires_in: timedelta | None = option(
        None,
        optional(span(SHORTEST_SPAN)),
        "a timedelta after `run_at`: a job that has not started by then is cancelled; one enqueue "
        "may change it if the task has one",
        is_for=BOTH,
        from_meta=seconds,
    )
    retry: Retry = option(
        DEFAULT_RETRY,
        instance(Retry, "a Retry, e.g. Retry.never(), and the number of attempts as max_attempts"),
        "when a job runs again after a failed attempt",
        by_default="`Retry.exponential()`: 1 s, doubled after each attempt up to 1 h, with jitter",
        is_for=BOTH,
        from_meta=Retry.from_stored,
    )
    unique: Unique | None = option(
        None,
        optional(instance(Unique, "a Unique, e.g. Unique(by=('customer_id',))")),
        "a `Unique`: which jobs are duplicates, and what an enqueue does about a duplicate",
        is_for=BOTH,
    )
    unique_key: str | Callable[..., str | None] | None = option(
        None,
        key,
        "short for `Unique(key=...)`: a string, or a function of the arguments that it names",
        is_for=BOTH,
    )
    on_duplicate: Literal["return", "raise"] = option(
        DEFAULT_ON_DUPLICATE,
        one_of("return", "raise"),
        "short for `Unique(on_conflict=...)`",
        is_for=BOTH,
    )
    delay: timedelta | None = option(
        None,
        optional(span(AT_ONCE)),
        "how long after the enqueue the job may start: a timedelta",
        by_default="at once",
        is_for="enqueue",
    )
    run_at: datetime | None = option(
        None,
        optional(start),
        "instead of `delay`: when the job may start, a datetime with a time zone",
        is_for="enqueue",
    )
    meta: Mapping[str, Any] = option(
        {}, anything, "a dict of JSON data, which handlers read as `ctx.meta`", is_for="enqueue"
    )
    tags: Sequence[str] = option(
        (), anything, "texts to find jobs by, as with `pgqueue jobs --tag`", is_for="enqueue"
    )
    node: int | str | UUID | None = option(
        None,
        optional(node_key),
        "a key, such as the id of a tenant: a Citus cluster keeps the job on the node that has the "
        "rows of this key",
        by_default="the node of the session",
        is_for="enqueue",
    )
    transactional: bool = option(
        False,
        instance(bool, "True or False"),
        "whether the writes of the handler commit together with the end of its job",
        by_default="true if the handler asks for a Session",
    )
    executor: Literal["thread", "process"] = option(
        "thread",
        one_of("thread", "process"),
        '`"process"` runs the handler in a child process, which a timeout kills',
    )
    memory_limit: int | None = option(
        None,
        optional(whole(LEAST_MEMORY, MOST_MEMORY)),
        "bytes of address space of the child process",
    )
    secret_args: Sequence[str] = option(
        (),
        parameter_names,
        "names of arguments that errors, log lines and commands mask, as `Secret` does for one",
    )
    on_failed: Any = option(
        None,
        anything,
        "a task to enqueue with the id of a job that has failed for good, in the commit that "
        "records the failure",
    )
    on_success: Any = option(
        None,
        anything,
        "a task to enqueue with the id of a job that has succeeded, and with its result if it has "
        "a parameter `result`, in the commit that records the success",
    )
    results: Literal["optional", "required"] = option(
        "optional",
        one_of("optional", "required"),
        '`"required"` fails the attempt if its return value cannot be stored as `job.result`; '
        "otherwise a note is stored that says why",
    )
    keep: Keep | None = option(
        None, anything, "how long ended jobs are kept", by_default="as long as the queue says"
    )
    limit: Limit | Sequence[Limit] = option(
        (), anything, "a `Limit` of how many jobs run at once or start in a period, or several"
    )
    fair_by: str | Sequence[str] = option(
        (),
        anything,
        "the name of a parameter whose values take turns, or of a key of meta as `meta.tenant`, or "
        "several",
    )

    @classmethod
    def of_task(cls, name: str, options: Mapping[str, Any]) -> "Options":
        if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
            raise OptionError(
                f"the name of a task is {repr(name)[:60]}; use 1 to 200 characters without spaces, "
                "or omit it to have it named by its module and function"
            )
        _refuse_unknown(f"task {name}", options, TaskOptions, JobOptions)
        given = {key: value for key, value in options.items() if key != "name"}
        if "keep" in given:
            given["keep"] = keep_of(given["keep"], f"task {name}: ")
        checked = cls(task=name, **given)
        checked._check(given)
        return checked

    def of_job(self, options: Mapping[str, Any]) -> "Options":
        """Return these options, changed for one enqueue."""
        where = f"task {self.task}: "
        _refuse_unknown(f"task {self.task}", options, JobOptions, TaskOptions)
        given = self._in_unique(options)
        # A unique or unique_key of the enqueue replaces what the task says of uniqueness.
        if "unique" in given:
            given = {"unique_key": None, "on_duplicate": DEFAULT_ON_DUPLICATE, **given}
        elif "unique_key" in given:
            given = {"unique": None, **given}
        if isinstance(given.get("retry"), Retry):
            given = {**given, "retry": _retry_of_job(where, given["retry"], self.retry)}
        changed = replace(self, **given)
        changed._check(given)
        _check_known_to_workers(where, self, changed)
        if not given.keys() & {"meta", "tags"}:
            return changed
        meta, tags = checked_meta(where, changed.meta), checked_tags(where, changed.tags)
        return replace(changed, meta=meta, tags=tags)

    def noted(self, names: Iterable[str]) -> dict[str, Any]:
        """Return what meta notes of the options with these names, which one enqueue has given."""
        return {
            RESERVED + each.name: as_noted(getattr(self, each.name))
            for each in FROM_META
            if each.name in names
        }

    def as_enqueued(self, meta: str | None) -> "Options":
        """Return these options of a task, changed as one enqueue has noted in the meta of its job.

        A row written by hand may have anything there: a wrong value counts as none.
        """
        if meta is None or not any(RESERVED + each.name in meta for each in FROM_META):
            return self
        try:
            stored = json.loads(meta)
        except (ValueError, RecursionError):
            return self
        if not isinstance(stored, dict):
            return self
        changed: dict[str, Any] = {}
        for each in FROM_META:
            if RESERVED + each.name not in stored:
                continue
            with suppress(ValueError, TypeError, OverflowError):
                own, of_task = stored[RESERVED + each.name], getattr(self, each.name)
                value = None if own is None else each.metadata["from_meta"](own, of_task)
                if each.metadata["check"](value) is None:
                    changed[each.name] = value
        return replace(self, **changed) if changed else self

    @property
    def uniqueness(self) -> Unique | None:
        """``unique``, or what its short forms ``unique_key`` and ``on_duplicate`` stand for."""
        if self.unique is None and self.unique_key is not None:
            return Unique(key=self.unique_key, on_conflict=self.on_duplicate)
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

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of the jobs: at first, and when they are retried."""
        return (self.queue,) if self.retry.queue is None else (self.queue, self.retry.queue)

    def _in_unique(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, with ``on_duplicate`` as part of the ``unique`` of the task."""
        if self.unique is None or "on_duplicate" not in options:
            return options
        if "unique" in options or "unique_key" in options:
            return options
        given = options["on_duplicate"]
        check(f"task {self.task}: ", "on_duplicate", given, one_of("return", "raise"))
        unique = replace(self.unique, on_conflict=options["on_duplicate"], at_most=None)
        others = {name: value for name, value in options.items() if name != "on_duplicate"}
        return others | {"unique": unique}

    def hiding(self, names: Iterable[str]) -> "Options":
        """Return these options, with more secret arguments."""
        return replace(self, secret_args=tuple(sorted({*self.secret_args, *names})))

    def _check(self, given: Iterable[str]) -> None:
        """Check the options that were given, and how all of them go together."""
        where = f"task {self.task}: "
        for name in given:
            check(where, name, getattr(self, name), OPTION[name].metadata["check"])
        if self.task in self.aliases:
            raise OptionError(f"{where}aliases has its own name; give names that it had before")
        check_start(where, self.delay, self.run_at)
        _check_executor(where, self)
        key, unique = self.unique_key, self.unique
        if unique is not None and (key is not None or self.on_duplicate != DEFAULT_ON_DUPLICATE):
            raise OptionError(
                f"{where}both unique and unique_key or on_duplicate are given; say it all in "
                "unique, as in Unique(key=..., on_conflict='raise')"
            )
        own = key if unique is None else unique.key
        if isinstance(own, str):
            storable_key(own, self.task)
        unique = self.uniqueness
        holds_in_queue = unique is not None and unique.until != "started" and unique.across is None
        if holds_in_queue and self.retry.queue not in (None, self.queue):
            raise OptionError(
                f"{where}its retries move to queue {self.retry.queue!r}, where its unique key does "
                "not hold; give unique=Unique(..., across='queues'), or omit in_queue()"
            )


OPTIONS = tuple(each for each in fields(Options) if each.name != "task")
"""The declarations of all options of tasks and jobs."""
OPTION = {each.name: each for each in OPTIONS}
FROM_META = tuple(each for each in OPTIONS if each.metadata["from_meta"] is not None)
"""The options that an enqueue notes in the meta of its job."""


@dataclass(frozen=True, slots=True)
class OptionsOfWorker:
    """All options of a worker."""

    queues: Sequence[str] | Mapping[str, int] = option(
        (DEFAULT_QUEUE,),
        queues_to_serve,
        "the queues to serve: names, patterns such as `mail.*` or `*`, or a weight for each name",
        by_default="the queues of its tasks, and `'default'`",
        is_for="worker",
    )
    concurrency: int = option(
        10, whole(1, 1000), "how many handlers run at once, each in a thread", is_for="worker"
    )
    poll_interval: timedelta = option(
        timedelta(seconds=1),
        span_between(timedelta(milliseconds=10), A_YEAR),
        "the longest time that a due job waits if a wake-up is lost",
        by_default="a second",
        is_for="worker",
    )
    grace: timedelta = option(
        timedelta(seconds=30),
        span_between(AT_ONCE, A_YEAR),
        "how long running handlers may take to end after the worker is stopped",
        by_default="30 seconds",
        is_for="worker",
    )
    age_after: timedelta | None = option(
        None,
        optional(span_between(timedelta(seconds=1), A_YEAR)),
        "after how long a due job counts as one priority more urgent; after twice as long, as two",
        by_default="priorities stay",
        is_for="worker",
    )
    max_jobs_per_child: int = option(
        10_000,
        whole(1, 1_000_000_000),
        "after how many jobs a child process of `executor='process'` is replaced",
        is_for="worker",
    )
    ahead: int = option(
        1000,
        whole(0, 1000),
        "how many quick jobs may be claimed before a slot is free for them; with 0, none is",
        by_default="1000, but no more than run in 20 ms, and a third of it while claims bring "
        "urgent jobs",
        is_for="worker",
    )
    statistics: bool = option(
        True,
        instance(bool, "True or False"),
        "whether attempts and errors are counted, for `stats` and `failures`",
        is_for="worker",
    )
    log_jobs: Literal["info", "debug"] | None = option(
        None,
        optional(one_of("info", "debug")),
        "the level at which the end of each attempt is logged, `info` or `debug`",
        by_default="only failures are logged",
        is_for="worker",
    )
    max_jobs: int | None = option(
        None,
        optional(whole(1, 1_000_000_000)),
        "after how many attempts the worker stops; those that run then end too",
        by_default="it runs until it is stopped",
        is_for="worker",
    )
    max_idle: timedelta | None = option(
        None,
        optional(span_between(timedelta(milliseconds=10), A_YEAR)),
        "after how long without a job the worker stops",
        by_default="it runs until it is stopped",
        is_for="worker",
    )

    @classmethod
    def checked(
        cls, queues: Sequence[str] | Mapping[str, int], options: WorkerOptions
    ) -> "OptionsOfWorker":
        _refuse_unknown("Worker", options, WorkerOptions)
        given = cls(queues, **options)
        for each in OPTIONS_OF_WORKER:
            check("", each.name, getattr(given, each.name), each.metadata["check"])
        for name in queues:
            check_queue_or_pattern(name)
            if isinstance(queues, Mapping):
                if is_pattern(name):
                    raise OptionError(f"queue {name}: give a weight to a queue, not to a pattern")
                check_whole("", f"the weight of queue {name}", queues[name], 1, MOST_WEIGHT)
        return given

    @property
    def names(self) -> tuple[str, ...]:
        """The names and patterns of the queues."""
        return tuple(dict.fromkeys(self.queues))

    @property
    def weights(self) -> Mapping[str, int] | None:
        return self.queues if isinstance(self.queues, Mapping) else None


OPTIONS_OF_WORKER = fields(OptionsOfWorker)
"""The declarations of all options of workers."""


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


def _refuse_unknown(
    where: str, options: Mapping[str, Any], known: type, others: type | None = None
) -> None:
    for name in options:
        if name not in known.__annotations__:
            hint = f"; known are {', '.join(known.__annotations__)}"
            if name in ELSEWHERE:
                hint = f"; {ELSEWHERE[name]}"
            elif others is not None and name in others.__annotations__:
                hint = _BELONGS_TO[others].format(name=name)
            elif near := difflib.get_close_matches(name, known.__annotations__, n=1):
                hint = f"; did you mean {near[0]!r}?"
            raise UnknownOption(f"{where}: there is no option {name!r}{hint}")


ELSEWHERE = {
    "acks_late": "every job is acknowledged late: a worker that dies loses none",
    "at_front": "give priority=0, which starts first",
    "autoretry_for": "give retry=Retry.exponential().only(...), with the exceptions",
    "bind": "a parameter `ctx: JobContext` has what the bound task has",
    "countdown": "give delay, a timedelta",
    "default_retry_delay": "give retry=Retry.constant(...), with a timedelta",
    "depends_on": "let the job wait by flow.add(task.job(...), after=...) in queue.workflow(...)",
    "eta": "give run_at, a datetime with a time zone",
    "expires": "give expires_in, a timedelta",
    "failure_ttl": "give keep=Keep(failed=...) to the task",
    "headers": "give meta, a dict",
    "ignore_result": "a result is a column of the job; a handler that returns None stores none",
    "job_id": "the database makes the id; give unique_key, and find the job by Job.unique_key",
    "job_timeout": "give timeout, a timedelta",
    "link": "give on_success to the task, or enqueue the next job in the handler's session",
    "link_error": "give on_failed to the task",
    "max_retries": "give max_attempts, one more than the retries",
    "on_failure": "give on_failed to the task",
    "rate_limit": "give limit=Limit(..., per=...), which holds for all workers",
    "result_ttl": "give keep, a timedelta, to the task",
    "retry_backoff": "give retry=Retry.exponential(...)",
    "soft_time_limit": "give timeout, and call ctx.check() in the loops of the handler",
    "task_id": "the database makes the id; give unique_key, and find the job by Job.unique_key",
    "time_limit": "give timeout, and executor='process' to have the handler killed",
    "ttl": "give expires_in, a timedelta",
}
"""Options of Celery and RQ, and what does their work here."""

_BELONGS_TO = {
    TaskOptions: " for one enqueue; give it to the task: @queue.task({name}=...)",
    JobOptions: " for a task; give it to one enqueue: task.options({name}=...)",
}


def _retry_of_job(where: str, retry: Retry, of_task: Retry) -> Retry:
    """Return the policy of one enqueue, with the exceptions of that of the task."""
    own = (retry.retried, retry.given_up)
    if own not in (((), ()), (of_task.retried, of_task.given_up)):
        raise OptionError(
            f"{where}retry of one enqueue has only() or never_on(), whose exceptions cannot be "
            "stored with a job; give them to the task, where they hold for each of its jobs"
        )
    try:
        retry.stored()
    except OptionError as error:
        raise OptionError(f"{where}{error}") from None
    return retry.with_exceptions_of(of_task)


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
    if options.executor == "process" and not HAS_PROCESS_GROUPS:
        raise OptionError(f"{where}executor='process' needs a POSIX system: omit it")
    if options.executor == "process" and options.transactional:
        raise OptionError(
            f"{where}a handler in a process of its own cannot be transactional: its writes are on "
            "a connection of that process, and cannot commit with the end of its job; omit "
            "executor, or open queue.session() in the handler"
        )
    if options.memory_limit is None:
        return
    if options.executor != "process":
        raise OptionError(f"{where}memory_limit bounds a process: give executor='process' too")
    if not CAN_LIMIT_MEMORY:
        raise OptionError(f"{where}this platform cannot bound a process: omit memory_limit")
