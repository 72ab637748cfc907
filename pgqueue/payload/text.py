"""Strict JSON text: what every JSON reader and PostgreSQL's jsonb take."""

import json
import math
import sys
from typing import Any, NoReturn

from pgqueue.payload.plain import SCALARS, TOO_DEEP
from pgqueue.payload.refusals import key_step

MAX_PAYLOAD_BYTES = 262_144
"""How large the arguments of one job may be, as UTF-8 JSON text, unless the queue says else."""

LARGEST_TEXT = 16_777_216
"""How much of it goes into one statement.  PostgreSQL's jsonb ends at 256 MiB, and takes up to
twelve bytes for a number of one digit and its comma."""

# The arguments were copied and their depth was checked: nothing circular comes here.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)

write = _ENCODER.encode
"""Write plain data as JSON text; raises ValueError for NaN and for endless integers."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large for a float")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)

read_start = _DECODER.raw_decode
"""Read one JSON value at the very start of a text; returns it and where it ends."""

read = _DECODER.decode
"""Read a text that is one JSON value."""


def size_of(text: str) -> int:
    """Count the bytes of a text in UTF-8; raises UnicodeEncodeError for half a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())


def may_hold_nul(text: str) -> bool:
    """Tell whether JSON text spells a NUL; a backslash in a text may look like one."""
    return "\\u0000" in text


def first_fault(value: Any) -> tuple[str, str] | None:
    """Find the first thing that text cannot hold: its path, and the reason."""
    try:
        return _fault_in(value, "")
    except RecursionError:
        return "", TOO_DEEP


def _fault_in(value: Any, path: str) -> tuple[str, str] | None:
    if isinstance(value, dict):
        for key, each in value.items():
            if reason := _scalar_fault(key):
                return path, f"has a key that {reason}"
            if fault := _fault_in(each, path + key_step(key)):
                return fault
        return None
    if isinstance(value, list):
        for index, each in enumerate(value):
            if fault := _fault_in(each, f"{path}[{index}]"):
                return fault
        return None
    reason = _scalar_fault(value)
    return (path, reason) if reason else None


def _scalar_fault(value: Any) -> str | None:
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON has no number for: pass None, or a finite number"
    if isinstance(value, int):
        return _integer_fault(value)
    if type(value) in SCALARS:
        return None
    return f"is a {type(value).__name__}, which is not JSON"


def _text_fault(value: str) -> str | None:
    if "\0" in value:
        return "holds a NUL character, which PostgreSQL cannot keep: remove it, or pass bytes"
    try:
        size_of(value)
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is not a character: decode the text again"
    return None


def _integer_fault(value: int) -> str | None:
    try:
        str(value)
    except ValueError:
        digits = sys.get_int_max_str_digits()
        return f"is an int of more than {digits:,} digits: pass it as bytes"
    return None
