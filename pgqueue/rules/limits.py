"""Limits: how many jobs may run at once or start in a period, and the keys under which jobs count.

A limit has a name.  Without ``by`` it has one key, the name; with ``by`` it has one key for each
value of these arguments or keys of meta.  A job holds a place under the key of each of its limits.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, Literal

from pgqueue.arguments.text import canonical_text
from pgqueue.errors import OptionError, TaskDefinitionError
from pgqueue.meta import check_names_in_by, names_key_of_meta, values_of_keys
from pgqueue.redaction import MASK
from pgqueue.rules.spans import exactly

NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff]{1,200}")
LARGEST_CAPACITY = 1_000_000
MOST_LIMITS = 4
"""Limits of one task.  The keys of a job are in an index, whose rows have at most 2704 bytes."""
MOST_OF_QUEUE = 2
"""One limit of jobs at once, and one rate."""
SHORTEST_PERIOD, LONGEST_PERIOD = timedelta(milliseconds=1), timedelta(days=366)
LONGEST_REFILL = timedelta(days=36525)
"""The longest ``burst * per``, in which a bucket with a capacity of 1 fills: it ends at a date."""
SEPARATOR = "\n"
"""Stands between the keys of a job: neither names nor JSON on one line contain it."""
UNDECLARED = "pgqueue.undeclared"
"""The limit of jobs whose task no worker had declared when they were enqueued by its name, with the
name as value.  Nobody declares this limit, so nothing is admitted under it: a worker that has the
task gives the job its keys."""
LONGEST_VALUES = 100
"""Bytes of the values in a key; longer values are replaced by a digest."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``capacity`` jobs run at once, or with ``per`` start in a period, over all workers.

    Args:
        capacity: How many jobs, from 0.
        by: The name of a parameter, or of a key of the job's meta as ``"meta.tenant"``, or several;
            each value then has the whole capacity.  Jobs without the key of meta count as one
            value, null.
        name: Tasks whose limits have the same name share the limit.  Without a name it is named
            after its task (``shop.send``, or ``shop.send:tenant_id`` with ``by``) or its queue
            (``queue:mail``).  The name of a rate also ends in ``:rate``.
        order: ``"strict"``, only with a capacity of 1 or 0: jobs of a key start in the order of
            their priority and time, and no job overtakes another.
        failed_head: With ``order="strict"``, what happens while the first job waits for its retry,
            or is snoozed: ``"block"`` makes the others wait until it has ended, ``"skip"`` lets
            them pass.
        per: A period.  The limit is then a rate, a token bucket: it counts starts, including those
            of retries, and not how long jobs run.
        burst: How many jobs of a rate may start at once after a pause.  Otherwise the starts are
            ``per / capacity`` apart.

    Raises:
        OptionError: A value is wrong.

    Example:
        >>> @queue.task(limit=[Limit(5, name="bank"), Limit(1, by="account")])
        ... def transfer(account: int, cents: int) -> None: ...
        >>> @queue.task(limit=Limit(100, per=timedelta(minutes=1), burst=10))
        ... def call(number: str) -> None: ...
    """

    capacity: int
    by: str | Sequence[str] = ()
    name: str | None = field(default=None, kw_only=True)
    order: Literal["any", "strict"] = field(default="any", kw_only=True)
    failed_head: Literal["block", "skip"] = field(default="block", kw_only=True)
    per: timedelta | None = field(default=None, kw_only=True)
    burst: int = field(default=1, kw_only=True)

    is_fair: ClassVar[bool] = False
    """Whether the keys take turns, as ``fair_by`` declares."""

    def __post_init__(self) -> None:
        check_capacity("Limit: ", self.capacity)
        _check_rate(self.per, self.burst)
        names = (self.by,) if isinstance(self.by, str) else self.by
        if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
            raise OptionError(
                f"Limit: by is {self.by!r}; give the name of a parameter, a key of meta as "
                "'meta.tenant', or a tuple of names"
            )
        object.__setattr__(self, "by", tuple(dict.fromkeys(names)))
        if self.name is not None:
            _check_name(self.name)
        for option, allowed in (("order", ("any", "strict")), ("failed_head", ("block", "skip"))):
            if getattr(self, option) not in allowed:
                raise OptionError(
                    f"Limit: {option} is {getattr(self, option)!r}; give {' or '.join(allowed)}"
                )
        if self.is_strict and self.per is not None:
            raise OptionError(
                "Limit: order='strict' is for jobs at once, not for a rate; give two limits"
            )
        if self.is_strict and self.capacity > 1:
            raise OptionError(
                f"Limit: order='strict' means one job at a time, and the capacity is "
                f"{self.capacity}; give Limit(1, order='strict')"
            )
        if self.failed_head == "skip" and not self.is_strict:
            raise OptionError("Limit: failed_head is for order='strict'; omit it")

    @property
    def is_strict(self) -> bool:
        return self.order == "strict"

    def named(self, default: str) -> "Limit":
        """Return this limit with a name."""
        if self.name is not None:
            return self
        by = ["+".join(self.by)] if self.by else []
        kind = ["fair"] if self.is_fair else ["rate"] if self.per is not None else []
        name = ":".join([default, *by, *kind])
        _check_name(name)
        return replace(self, name=name)

    def key(self, values: Mapping[str, Any], *, secret: frozenset[str]) -> str:
        """Return the key under which a job counts, from stored values by their names in ``by``."""
        if not self.by:
            return str(self.name)
        return key_of(
            str(self.name), [values.get(one) for one in self.by], is_secret=self.is_secret(secret)
        )

    def is_secret(self, secret: frozenset[str]) -> bool:
        """Whether the keys contain digests, given the secret arguments of a task."""
        return not secret.isdisjoint(self.by)


@dataclass(frozen=True, slots=True)
class FairLimit(Limit):
    """A limit that ``fair_by`` declares: its capacity is never reached, and its keys take turns."""

    is_fair: ClassVar[bool] = True


def key_of(name: str, values: Sequence[Any], *, is_secret: bool) -> str:
    """Return the key of these stored arguments in the limit of this name."""
    text = canonical_text(values)
    if len(text) > LONGEST_VALUES or is_secret:
        text = f"sha256:{sha256(text.encode()).hexdigest()}"
    return f"{name} {text}"


def name_of(key: str) -> str:
    """Return the name of the limit to which a key belongs: names have no spaces."""
    return key.partition(" ")[0]


def without_values(key: str) -> str:
    """Return a key with its values masked: they are values of arguments."""
    name, space, _ = key.partition(" ")
    return f"{name} {MASK}" if space else name


def has_own_capacity(capacity: int, *, is_fair: bool) -> bool:
    """Whether a limit bounds the jobs at once; one of ``fair_by`` does if its capacity was set."""
    return not is_fair or capacity < LARGEST_CAPACITY


def rate_in_words(capacity: int, period: timedelta) -> str:
    return f"{capacity:,} starts in {exactly(period)}"


@dataclass(frozen=True, slots=True)
class Limited:
    """All limits of an application by name, and the tasks and queues that are under them."""

    limits: Mapping[str, Limit]
    tasks: frozenset[str]
    queues: frozenset[str]


class LimitKeys:
    """The limits of a task's jobs: those of the task, and of the queue."""

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        secret: Iterable[str] = (),
        defaults: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """``defaults`` returns the stored form of the defaults of parameters."""
        self.limits = limits
        self._secret = frozenset(secret)
        self._defaults = defaults() if any(limit.by for limit in limits) else {}

    def __bool__(self) -> bool:
        return bool(self.limits)

    def declared(self) -> list[dict[str, Any]]:
        """What those have to know who make the keys without the code."""
        return [
            {"name": one.name, "by": list(one.by), "is_secret": one.is_secret(self._secret)}
            for one in self.limits
        ]

    def defaults_of_keys(self) -> dict[str, Any]:
        """The stored defaults of the arguments in the keys."""
        names = {name for limit in self.limits for name in limit.by}
        return {name: value for name, value in self._defaults.items() if name in names}

    @property
    def names_in_meta(self) -> frozenset[str]:
        """The names in ``by`` that are those of keys of meta."""
        names = {name for limit in self.limits for name in limit.by}
        return frozenset(filter(names_key_of_meta, names))

    def of(self, args: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
        """Return the keys of a job with these stored arguments and this meta, one a line; None
        without limits."""
        if not self.limits:
            return None
        # Sorted, so that jobs with the same keys are in one lane.
        known = values_of_keys({**self._defaults, **args}, meta)
        keys = {limit.key(known, secret=self._secret) for limit in self.limits}
        return SEPARATOR.join(sorted(keys))


def limits_of_task(
    limit: Any, fair_by: Any, task_name: str, parameters: Sequence[str]
) -> tuple[Limit, ...]:
    """Return the named limits that a task declares, checked."""
    given = (limit,) if isinstance(limit, Limit) else limit
    if not isinstance(given, list | tuple) or not all(isinstance(one, Limit) for one in given):
        raise OptionError(
            f"task {task_name}: limit is {limit!r}; give a Limit, as in limit=Limit(5), or several "
            "in a tuple"
        )
    if len(given) > MOST_LIMITS:
        raise OptionError(f"task {task_name}: {len(given)} limits; give at most {MOST_LIMITS}")
    try:
        turns = [] if fair_by in ((), [], None) else [FairLimit(LARGEST_CAPACITY, by=fair_by)]
    except OptionError as error:
        raise OptionError(
            f"task {task_name}: fair_by is {fair_by!r}; give the name of a parameter, as in "
            'fair_by="tenant_id", a key of meta as "meta.tenant", or a tuple of names'
        ) from error
    for one in (*given, *turns):
        what = "fair_by is" if one.is_fair else "a limit is by"
        check_names_in_by(f"task {task_name}: {what}", one.by, parameters)
    named = tuple(one.named(task_name) for one in (*given, *turns))
    names = [one.name for one in named]
    for name in names:
        if names.count(name) > 1:
            raise TaskDefinitionError(
                f"task {task_name}: two of its limits are named {name!r}; give one of them "
                "another name=..."
            )
    return named


def limits_of_queues(limits: Any) -> dict[str, tuple[Limit, ...]]:
    """Return the named limits of queues.  Checks the limits, but not the names of the queues."""
    if not isinstance(limits, Mapping):
        raise OptionError(f"PgQueue: queue_limits is {limits!r}; give a dict by names of queues")
    of_queues: dict[str, tuple[Limit, ...]] = {}
    for queue, given in limits.items():
        where = f"PgQueue: queue {queue}: "
        several = given if isinstance(given, list | tuple) else (given,)
        for limit in several:
            if not isinstance(limit, Limit):
                raise OptionError(f"{where}{limit!r} is not a Limit")
            if not all(map(names_key_of_meta, limit.by)):
                raise OptionError(
                    f"{where}its limit is by {', '.join(limit.by)}, and the tasks of "
                    "a queue have different parameters; give the tasks a Limit with one name=..., "
                    "or name a key of meta as 'meta.tenant'"
                )
        named = tuple(limit.named(f"queue:{queue}") for limit in several)
        if len(named) > MOST_OF_QUEUE or len({limit.name for limit in named}) < len(named):
            raise OptionError(
                f"{where}give one limit of jobs at once, one rate, or both in a tuple"
            )
        of_queues[queue] = named
    return of_queues


def by_name(limits: Iterable[Limit]) -> dict[str, Limit]:
    """Return limits by their names.  Raises TaskDefinitionError if two of one name differ."""
    found: dict[str, Limit] = {}
    for limit in limits:
        name = str(limit.name)
        known = found.setdefault(name, limit)
        if replace(known, by=limit.by) != limit:
            raise TaskDefinitionError(
                f"the limit {name!r} is declared twice and differently: {known} and {limit}; give "
                "both the same capacity, order, failed_head, per and burst, or one of them another "
                "name"
            )
    return found


def checked_key(where: str, limit: Limit | None, key: Any) -> list[Any]:
    """Return the values of one key, checked.  ``limit``: None if only workers have declared it."""
    values = list(key) if isinstance(key, list | tuple) else [key]
    if not all(isinstance(value, str | int | float | bool | None) for value in values):
        raise OptionError(
            f"{where}the key is {key!r}; give the value in its stored form, a text or a "
            "number, or a tuple of several"
        )
    if limit is not None and len(values) != len(limit.by):
        by = ", ".join(limit.by)
        raise OptionError(
            f"{where}the key is {key!r}; "
            + (f"give the value of {by}" if by else "the limit has no `by`; omit the key")
        )
    return values


def check_capacity(where: str, capacity: Any) -> None:
    if type(capacity) is not int or not 0 <= capacity <= LARGEST_CAPACITY:
        raise OptionError(
            f"{where}the capacity is {capacity!r}; give a whole number from 0 to {LARGEST_CAPACITY}"
        )


def _check_rate(per: Any, burst: Any) -> None:
    if per is None:
        if burst != 1:
            raise OptionError("Limit: burst is for a rate; give per=..., or omit it")
        return
    if not isinstance(per, timedelta) or not SHORTEST_PERIOD <= per <= LONGEST_PERIOD:
        raise OptionError(
            f"Limit: per is {per!r}; give a timedelta from {SHORTEST_PERIOD} to {LONGEST_PERIOD}, "
            "as in per=timedelta(minutes=1)"
        )
    if type(burst) is not int or not 1 <= burst <= LARGEST_CAPACITY:
        raise OptionError(
            f"Limit: burst is {burst!r}; give a whole number from 1 to {LARGEST_CAPACITY}"
        )
    if burst * per > LONGEST_REFILL:
        raise OptionError(
            f"Limit: burst is {burst}, and per {per}; give a smaller burst: the product is at most "
            f"{LONGEST_REFILL.days} days"
        )


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name.encode()) > 200:
        raise OptionError(
            f"the name of a limit is {repr(name)[:60]}; give name=... of at most 200 bytes without "
            "spaces"
        )
