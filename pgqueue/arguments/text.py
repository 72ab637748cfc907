"""Strict JSON text, valid for every JSON reader and for PostgreSQL's jsonb."""

import json
import math
from typing import NoReturn

MAX_PAYLOAD_BYTES = 262_144
"""Size limit for the arguments of one job, as UTF-8 JSON text, unless the queue sets another."""

LARGEST_TEXT = 16_777_216
"""Size limit for the JSON text of one statement.  The limit of PostgreSQL's jsonb is 256 MiB, and
a number of one digit and its comma may take twelve bytes there."""

# The arguments are copies of checked depth, so they contain no cycles.
write = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
"""Write plain data as JSON text; raises ValueError for NaN and integers of too many digits."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large for a float")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)


def read(text: str) -> object:
    """Parse a text that is one JSON value."""
    value, end = _DECODER.raw_decode(text)
    return value if end == len(text) else _DECODER.decode(text)


def size_of(text: str) -> int:
    """Return the size of a text in UTF-8 bytes; raises UnicodeEncodeError for a lone surrogate."""
    return len(text) if text.isascii() else len(text.encode())


def canonical_text(stored: object) -> str:
    """Write JSON data so that values which jsonb counts as equal give the same text."""
    return json.dumps(_canonical(stored), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _canonical(stored: object) -> object:
    """jsonb has one kind of number: 1 and 1.0 are equal, and so are 0.0 and -0.0."""
    match stored:
        case dict():
            return {name: _canonical(value) for name, value in stored.items()}
        case list() | tuple():
            return [_canonical(value) for value in stored]
        case float() if stored.is_integer():
            return int(stored)
    return stored
