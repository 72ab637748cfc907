"""What must not be said of a task or a job."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqueue import (
    Limit,
    OptionError,
    PayloadError,
    PgQueueError,
    Retry,
    TaskDefinitionError,
    Unique,
    UnknownOption,
)

Option = tuple[str, dict[str, Any], type[PgQueueError], str]
"""Its name, what is given, the error, and what the message must match."""

OPTIONS: list[Option] = [
    ("unknown option", {"colour": 1}, UnknownOption, "no option 'colour'; known are delay,"),
    ("misspelt option", {"priorty": 1}, UnknownOption, "did you mean 'priority'"),
    (
        "option of a task",
        {"retry": Retry.never()},
        UnknownOption,
        r"'retry' for one enqueue; .* @queue\.task\(retry=\.\.\.\)",
    ),
    ("priority 10", {"priority": 10}, OptionError, "priority is 10; give a whole number from 0"),
    ("priority -1", {"priority": -1}, OptionError, "from 0 to 9"),
    ("priority True", {"priority": True}, OptionError, "from 0 to 9"),
    ("priority text", {"priority": "1"}, OptionError, "from 0 to 9"),
    ("priority 1.5", {"priority": 1.5}, OptionError, "from 0 to 9"),
    ("max_attempts 0", {"max_attempts": 0}, OptionError, "max_attempts is 0; give .* from 1 to"),
    ("max_attempts 30001", {"max_attempts": 30_001}, OptionError, "from 1 to 30000"),
    ("max_attempts None", {"max_attempts": None}, OptionError, "from 1 to 30000"),
    ("delay negative", {"delay": timedelta(seconds=-1)}, OptionError, "delay .* from zero to"),
    ("delay number", {"delay": 5}, OptionError, "delay is 5; give a timedelta"),
    ("delay NaN", {"delay": math.nan}, OptionError, "give a timedelta"),
    ("delay largest", {"delay": timedelta.max}, OptionError, "36525 days"),
    ("run_at naive", {"run_at": datetime(2030, 1, 1)}, OptionError, r"time zone.*now\(UTC\)"),
    ("run_at text", {"run_at": "2030-01-01T00:00:00Z"}, OptionError, "run_at .* give a datetime"),
    ("run_at year 1", {"run_at": datetime(1, 1, 1, tzinfo=UTC)}, OptionError, "2000 to 9999"),
    ("run_at last", {"run_at": datetime.max.replace(tzinfo=UTC)}, OptionError, "2000 to 9999"),
    (
        "delay and run_at",
        {"delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC)},
        OptionError,
        "both delay and run_at",
    ),
    ("meta list", {"meta": ["a"]}, OptionError, "meta is list; give a dict with str keys"),
    ("meta key", {"meta": {1: "a"}}, OptionError, "str keys, not int"),
    ("meta object", {"meta": {"a": {"b": object()}}}, OptionError, r"meta\.a\.b must be"),
    ("meta NaN", {"meta": {"a": math.nan}}, OptionError, r"meta\.a is nan"),
    ("meta NUL", {"meta": {"a": "b\0"}}, OptionError, "NUL"),
    ("meta of ours", {"meta": {"pgqueue.x": 1}}, OptionError, "are reserved"),
    ("meta too large", {"meta": {"a": "x" * 16_384}}, OptionError, "takes 16,392 bytes as JSON"),
    ("tags text", {"tags": "mail"}, OptionError, "tags is 'mail'; give a list"),
    ("tags many", {"tags": [str(n) for n in range(33)]}, OptionError, "at most 32"),
    ("tag empty", {"tags": [""]}, OptionError, "a tag has 1 to 100 printable"),
    ("tag number", {"tags": [7]}, OptionError, "tags has 7"),
    ("tag long", {"tags": ["x" * 101]}, OptionError, "a tag has 1 to 100"),
    ("on_duplicate", {"on_duplicate": "skip"}, OptionError, "'skip'; give 'return' or 'raise'"),
    ("unique_key number", {"unique_key": 7}, OptionError, "give a string, a callable or None"),
    ("unique_key bytes", {"unique_key": b"k"}, OptionError, "give a string, a callable or None"),
    ("unique_key empty", {"unique_key": ""}, OptionError, "at least one character, or None"),
    ("unique_key NUL", {"unique_key": "a\0"}, PayloadError, "unique_key .* remove NUL"),
    ("unique_key surrogate", {"unique_key": "\ud800"}, PayloadError, "lone surrogates"),
    ("unique text", {"unique": "k"}, OptionError, "unique is 'k'; give a Unique"),
    ("unique by", {"unique": Unique(by=("x",))}, TaskDefinitionError, "'x', which is not a param"),
    (
        "unique key",
        {"unique": Unique(key="a\0")},
        PayloadError,
        "unique_key .* remove NUL",
    ),
    (
        "unique twice",
        {"unique": Unique(), "unique_key": "k"},
        OptionError,
        "both unique and unique_key or on_duplicate are given",
    ),
    (
        "unique and on_duplicate",
        {"unique": Unique(), "on_duplicate": "raise"},
        OptionError,
        "both unique and unique_key or on_duplicate",
    ),
    (
        "unique until",
        {"unique": Unique(until="started")},
        OptionError,
        "when they have finished, which one enqueue cannot change",
    ),
    ("expires_in 0", {"expires_in": timedelta(0)}, OptionError, "expires_in .* above zero"),
    ("expires_in number", {"expires_in": 5}, OptionError, "expires_in is 5; give a timedelta"),
    ("timeout of a job", {"timeout": timedelta(0)}, OptionError, "timeout .* above zero"),
    ("expires_in", {"expires_in": timedelta(1)}, OptionError, "give the task an expires_in too"),
    ("unique_key of a class", {"unique_key": dict}, TaskDefinitionError, "write it as a lambda"),
    ("unique_key asks", {"unique_key": lambda x: x}, TaskDefinitionError, "'x'.*it may name"),
    *(
        (f"queue {name!r:.20}", {"queue": name}, OptionError, "queue is .* 1 to 64 letters")
        for name in (
            *("", "q" * 65, 'a"b', "a'; DROP TABLE jobs;--", "../x", "a\0b", "mail\u2709"),
            *("mail ", "mail\n", "*", "\ud800", None, 7, b"mail", ["mail"]),
        )
    ),
]


DECLARED: list[Option] = [
    ("unknown option", {"colour": 1}, UnknownOption, "no option 'colour'"),
    (
        "option of a job",
        {"delay": timedelta(1)},
        UnknownOption,
        r"'delay' for a task; .* task\.options\(delay=\.\.\.\)",
    ),
    ("misspelt option", {"max_attempt": 1}, UnknownOption, "did you mean 'max_attempts'"),
    ("timeout 0", {"timeout": timedelta(0)}, OptionError, "timeout .* above zero"),
    ("timeout -1", {"timeout": timedelta(-1)}, OptionError, "timeout .* above zero"),
    ("timeout number", {"timeout": 30}, OptionError, "timeout is 30; give a timedelta"),
    ("timeout infinity", {"timeout": math.inf}, OptionError, "give a timedelta"),
    (
        "replace under a limit",
        {"limit": Limit(1), "unique": Unique(on_conflict="replace")},
        OptionError,
        "changes a job that waits for its time",
    ),
    ("limit number", {"limit": 5}, OptionError, "limit is 5; give a Limit, as in"),
    (
        "limit by no parameter",
        {"limit": Limit(1, by="nobody")},
        TaskDefinitionError,
        "by 'nobody', which is not a parameter",
    ),
    ("results True", {"results": True}, OptionError, "results is True; give .optional. or"),
    ("keep number", {"keep": 14}, OptionError, "keep is 14; give a timedelta from zero"),
    ("keep negative", {"keep": timedelta(-1)}, OptionError, "a Keep, or None to keep all jobs"),
    ("keep True", {"keep": True}, OptionError, "keep is True; give a timedelta"),
    ("retry number", {"retry": 3}, OptionError, "retry is 3; give a Retry.* as max_attempts"),
    ("retry class", {"retry": Retry}, OptionError, "give a Retry"),
    ("transactional number", {"transactional": 1}, OptionError, "give True or False"),
    ("max_interruptions 0", {"max_interruptions": 0}, OptionError, "from 1 to 30000"),
    ("max_unreadable -1", {"max_unreadable": timedelta(-1)}, OptionError, "zero to 36525 days"),
    ("max_unreadable None", {"max_unreadable": None}, OptionError, "give a timedelta"),
    ("unique text", {"unique": "k"}, OptionError, "unique is 'k'; give a Unique"),
    (
        "unique twice",
        {"unique": Unique(), "unique_key": lambda: "k"},
        OptionError,
        "both unique and unique_key",
    ),
    ("unique by", {"unique": Unique(by=("x",))}, TaskDefinitionError, "'x', .* may have n"),
    ("expires_in 0", {"expires_in": timedelta(0)}, OptionError, "expires_in .* above zero"),
    ("aliases text", {"aliases": "old"}, OptionError, "aliases is 'old'; give the names"),
    ("aliases own name", {"name": "a.plain", "aliases": ["a.plain"]}, OptionError, "had before"),
    ("aliases space", {"aliases": ["an old name"]}, OptionError, "characters without spaces"),
    ("renamed list", {"renamed": ["m"]}, OptionError, "give the old and the new names"),
    ("renamed number", {"renamed": {"m": 1}}, OptionError, "give the old and the new names"),
    ("renamed old", {"renamed": {"n": "n"}}, TaskDefinitionError, "'n', which is a parameter"),
    ("renamed new", {"renamed": {"m": "x"}}, TaskDefinitionError, "'x', .* may name n"),
    ("unique_key number", {"unique_key": 7}, OptionError, "give a string, a callable or None"),
    ("unique_key empty", {"unique_key": ""}, OptionError, "at least one character"),
    (
        "unique_key asks",
        {"unique_key": lambda user: "k"},
        TaskDefinitionError,
        "asks for 'user'.*may name n",
    ),
]
"""Options of a task, which are refused where it is declared."""
