"""A filter for jobs as one line of text, as ``task:send arg.order_id:42 created:>2h``.

A value with a space is written in double quotes.  A quoted value is always text: ``arg.code:"42"``
is not the number 42.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any

from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.repository.conditions import LAST_ID as LAST_ID
from pgqueue.repository.conditions import RANGES, WRITTEN, JobFilter, ValueKind
from pgqueue.repository.error_groups import LONGEST_MUTE as LONGEST_MUTE
from pgqueue.repository.error_groups import in_hex as in_hex

LONGEST = 1000
"""Bytes of a line."""
LONGEST_SPAN = timedelta(days=100 * 366)
UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}

STATUSES: Mapping[str, dict[str, Any]] = {
    **{status.value: {"statuses": frozenset({status})} for status in JobStatus},
    "due": {"statuses": frozenset({JobStatus.PENDING}), "are_due": True},
    "scheduled": {
        "statuses": frozenset({JobStatus.PENDING}),
        "are_due": False,
        "are_retried": False,
    },
    "retrying": {"statuses": frozenset({JobStatus.PENDING}), "are_retried": True},
}
"""The words after ``status:``, with the fields of the filter."""

WORDS = (*dict.fromkeys(each.metadata["word"] for each in WRITTEN.values()), "status")

FINGERPRINT = re.compile("[0-9a-f]{16}")
_TOKEN = re.compile(
    r"\s*(?P<name>[a-z]+)(?:\.(?P<argument>[^\s:\"]+))?:(?P<sign>[<>]?)"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s"]+))(?!\S)',
    re.DOTALL,
)


def parse(line: str) -> JobFilter | int:
    """The filter of a line; a line of one number is the id of a job.

    Raises OptionError for a line that is too long, and for one that no filter has.
    """
    line = line.strip()
    if len(line.encode(errors="replace")) > LONGEST or "\0" in line:
        raise OptionError(f"the filter has more than {LONGEST} bytes, or a NUL character")
    if line.isdecimal():
        return _number("a job", line)
    fields: dict[str, Any] = {}
    position = 0
    while position < len(line):
        found = _TOKEN.match(line, position)
        if found is None:
            word = line[position:].split(maxsplit=1)[0]
            raise OptionError(f"the filter has {word!r}; its words are {', '.join(WORDS)}")
        for name, value in _fields(found).items():
            if name in ("statuses", "args"):
                value = fields.get(name, type(value)()) | value
            elif name in fields:
                raise OptionError(f"the filter has {found['name']}: twice")
            fields[name] = value
        position = found.end()
    if "args" in fields:
        fields["args"] = tuple(fields["args"].items())
    if fields.keys() & {"are_due", "are_retried"} and len(fields["statuses"]) > 1:
        raise OptionError("status:due, scheduled and retrying stand for one status only")
    return JobFilter(**fields)


def line_of(which: JobFilter) -> str:
    """The line of a filter; without the queues and tags that bound what a user may see."""
    given = which.given()
    words = [f"status:{word}" for word in _statuses(which)]
    for name, each in WRITTEN.items():
        if name in given:
            words.append(FORMS[each.metadata["kind"]].write(each.metadata["word"], given[name]))
    return " ".join(words)


def read_span(text: str) -> timedelta:
    """A span as 90s, 30m, 1h, 7d or 500ms; raises ValueError."""
    found = re.fullmatch("([0-9]{1,9})(ms|[smhd])", text)
    if found is None or (span := timedelta(**{UNITS[found[2]]: int(found[1])})) > LONGEST_SPAN:
        raise ValueError(text)
    return span


def span_in_words(span: timedelta) -> str:
    """A span as :func:`read_span` reads it, to the millisecond."""
    milliseconds = round(span / timedelta(milliseconds=1))
    for unit, name in UNITS.items():
        size = timedelta(**{name: 1}) // timedelta(milliseconds=1)
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return "0s"


def read_fingerprint(text: str) -> int:
    """The kind of an error, as ``pgqueue failures`` prints it; raises ValueError."""
    if not FINGERPRINT.fullmatch(text):
        raise ValueError(text)
    return int.from_bytes(bytes.fromhex(text), "big", signed=True)


def _fields(found: re.Match[str]) -> dict[str, Any]:
    """The fields of the filter that one word sets."""
    name = found["name"] if found["argument"] is None else f"{found['name']}.NAME"
    if name == "status" and found["sign"] == "" and _text(found) in STATUSES:
        return STATUSES[_text(found)]
    for each in WRITTEN.values():
        if each.metadata["word"] == name:
            value = FORMS[each.metadata["kind"]].read(found)
            if value is not None:
                return {each.name: value}
    words = STATUSES if name == "status" else WORDS
    raise OptionError(f"the filter has {found[0].strip()!r}; its words are {', '.join(words)}")


def _text(found: re.Match[str]) -> str:
    """The value of a word, without quotes."""
    if found["quoted"] is None:
        return found["plain"]
    return re.sub(r"\\(.)", r"\1", found["quoted"], flags=re.DOTALL)


def _read_text(found: re.Match[str]) -> str:
    return found["sign"] + _text(found)


def _read_id(found: re.Match[str]) -> int:
    return _number(found["name"], _read_text(found))


def _read_argument(found: re.Match[str]) -> dict[str, Any]:
    value = _read_text(found)
    return {found["argument"]: value if found["quoted"] is not None else _json(value)}


def _read_error(found: re.Match[str]) -> int | None:
    is_kind = found["quoted"] is None and FINGERPRINT.fullmatch(_read_text(found))
    return read_fingerprint(found["plain"]) if is_kind else None


def _read_time(sign: str) -> Callable[[re.Match[str]], datetime | timedelta | None]:
    def read(found: re.Match[str]) -> datetime | timedelta | None:
        is_mine = found["sign"] == sign and found["quoted"] is None
        return _time(found["plain"]) if is_mine else None

    return read


def _read_span_of(found: re.Match[str]) -> timedelta | None:
    if found["quoted"] is not None:
        return None
    example = "took:>10s or took:>500ms"
    span: timedelta = _checked(found["name"], read_span, found["plain"], example)
    return span


def _read_number(found: re.Match[str]) -> int:
    value, (least, most) = _read_text(found), RANGES[ValueKind.NUMBER]
    is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(most))
    if not (is_number and least <= int(value) <= most):
        raise OptionError(f"{found['name']}:{value} is not a number from {least} to {most}")
    return int(value)


def _write_time(sign: str) -> Callable[[str, datetime | timedelta], str]:
    def write(word: str, time: datetime | timedelta) -> str:
        value = span_in_words(time) if isinstance(time, timedelta) else time.isoformat()
        return f"{word}:{sign}{value}"

    return write


def _write_number(word: str, value: int) -> str:
    return f"{word}:{value}"


def _write_arguments(_: str, args: Iterable[tuple[str, Any]]) -> str:
    return " ".join(word_of(f"arg.{name}", value) for name, value in args)


def _checked(name: str, read: Callable[[str], Any], value: str, example: str) -> Any:
    try:
        return read(value)
    except (ValueError, OverflowError):
        raise OptionError(f"{name}:{value} is not understood; write {example}") from None


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 0 < int(value) <= LAST_ID):
        raise OptionError(f"{value!r} is not the id of {name}")
    return int(value)


def _time(value: str) -> datetime | timedelta:
    example = "created:>2h (since two hours ago), created:<7d or created:>2026-11-22T14:00Z"
    try:
        return read_span(value)
    except ValueError:
        time: datetime = _checked("created", datetime.fromisoformat, value, example)
    if not 2000 <= time.year <= 9998:
        raise OptionError(f"created:{value} is not between the years 2000 and 9998")
    return time if time.utcoffset() is not None else time.replace(tzinfo=UTC)


def _json(value: str) -> Any:
    """A number, true, false or null; any other text as it is."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(found, float) and not isfinite(found):
        return value
    return value if isinstance(found, str | list | dict) else found


