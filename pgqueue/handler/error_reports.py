"""Reports of an attempt: its error as text, its result as JSON data, its fields in log records."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from traceback import TracebackException, walk_tb
from types import FrameType, TracebackType
from typing import Any

from pgqueue.arguments.forms import SPELLED
from pgqueue.arguments.json_copy import JsonCopy
from pgqueue.arguments.refusals import TOO_DEEP, Refusal
from pgqueue.errors import PayloadError
from pgqueue.meta import read_meta
from pgqueue.outcomes import ErrorReport
from pgqueue.redaction import redacted
from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued

MAX_MESSAGE_BYTES = 8 * 1024
MAX_TRACEBACK_BYTES = 32 * 1024
MAX_RESULT_BYTES = 1024 * 1024

_MAX_TYPE_BYTES = 500
_MAX_PLACE_BYTES = 2000
_OURS = "pgqueue."
_INSTALLED = ("site-packages", "dist-packages")
"""The directories of installed packages."""

Secrets = Sequence[str]
Describe = Callable[[BaseException], str]

# PostgreSQL's text and jsonb hold neither NUL nor half a surrogate pair.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def report(error: BaseException, *, secrets: Secrets = ()) -> ErrorReport:
    """Report an error as text that can be stored, even if its ``__str__`` fails."""
    # The parts of a group are indented line by line, so that a secret of several lines would not
    # be found as a whole.
    lines = [line for secret in secrets for line in secret.splitlines()]
    return ErrorReport(
        type=_safely(_type_name, error, _MAX_TYPE_BYTES),
        message=_safely(str, error, MAX_MESSAGE_BYTES, secrets),
        traceback=_safely(_traceback_of, error, MAX_TRACEBACK_BYTES, [*secrets, *lines]),
        place=_safely(_place_of, error, _MAX_PLACE_BYTES),
    )


def storable_result(value: Any) -> Any:
    """Turn a handler's result into JSON data; raises PayloadError, which says why it cannot."""
    if value is None or value is True or value is False:
        return value
    try:
        kept = _Result().of(value)
        text = json.dumps(kept, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        if len(text.encode()) > MAX_RESULT_BYTES:
            raise Refusal(_TOO_LARGE)
    except Refusal as refusal:
        reason = refusal.reason
    except RecursionError:
        reason = TOO_DEEP
    except Exception as error:  # reading an application's object runs its code
        reason = f"looking at it raised {type(error).__name__}"
    else:
        return kept
    raise PayloadError(_storable(f"{type(value).__name__}: {reason}"))


def log_fields(attempt: Claimed | Rescued) -> dict[str, Any]:
    """Return the ``extra`` of a log record about an attempt."""
    return {
        "job_id": attempt.job_id,
        "task": attempt.task,
        "queue": attempt.queue,
        "attempt": attempt.attempt,
        "meta": read_meta(attempt.meta),
    }


def storable_words(words: object, *, secrets: Secrets = ()) -> str:
    """Turn the reason that a handler gives for its end into text that can be stored."""
    return _safely(lambda _: str(words), Exception(), MAX_MESSAGE_BYTES, secrets)


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _safely(describe: Describe, error: BaseException, max_bytes: int, secrets: Secrets = ()) -> str:
    try:
        return _capped(str.__str__(describe(error)), max_bytes, secrets)
    except BaseException as failure:  # __str__ is the application's code, and may even exit
        return f"(no text: formatting it raised {type(failure).__name__})"


def _traceback_of(error: BaseException) -> str:
    """Format an error as Python does, from the handler's first frame on."""
    frames = _from_handler(error) or error.__traceback__
    # Never the local variables: they may hold secrets of the application.
    told = TracebackException(type(error), error, frames, compact=True)
    return "".join(told.format())


def _from_handler(error: BaseException) -> TracebackType | None:
    """The frames of an error's traceback without our own at its beginning."""
    frames = error.__traceback__
    while frames and _module_of(frames.tb_frame).startswith(_OURS):
        frames = frames.tb_next
    return frames


def _place_of(error: BaseException) -> str:
    """Name the functions of the application that the error has left, each once.

    The application is the package of the handler, and all modules that are neither Python's own
    nor installed.  Modules are named, not files: the path of a file may change with each deploy.
    """
    frames = [frame for frame, _ in walk_tb(_from_handler(error))]
    if not frames:
        return ""
    package = _package_of(frames[0])
    functions = (
        f"{_module_of(frame)}:{frame.f_code.co_qualname}"
        for frame in frames
        if _package_of(frame) == package or not _is_of_library(frame)
    )
    return " > ".join(dict.fromkeys(functions))


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _package_of(frame: FrameType) -> str:
    return _module_of(frame).partition(".")[0]


def _is_of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    is_ours = _module_of(frame).startswith(_OURS)
    is_python = _package_of(frame) in sys.stdlib_module_names
    return is_ours or is_python or any(directory in path for directory in _INSTALLED)


def _storable(text: str) -> str:
    return _UNSTORABLE.sub(_REPLACEMENT, text)


def _capped(text: str, max_bytes: int, secrets: Secrets) -> str:
    """Keep the head and the tail of a text, which is cut before it is copied.

    More text is redacted than kept: half a secret at a cut would not match.
    """
    if len(text) <= max_bytes:
        whole = _storable(redacted(text, secrets))
        if len(whole.encode()) <= max_bytes:
            return whole
    gap = f"\n... {len(text):,} characters in all ...\n"
    half = (max_bytes - len(gap)) // 2
    head = _storable(redacted(text[: 4 * half], secrets)[:half]).encode()[:half]
    tail = _storable(redacted(text[-4 * half :], secrets)[-half:]).encode()[-half:]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


_TOO_LARGE = f"larger than {MAX_RESULT_BYTES:,} bytes as JSON"


class _Result(JsonCopy):
    """A copy of a result; raises as soon as the result is too large.

    Unlike an argument, a result has no annotation: it is written by the types of its values, and
    characters that cannot be stored are replaced.
    """

    __slots__ = ("_room",)

    def __init__(self) -> None:
        super().__init__()
        self._room = MAX_RESULT_BYTES

    def of(self, value: Any) -> Any:
        self._take(1)
        return super().of(value)

    def other(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Enum):
            return self.of(value.value)
        if is_dataclass(kind):
            return self.mapping({field.name: getattr(value, field.name) for field in fields(kind)})
        if hasattr(kind, "model_validate_json"):
            return self.of(value.model_dump(mode="json"))
        raise Refusal(f"{kind.__name__} has no form in JSON")

    def text(self, value: str) -> str:
        value = str.__str__(value)
        self._take(len(value))
        return _storable(value)

    def integer(self, value: int) -> int:
        whole = super().integer(value)
        self._take(whole.bit_length() // 4)
        return whole

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise Refusal(_TOO_LARGE)


def _spelled(write: Callable[[Any], str]) -> Callable[[_Result, Any], str]:
    return lambda copy, value: copy.text(write(value))


def _array(kind: Any) -> Callable[[_Result, Any], list[Any]]:
    return lambda copy, value: copy.array(list(kind.__iter__(value)))


_Result.writers = {
    **JsonCopy.writers,
    str: _Result.text,
    int: _Result.integer,
    **{kind: _spelled(write) for kind, write in SPELLED.items()},
    **{kind: _array(kind) for kind in (tuple, set, frozenset)},
}
