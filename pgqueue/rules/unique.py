"""Unique jobs: which jobs are duplicates, and what an enqueue does about a duplicate."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, get_args

from pgqueue.errors import OptionError, PayloadError, TaskDefinitionError

LONGEST_PLAIN_KEY = 512
LONGEST_SPAN = timedelta(days=36_525)


Until = Literal["started", "finished", "succeeded"]
"""When a job releases its unique key."""

OnConflict = Literal["return", "raise", "replace", "postpone", "cancel"]
"""What an enqueue does if another job holds the unique key."""

Across = Literal["queues"]
"""Where a unique key is the only one, apart from its queue."""

KEY_OF_PERIOD = "pgqueue.period:"
"""The prefix of keys that stay taken after their jobs have succeeded."""

KEY_ACROSS_QUEUES = "pgqueue.across:"
"""The prefix of keys that only one job of all queues may hold."""

KEY_UNTIL_SUCCEEDED = "pgqueue.until_succeeded:"
"""The prefix of keys that stay taken after their jobs have failed."""

PREFIXES = (
    (KEY_OF_PERIOD, "period"),
    (KEY_ACROSS_QUEUES, "across"),
    (KEY_UNTIL_SUCCEEDED, "until"),
)
"""How the stored keys of some options begin, by which statements know how a key is held."""

MOVES_HOLDER = ("replace", "postpone")
CHANGES_HOLDER = (*MOVES_HOLDER, "cancel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """Defines which jobs of a task are duplicates, and what an enqueue does about a duplicate.

    At most one job of a queue holds a unique key at a time; with ``across="queues"``, one job of
    all queues.  The key is made from the task's name and the values that ``by`` names; ``key``
    replaces it.

    Args:
        by: The parameters whose values make the key, defaults included: a name, or several.  A key
            of the job's meta is named as ``"meta.tenant"``.  None: all parameters.  ``()``: none,
            so that the task has one job at a time.  Values are compared as they are stored; the key
            contains only a digest of them.
        key: Instead of ``by``: the key, or a function of some parameters that returns the key.  The
            key is stored and shown unmasked, and tasks of one queue that use the same key share it.
            If the function returns None, the job is not unique.
        period: Allows one success in each period: the key stays taken after the job has succeeded,
            until the period is over.  Periods follow each other from 1970-01-01 UTC; a job belongs
            to the period of its ``run_at``, by the database's clock.  If the job fails, is
            cancelled or is pruned, its key is free at once.  None: ``until`` decides when the key
            is free.
        until: When the job releases its key: when it ends (``"finished"``); right before its
            handler first starts (``"started"``); or when it has succeeded or was cancelled
            (``"succeeded"``), so that a job that has failed keeps the key until it is deleted or
            pruned.  With ``"started"``, a failed attempt does not take the key again.
        on_conflict: What an enqueue does if another job holds the key.  ``"return"`` returns the
            other job; ``"raise"`` raises DuplicateJob.  ``"replace"`` gives the waiting job the new
            arguments, time, priority, meta and tags; ``"postpone"`` gives it the new time only.
            These two do not change a job that has started: with ``until="started"`` a new job is
            enqueued, otherwise DuplicateJob is raised.  ``"cancel"`` cancels the other job, as
            ``queue.cancel`` does, whether it waits or runs, and enqueues a new job.
        at_most: With ``"replace"`` or ``"postpone"``: the latest time of the waiting job, counted
            from its creation.  None: no limit.
        across: ``"queues"``: one job of all queues holds the key.  The key is then stored with a
            prefix, and differs from the same key of one queue.  Not with ``period``,
            ``until="succeeded"``, ``"replace"``, ``"postpone"`` or ``"cancel"``.

    Raises:
        OptionError: A value is wrong, or two do not go together.

    Example:
        >>> @queue.task(unique=Unique(by="customer", on_conflict="postpone"))
        ... def index(customer: int, reason: str) -> None: ...
        >>> job = index.options(delay=timedelta(seconds=5)).enqueue(session, 7, "renamed")
    """

    by: Sequence[str] | None = None
    key: str | Callable[..., str | None] | None = None
    period: timedelta | None = None
    until: Until = "finished"
    on_conflict: OnConflict = "return"
    at_most: timedelta | None = None
    across: Across | None = None

    def __post_init__(self) -> None:
        if isinstance(self.by, str):
            object.__setattr__(self, "by", (self.by,))
        elif self.by is not None:
            _check_names(self.by)
        if self.by is not None and self.key is not None:
            raise OptionError("Unique: both by and key are given; give one of them")
        if self.key is not None and not isinstance(self.key, str) and not callable(self.key):
            raise OptionError(f"Unique: key is {self.key!r}; give a string, a callable or None")
        _check_word("until", self.until, Until)
        _check_word("on_conflict", self.on_conflict, OnConflict)
        if self.period is not None:
            _check_period(self.period, self.until)
        if self.at_most is not None:
            _check_at_most(self.at_most, self.on_conflict)
        if self.across is not None:
            _check_word("across", self.across, Across)
            others = {
                "a period": self.period is not None,
                f"on_conflict={self.on_conflict!r}": self.changes_holder,
                "until='succeeded'": self.until == "succeeded",
            }
            for other, is_given in others.items():
                if is_given:
                    raise OptionError(
                        f"Unique: across={self.across!r} and {other} are given; give one of them"
                    )

    @property
    def changes_holder(self) -> bool:
        """Whether an enqueue may change the job that holds the key."""
        return self.on_conflict in CHANGES_HOLDER

    @property
    def moves_holder(self) -> bool:
        """Whether an enqueue may give the job that holds the key another time."""
        return self.on_conflict in MOVES_HOLDER

    @property
    def prefix(self) -> str:
        """How the stored keys begin.  The prefix of a period is that of its time, which the
        database tells."""
        if self.across is not None:
            return KEY_ACROSS_QUEUES
        return KEY_UNTIL_SUCCEEDED if self.until == "succeeded" else ""


def names_wanted_by(
    unique_key: Callable[..., Any], task_name: str, parameters: frozenset[str]
) -> frozenset[str]:
    """Return the parameters of a task that its unique-key function names."""
    wanted: set[str] = set()
    try:
        asked = inspect.signature(unique_key).parameters
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(
            f"task {task_name}: the signature of unique_key, {unique_key!r}, cannot be read; "
            "write it as a lambda that names the parameters it needs"
        ) from error
    for parameter in asked.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return parameters
        if parameter.name in parameters:
            wanted.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise TaskDefinitionError(
                f"task {task_name}: unique_key asks for {parameter.name!r}, which is not a "
                f"parameter of the task; it may name {', '.join(sorted(parameters)) or 'nothing'}"
            )
    return frozenset(wanted)


def is_across_queues(stored_key: str | None) -> bool:
    """Whether only one job of all queues may hold this key."""
    return stored_key is not None and stored_key.startswith(KEY_ACROSS_QUEUES)


def when_free(stored_key: str | None, holder: str = "that job") -> str:
    """Return in words when the job that holds this key gives it up.

    ``holder``: what the sentence calls the job.
    """
    if stored_key is not None and stored_key.startswith(KEY_UNTIL_SUCCEEDED):
        return f"{holder} has succeeded, or was deleted after it had failed"
    if stored_key is not None and stored_key.startswith(KEY_OF_PERIOD):
        return f"{holder} has failed or was cancelled, or its period is over"
    return f"{holder} has ended"


def storable_key(key: Any, task_name: str, prefix: str = "") -> str | None:
    """Return the stored form of a key.  A long key becomes a digest, which fits into an index."""
    if key is None:
        return None
    if not isinstance(key, str) or not key:
        raise OptionError(
            f"task {task_name}: unique_key gave {key!r}; it must give a str of at least one "
            "character, or None for a job that is not unique"
        )
    has_surrogate = not key.isprintable() and any("\ud800" <= each <= "\udfff" for each in key)
    if "\x00" in key or has_surrogate:
        raise PayloadError(
            f"task {task_name}: unique_key {key!r} holds a character PostgreSQL cannot store; "
            "remove NUL characters and lone surrogates"
        )
    for reserved, option in PREFIXES:
        if key.startswith(reserved):
            raise OptionError(
                f"task {task_name}: unique_key {key!r} begins as the keys of Unique({option}=...) "
                "do; choose another"
            )
    return f"{prefix}{digest_if_long(key)}"


def digest_if_long(key: str) -> str:
    if len(key) <= LONGEST_PLAIN_KEY:
        return key
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def stored_forms(key: str) -> list[str]:
    """The forms in which a key that an operator gives may be stored."""
    stored = digest_if_long(key)
    # A key as in Job.unique_key may be longer, by its prefix, than one that is stored plainly.
    return [key, *(f"{prefix}{stored}" for prefix in ("", KEY_ACROSS_QUEUES, KEY_UNTIL_SUCCEEDED))]


def split_period(stored_key: str) -> tuple[str, str]:
    """Split a key as it is held into the words for its period, maybe empty, and the key itself."""
    if not stored_key.startswith(KEY_OF_PERIOD):
        return "", stored_key
    begins, _, key = stored_key.removeprefix(KEY_OF_PERIOD).partition(":")
    return f"{KEY_OF_PERIOD}{begins}:", key


def _check_names(by: Any) -> None:
    is_list = isinstance(by, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in by):
        raise OptionError(
            f"Unique: by is {by!r}; give the name of a parameter, as in "
            'by="customer_id", a tuple of names, or None for all of them'
        )


def _check_word(name: str, word: Any, words: Any) -> None:
    if word not in get_args(words):
        known = ", ".join(map(repr, get_args(words)))
        raise OptionError(f"Unique: {name} is {word!r}; give one of {known}")


def _check_period(span: Any, until: str) -> None:
    if not isinstance(span, timedelta) or not timedelta(seconds=1) <= span <= LONGEST_SPAN:
        raise OptionError(
            f"Unique: period is {span!r}; give a timedelta from a second to {LONGEST_SPAN.days} "
            "days"
        )
    if until != "finished":
        raise OptionError(
            f"Unique: a period keeps the key after success and gives it back after a failure, and "
            f"until={until!r} does not; give one of them"
        )


def _check_at_most(span: Any, on_conflict: str) -> None:
    if not isinstance(span, timedelta) or not timedelta(0) < span <= LONGEST_SPAN:
        raise OptionError(
            f"Unique: at_most is {span!r}; give a timedelta above zero, of at most "
            f"{LONGEST_SPAN.days} days"
        )
    if on_conflict not in MOVES_HOLDER:
        raise OptionError(
            f"Unique: at_most bounds how far a job is moved, and on_conflict={on_conflict!r} moves "
            "none; omit at_most"
        )
