"""The input of an enqueue in its stored form: arguments as JSON, and the unique key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgqueue.arguments.payload import Payload, in_batch
from pgqueue.arguments.text import LARGEST_TEXT
from pgqueue.errors import ArgumentsError, OptionError, PayloadError
from pgqueue.options import Options, refuse_unknown_secrets, refuse_wrong_renames
from pgqueue.tasks.keys import UniqueKeys

CHUNK = 1000
"""Jobs in one statement of ``enqueue_many``."""


@dataclass(frozen=True, slots=True)
class Written:
    """One call."""

    args: dict[str, Any]
    text: str
    unique_key: str | None


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Many calls; ``texts`` has the arguments of all calls in order, one text per statement."""

    args: list[dict[str, Any]]
    texts: list[str]
    unique_keys: list[str | None]
    to_a_statement: int
    """How many calls one statement may take, in any order."""


class Arguments:
    """Encodes the arguments of one task; refuses values that could not be read back."""

    def __init__(self, payload: Payload, options: Options) -> None:
        self._payload = payload
        self._where = f"task {options.task}"
        names = frozenset(payload.names)
        refuse_wrong_renames(options, payload.names)
        refuse_unknown_secrets(options, names.union(options.renamed))
        self._unique_keys = UniqueKeys(payload, options)

    def of_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, max_bytes: int
    ) -> Written:
        values = self._payload.bind(args, kwargs)
        encoded = self._payload.encode(values)
        text = self._payload.dumps(encoded, max_bytes=max_bytes)
        return Written(encoded, text, self._unique_keys.of(values, encoded))

    def of_rows(self, rows: Any, *, max_bytes: int) -> WrittenRows:
        """Encode every row before any is stored: if one is refused, none is written."""
        if not isinstance(rows, Iterable):
            raise ArgumentsError(
                f"{self._where}: the rows of enqueue_many are {type(rows).__name__}; give a list "
                "with a tuple or a dict of arguments for each job"
            )
        bound = [self._bound(row, index) for index, row in enumerate(rows)]
        encoded = self._payload.encode_many(bound)
        texts = self._payload.dumps_chunks(encoded, rows=CHUNK, max_bytes=max_bytes)
        calls = enumerate(zip(bound, encoded, strict=True))
        keys = [self._key_of_row(*call, index) for index, call in calls]
        is_small = sum(map(len, texts)) <= LARGEST_TEXT
        few = min(CHUNK, max(1, LARGEST_TEXT // max_bytes))
        return WrittenRows(encoded, texts, keys, CHUNK if is_small else few)

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

    def _key_of_row(
        self, values: Mapping[str, Any], encoded: Mapping[str, Any], index: int
    ) -> str | None:
        try:
            return self._unique_keys.of(values, encoded)
        except (ArgumentsError, OptionError, PayloadError) as error:
            raise type(error)(in_batch(error, index)) from error
