"""The input of an enqueue in its stored form: arguments as JSON, and the keys made of them."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pgqueue.arguments.payload import Payload, in_batch
from pgqueue.arguments.text import LARGEST_TEXT, canonical_text
from pgqueue.errors import ArgumentsError, OptionError, PayloadError
from pgqueue.meta import check_names_in_by, names_key_of_meta, values_of_keys
from pgqueue.options import Options, refuse_unknown_secrets, refuse_wrong_renames
from pgqueue.repository.enqueue import NewJobRow
from pgqueue.rules.limits import LimitKeys
from pgqueue.rules.unique import Unique, digest_if_long, names_wanted_by, storable_key

CHUNK = 1000
"""The most jobs in one statement of ``enqueue_many``."""

DIGITS_OF_DIGEST = 32
"""128 bits: no two values of an application have the same digest by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedCall(NewJobRow):
    """The stored form of one call: its arguments as JSON data and as JSON text, and its keys."""

    text: str


@dataclass(frozen=True, slots=True)
class EncodedCalls:
    """The stored form of many calls; ``texts`` has one JSON array of arguments per statement."""

    args: list[dict[str, Any]]
    texts: list[str]
    unique_keys: list[str | None]
    limit_keys: list[str | None]
    per_statement: int
    """How many calls one statement may enqueue, whichever calls they are."""

    def rows(self, held_keys: Iterable[str | None]) -> list[NewJobRow]:
        """Each call, with its unique key as the job holds it."""
        each = zip(self.args, held_keys, self.limit_keys, strict=True)
        return [NewJobRow(*values) for values in each]


class Arguments:
    """Encodes the arguments of one task; refuses values that could not be read back."""

    def __init__(self, payload: Payload, options: Options) -> None:
        self._payload = payload
        self._where = f"task {options.task}"
        names = frozenset(payload.names)
        refuse_wrong_renames(options, payload.names)
        refuse_unknown_secrets(options, names.union(options.renamed))
        self.unique_keys = UniqueKeys(payload, options)

    def of_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        meta: Mapping[str, Any],
        limits: LimitKeys,
        max_bytes: int,
    ) -> EncodedCall:
        values = self._payload.bind(args, kwargs)
        encoded = self._payload.encode(values)
        text = self._payload.dumps(encoded, max_bytes=max_bytes)
        unique_key = self.unique_keys.of(values, encoded, meta)
        return EncodedCall(encoded, unique_key, limits.of(encoded, meta), text=text)

    def of_rows(
        self, rows: Any, *, meta: Mapping[str, Any], limits: LimitKeys, max_bytes: int
    ) -> EncodedCalls:
        """Encode all rows before any is stored: if one row is refused, none is stored."""
        if not isinstance(rows, Iterable):
            raise ArgumentsError(
                f"{self._where}: the rows of enqueue_many are {type(rows).__name__}; give a list "
                "with a tuple or a dict of arguments for each job"
            )
        bound = [self._bound(row, index) for index, row in enumerate(rows)]
        encoded = self._payload.encode_many(bound)
        texts = self._payload.dumps_chunks(encoded, rows=CHUNK, max_bytes=max_bytes)
        keys: list[str | None] = []
        for index, (values, stored) in enumerate(zip(bound, encoded, strict=True)):
            try:
                keys.append(self.unique_keys.of(values, stored, meta))
            except (ArgumentsError, OptionError, PayloadError) as error:
                raise type(error)(in_batch(error, index)) from error
        is_small = sum(map(len, texts)) <= LARGEST_TEXT
        sure_to_fit = min(CHUNK, max(1, LARGEST_TEXT // max_bytes))
        limit_keys = [limits.of(each, meta) for each in encoded]
        return EncodedCalls(encoded, texts, keys, limit_keys, CHUNK if is_small else sure_to_fit)

    def _bound(self, row: Any, index: int) -> dict[str, Any]:
        try:
            if isinstance(row, tuple):
                return self._payload.bind(row, {})
            if isinstance(row, Mapping):
                return self._payload.bind((), row)
        except ArgumentsError as error:
            raise ArgumentsError(in_batch(error, index)) from error
        raise ArgumentsError(
            f"{self._where}: row {index} of enqueue_many is {type(row).__name__}; give a tuple "
            "of positional arguments, as (7,), or a dict of arguments by name"
        )


class UniqueKeys:
    """Makes the unique keys of the jobs of one task.

    A key is a fixed text, returned by a function, or made from the stored arguments.
    """

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
            for name, value in payload.with_defaults({}).items():
                with suppress(ArgumentsError, PayloadError):  # refused as arguments too
                    self._defaults |= payload.encode({name: value})

    @property
    def names_in_meta(self) -> frozenset[str]:
        """The names in ``by`` that are those of keys of meta."""
        return frozenset(filter(names_key_of_meta, self._names))

    def of(
        self, values: Mapping[str, Any], encoded: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> str | None:
        """Return the key of a call, from its arguments, their stored form and the meta of the job.

        Returns None if the job is not unique.
        """
        unique = self._unique
        if unique is None:
            return None
        key: Any = unique.key
        if key is None:
            key = self._prefix
            if self._names:
                known = values_of_keys({**self._defaults, **encoded}, meta)
                named = {name: known[name] for name in self._names if name in known}
                # A digest and not the values: a role may read keys but not arguments.
                digest = sha256(canonical_text(named).encode()).hexdigest()
                key = f"{key}:{digest[:DIGITS_OF_DIGEST]}"
        elif callable(key):
            known = self._payload.with_defaults(values)
            try:
                key = key(**{name: known[name] for name in self._names})
            except Exception as error:  # the application's code
                raise OptionError(
                    f"task {self._task_name}: its unique_key function raised "
                    f"{type(error).__name__}; let it return a str, or None for a job that is not "
                    "unique"
                ) from error
        return storable_key(key, self._task_name, unique.prefix)

    def declared(self) -> dict[str, Any] | None:
        """What those have to know who make the key without the code; None if there is none."""
        unique = self._unique
        if unique is None:
            return None
        is_of_arguments = unique.key is None
        key = None if callable(unique.key) else unique.key and digest_if_long(unique.key)
        return {
            "is_function": callable(unique.key),
            "key": self._prefix if is_of_arguments else key,
            "by": list(self._names) if is_of_arguments else [],
            "period": unique.period and unique.period.total_seconds(),
            "prefix": unique.prefix,
            "on_conflict": unique.on_conflict,
        }

    @property
    def defaults_of_key(self) -> dict[str, Any]:
        """The stored defaults of the arguments in the key."""
        return {name: self._defaults[name] for name in self._names if name in self._defaults}

    @property
    def _prefix(self) -> str:
        return f"{self._task_name}({','.join(self._names)})"

    def _names_of(self, unique: Unique) -> tuple[str, ...]:
        names = self._payload.names if unique.by is None else unique.by
        check_names_in_by(f"task {self._task_name}: Unique: by has", names, self._payload.names)
        return tuple(sorted(set(names)))
