"""Strict JSON text: what every JSON reader and PostgreSQL's jsonb take."""

import json
import math
from typing import NoReturn

MAX_PAYLOAD_BYTES = 262_144
"""How large the arguments of one job may be, as UTF-8 JSON text, unless the queue says else."""

LARGEST_TEXT = 16_777_216
"""How much of it goes into one statement.  PostgreSQL's jsonb ends at 256 MiB, and takes up to
twelve bytes for a number of one digit and its comma."""

# The arguments were copied and their depth was checked: nothing circular comes here.
write = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
"""Write plain data as JSON text; raises ValueError for NaN and for endless integers."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large for a float")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)


def read(text: str) -> object:
    """Read a text that is one JSON value."""
    value, end = _DECODER.raw_decode(text)
    return value if end == len(text) else _DECODER.decode(text)


def size_of(text: str) -> int:
    """Count the bytes of a text in UTF-8; raises UnicodeEncodeError for half a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())
