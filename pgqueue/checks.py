"""Checks of single values that a caller gives: what is wrong with one, and what to give instead."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pgqueue.errors import ArgumentsError, OptionError, PgQueueError

Check = Callable[[Any], str | None]
"""Takes a value and returns the end of a message, what to give instead; None for a right value."""

ALL_QUEUES = "*"
"""In place of the name of a queue that is paused or resumed."""
QUEUE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff]{1,200}")
VERSION = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{0,200}")
FIRST_RUN_AT = datetime(2000, 1, 1, tzinfo=UTC)
LAST_RUN_AT = datetime(9999, 12, 31, tzinfo=UTC)
AT_ONCE = timedelta(0)
SHORTEST_SPAN = timedelta(microseconds=1)
LONGEST_KEY = 200
"""How many characters the key of a signal has at most."""
LONGEST_DELAY = timedelta(days=36_525)
BIGINT = 2**63
"""The ids of jobs and batches are smaller, because their type in PostgreSQL is bigint."""
LONGEST_SHOWN = 60
"""Characters of a name in an error."""


def check(where: str, name: str, value: Any, rule: Check) -> None:
    """Raise OptionError if a value breaks a rule."""
    if (instead := rule(value)) is not None:
        raise OptionError(f"{where}{name} is {quoted(value)}; {instead}")


def quoted(value: Any) -> str:
    """The repr of a value for an error; of its type, if that raises or Python refuses it."""
    try:
        return repr(value)
    except Exception:  # the application's code, or an int of more digits than Python writes
        return f"a {type(value).__name__}"


def check_queue_name(queue: Any, where: str = "") -> None:
    check(where, "queue", queue, queue_name)


def check_queue_or_all(queue: Any) -> None:
    """Of what can be paused: a queue, or all queues."""
    if queue != ALL_QUEUES:
        check_queue_name(queue)


def check_application(name: Any) -> None:
    if name != "" and (not isinstance(name, str) or not QUEUE_NAME.fullmatch(name)):
        raise OptionError(
            f"PgQueue: application is {name!r}; give a name of 1 to 64 letters, digits or _ . : -"
        )


def check_version(version: Any) -> None:
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise OptionError(f"PgQueue: version is {version!r}; give one line of 200 characters")


def check_whole(where: str, name: str, value: Any, least: int, most: int) -> None:
    check(where, name, value, whole(least, most))


def check_start(where: str, delay: Any, run_at: Any) -> None:
    """Check when a job is to start: after a delay, at a time, or both None."""
    check(where, "delay", delay, optional(span(AT_ONCE)))
    if run_at is not None and delay is not None:
        raise OptionError(f"{where}both delay and run_at are given; give one of them")
    check(where, "run_at", run_at, optional(start))


def check_known_task_name(name: Any) -> None:
    """Check a name that must be that of an existing task."""
    if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
        raise OptionError(
            f"{shown(name)} is not the name of a task; give task.name, as in 'shop.jobs.send'"
        )


def check_text(where: str, name: str, value: Any) -> None:
    """Refuse what no text in PostgreSQL can be: NUL and lone surrogates cannot be stored."""
    is_text = isinstance(value, str) and not any(
        one == "\0" or "\ud800" <= one <= "\udfff" for one in value
    )
    if not is_text:
        raise OptionError(f"{where}{name} is {shown(value)}; give a text")


def shown(name: Any) -> str:
    """A name for an error: as it is, or the beginning of its repr if it is long or no name."""
    is_name = isinstance(name, str) and len(name) <= LONGEST_SHOWN and name.isprintable() and name
    return name if is_name else quoted(name)[:LONGEST_SHOWN]


def anything(value: Any) -> str | None:
    """For a value that other code checks."""
    return None


def optional(rule: Check) -> Check:
    def or_none(value: Any) -> str | None:
        if value is None or (instead := rule(value)) is None:
            return None
        return f"{instead}, or None"

    return or_none


def whole(least: int, most: int) -> Check:
    def number(value: Any) -> str | None:
        is_right = type(value) is int and least <= value <= most
        return None if is_right else f"give a whole number from {least} to {most}"

    return number


def span(least: timedelta) -> Check:
    bound = "from zero to" if least == AT_ONCE else "above zero, of at most"

    def duration(value: Any) -> str | None:
        is_right = isinstance(value, timedelta) and least <= value <= LONGEST_DELAY
        return None if is_right else f"give a timedelta {bound} {LONGEST_DELAY.days} days"

    return duration


def span_between(least: timedelta, most: timedelta) -> Check:
    def duration(value: Any) -> str | None:
        is_right = isinstance(value, timedelta) and least <= value <= most
        bounds = f"{least.total_seconds():g} s to {most.days} days"
        return None if is_right else f"give a timedelta of {bounds}"

    return duration


def instance(type: type, instead: str) -> Check:
    return lambda value: None if isinstance(value, type) else f"give {instead}"


def one_of(*values: str) -> Check:
    return lambda value: None if value in values else f"give {' or '.join(map(repr, values))}"


def check_queue_or_pattern(name: Any) -> None:
    """Of the queues of a worker: a name, or a prefix and ``*``."""
    if not isinstance(name, str) or (name != "*" and queue_name(name.removesuffix("*"))):
        raise OptionError(
            f"queue {shown(name)}: a queue name has 1 to 64 letters, digits or _ . : -; a worker "
            "may also serve '*', or a prefix followed by '*'"
        )
    if name.startswith("-"):
        raise OptionError(
            f"queue {name}: a worker cannot leave a queue out; give the names of the queues that "
            "it is to serve"
        )


def queues_to_serve(value: Any) -> str | None:
    if value and isinstance(value, Sequence | Mapping | Set) and not isinstance(value, str):
        return None
    return (
        "give a list of queue names, e.g. ['default'], or a weight for each queue, e.g. "
        "{'mail': 3, 'default': 1}"
    )


def queue_name(value: Any) -> str | None:
    if isinstance(value, str) and QUEUE_NAME.fullmatch(value):
        return None
    return "a queue name has 1 to 64 letters, digits or _ . : -"


def start(value: Any) -> str | None:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        return "give a datetime with a time zone, e.g. datetime.now(UTC) + timedelta(hours=1)"
    if not FIRST_RUN_AT <= value <= LAST_RUN_AT:
        return "give a time from the year 2000 to 9999"
    return None


def key(value: Any) -> str | None:
    is_right = value is None or isinstance(value, str) or callable(value)
    return None if is_right else "give a string, a callable or None"


def node_key(value: Any) -> str | None:
    is_text = type(value) is str and value.isprintable()
    is_right = is_text or isinstance(value, UUID) or whole(-BIGINT, BIGINT - 1)(value) is None
    return None if is_right else "give a whole number of 64 bits, a printable text or a UUID"


def parameter_names(value: Any) -> str | None:
    if _are_all(value, _is_text):
        return None
    return 'give the names of parameters, as in secret_args=("token",)'


def task_names(value: Any) -> str | None:
    if _are_all(value, lambda name: isinstance(name, str) and TASK_NAME.fullmatch(name)):
        return None
    return (
        "give the names that the task had before, each of 1 to 200 characters without spaces, "
        'as in aliases=("shop.old_name",)'
    )


def renames(value: Any) -> str | None:
    if isinstance(value, Mapping) and _are_all(
        [n for pair in value.items() for n in pair], _is_text
    ):
        return None
    return 'give the old and the new names of parameters, as in renamed={"customer": "customer_id"}'


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_all(values: Any, is_right: Callable[[Any], Any]) -> bool:
    is_list = isinstance(values, list | tuple | set | frozenset)
    return is_list and all(is_right(each) for each in values)


def checked_id(id: Any, of: str = "job") -> int:
    """Return the id of a job or a batch, or raise ArgumentsError."""
    if type(id) is not int:
        raise ArgumentsError(
            f"a {of}'s id is needed here, not {type(id).__name__}: give {of}.id, a whole number"
        )
    if not -BIGINT <= id < BIGINT:
        raise ArgumentsError(f"{quoted(id)} is too large for a {of}'s id: give {of}.id")
    return id


def check_step_name(where: str, name: Any, hint: str = "") -> None:
    """Raise PgQueueError if a step cannot have this name; ``hint``: how to give another."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= 200:
        raise PgQueueError(
            f"{where}: the name of a step is {name!r}; give 1 to 200 printable characters{hint}"
        )


OWN_SIGNALS = "pgqueue."
"""How the names of the signals begin that workers send."""


def checked_signal(where: str, name: Any, key: Any) -> tuple[str, str]:
    """The name of a signal, and its key as text.  Raises ArgumentsError."""
    if not isinstance(name, str) or not TASK_NAME.fullmatch(name) or name.startswith(OWN_SIGNALS):
        raise ArgumentsError(
            f"{where}: the name of a signal is {shown(name)}; give 1 to 200 characters without "
            f"white space that do not begin with {OWN_SIGNALS!r}"
        )
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise ArgumentsError(f"{where}: the key is {shown(key)}; give a str, an int or a UUID")
    text = str(key)
    if len(text) > LONGEST_KEY or not (text.isprintable() or not text):
        raise ArgumentsError(
            f"{where}: the key is {shown(text)}; give at most {LONGEST_KEY} printable characters"
        )
    return name, text