def word_of(name: str, value: Any) -> str:
    """A word with a text, or of an argument, in quotes where it needs them; empty for None."""
    if value is None and not name.startswith("arg."):
        return ""
    if not isinstance(value, str):
        return f"{name}:{json.dumps(value)}"
    is_plain = re.fullmatch(r'[^\s"<>][^\s"]*', value) and _fields_are_kept(name, value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"{name}:{value}" if is_plain else f'{name}:"{escaped}"'


def _fields_are_kept(name: str, value: str) -> bool:
    """Whether a value without quotes is read as the same text."""
    if name == "error":
        return FINGERPRINT.fullmatch(value) is None
    return not name.startswith("arg.") or _json(value) == value


def _statuses(which: JobFilter) -> list[str]:
    for word, fields in STATUSES.items():
        if all(getattr(which, name) == value for name, value in fields.items()) and (
            which.are_due == fields.get("are_due")
            and which.are_retried == fields.get("are_retried")
        ):
            return [word]
    return sorted(which.statuses)


@dataclass(frozen=True, slots=True)
class WordForm:
    """How a condition of one kind is written as a word of a line."""

    read: Callable[[re.Match[str]], Any]
    """Returns the value; None: it is no word of this kind."""
    write: Callable[[str, Any], str]


FORMS: Mapping[ValueKind, WordForm] = {
    ValueKind.TEXT: WordForm(_read_text, word_of),
    ValueKind.JOB: WordForm(_read_id, _write_number),
    ValueKind.BATCH: WordForm(_read_id, _write_number),
    ValueKind.NUMBER: WordForm(_read_number, _write_number),
    ValueKind.ARGUMENTS: WordForm(_read_argument, _write_arguments),
    ValueKind.ERROR: WordForm(_read_error, lambda word, value: f"{word}:{in_hex(value)}"),
    ValueKind.PART: WordForm(_read_text, word_of),
    ValueKind.SINCE: WordForm(_read_time(">"), _write_time(">")),
    ValueKind.UNTIL: WordForm(_read_time("<"), _write_time("<")),
    ValueKind.SPAN: WordForm(_read_span_of, lambda word, value: f"{word}:>{span_in_words(value)}"),
}
