"""The unique key of a call: given, returned by a function, or made from the stored arguments."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from pgqueue.arguments.payload import Payload
from pgqueue.errors import ArgumentsError, OptionError, PayloadError, TaskDefinitionError
from pgqueue.options import Options
from pgqueue.repository import Jobs, NewJob
from pgqueue.unique import KEY_OF_PERIOD, Unique, names_wanted_by, storable_key

DIGITS_OF_DIGEST = 32
"""128 bits: no two values of an application have the same digest by chance."""


class UniqueKeys:
    """Makes the unique keys of one task's jobs."""

    def __init__(self, payload: Payload, options: Options) -> None:
        self._payload = payload
        self._task_name = options.task
        self._unique: Unique | None = options.uniqueness
        self._names: tuple[str, ...] = ()
        self._defaults: dict[str, Any] = {}
        if self._unique is None:
            return
        if callable(self._unique.key):
            names = frozenset(payload.names)
            self._names = tuple(names_wanted_by(self._unique.key, options.task, names))
        elif self._unique.key is None:
            self._names = self._names_of(self._unique)
            self._defaults = self._encoded_defaults()

    def of(self, values: Mapping[str, Any], encoded: Mapping[str, Any]) -> str | None:
        """Return the key of a call, from its arguments and their stored form.

        Returns None if the job is not unique.
        """
        unique = self._unique
        if unique is None:
            return None
        key: Any = unique.key
        if key is None:
            key = self._made_of(encoded)
        elif callable(key):
            key = self._returned(key, values)
        return storable_key(key, self._task_name)

    def _names_of(self, unique: Unique) -> tuple[str, ...]:
        names = self._payload.names if unique.by is None else unique.by
        for name in names:
            if name not in self._payload.names:
                raise TaskDefinitionError(
                    f"task {self._task_name}: Unique: by has {name!r}, which is not a parameter of "
                    f"the task; it may have {', '.join(self._payload.names) or 'nothing'}"
                )
        return tuple(sorted(set(names)))

    def _encoded_defaults(self) -> dict[str, Any]:
        """The defaults in their stored form; none for a default that no caller could give."""
        encoded: dict[str, Any] = {}
        for name, value in self._payload.with_defaults({}).items():
            with suppress(ArgumentsError, PayloadError):
                encoded |= self._payload.encode({name: value})
        return encoded

    def _made_of(self, encoded: Mapping[str, Any]) -> str:
        """A digest, and not the values: a role may read keys and no arguments."""
        what = f"{self._task_name}({','.join(self._names)})"
        if not self._names:
            return what
        known = {**self._defaults, **encoded}
        text = canonical_text({name: known[name] for name in self._names if name in known})
        return f"{what}:{sha256(text.encode()).hexdigest()[:DIGITS_OF_DIGEST]}"

    def _returned(self, function: Any, values: Mapping[str, Any]) -> Any:
        known = self._payload.with_defaults(values)
        try:
            return function(**{name: known[name] for name in self._names})
        except Exception as error:  # the application's code
            raise OptionError(
                f"task {self._task_name}: its unique_key function raised {type(error).__name__}; "
                "let it give a str, or None for a job that is not unique"
            ) from error


def in_period(jobs: Jobs, new: NewJob, keys: Sequence[str | None]) -> list[str | None]:
    """The keys as they are held: with the period in which the job is due, if there is one."""
    period = None if new.unique is None else new.unique.period
    if period is None or not any(keys):
        return list(keys)
    begins = jobs.period_of_start(new, period)
    return [None if key is None else f"{KEY_OF_PERIOD}{begins}:{key}" for key in keys]


def split_period(stored_key: str) -> tuple[str, str]:
    """Split a key as it is held into the words for its period, maybe empty, and the key itself."""
    if not stored_key.startswith(KEY_OF_PERIOD):
        return "", stored_key
    begins, _, key = stored_key.removeprefix(KEY_OF_PERIOD).partition(":")
    return f"{KEY_OF_PERIOD}{begins}:", key


def canonical_text(stored: Any) -> str:
    """Write JSON data so that values which jsonb counts as equal give the same text."""
    return json.dumps(_canonical(stored), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _canonical(stored: Any) -> Any:
    """jsonb has one kind of number: 1 and 1.0 are equal, and so are 0.0 and -0.0."""
    match stored:
        case dict():
            return {name: _canonical(value) for name, value in stored.items()}
        case list() | tuple():
            return [_canonical(value) for value in stored]
        case float() if stored.is_integer():
            return int(stored)
    return stored
