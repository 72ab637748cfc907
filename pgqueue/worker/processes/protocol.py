"""The protocol between a worker and a child process: lines of JSON.

Nothing is pickled, and lines from a child are checked like any untrusted input: its handler may
have written to the same socket.
"""

import json
import math
from datetime import timedelta
from typing import Any, NamedTuple

from pgqueue.checks import LONGEST_DELAY
from pgqueue.context import Progress, checked_progress
from pgqueue.errors import ArgumentsError
from pgqueue.execution.error_reports import (
    MAX_MESSAGE_BYTES,
    MAX_RESULT_BYTES,
    MAX_TRACEBACK_BYTES,
    storable_result,
)
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Failed,
    Outcome,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)

LONGEST_LINE = 2 * MAX_RESULT_BYTES
MAX_TYPE_BYTES = 1000

READY = b'{"ready": true}\n'


class ProtocolError(Exception):
    """A line from a child violates the protocol."""


class AttemptKey(NamedTuple):
    """The attempt that a line is about: a line from an earlier handler counts for no other."""

    message_id: int
    attempt: int


def line(message: Any) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def answer(of: AttemptKey, outcome: Outcome) -> bytes:
    """The line for the outcome of an attempt."""
    match outcome:
        case Succeeded(result):
            fields = {"ending": "succeeded", "result": result}
        case Retried(delay, error, _, limit) if delay is not None:
            times = {"delay": delay.total_seconds(), "limit": limit and limit.total_seconds()}
            fields = {"ending": "retried", **times, "error": _error_fields(error)}
        case Failed(error, end):
            fields = {"ending": "failed", "end": end, "error": _error_fields(error)}
        case Cancelled(reason):
            fields = {"ending": "cancelled", "reason": reason}
        case Snoozed(delay):
            fields = {"ending": "snoozed", "delay": delay.total_seconds()}
        case Unreadable(error, most):
            fields = {
                "ending": "unreadable",
                "most": most.total_seconds(),
                "error": _error_fields(error),
            }
        case _:
            raise TypeError(f"no handler ends so: {outcome!r}")
    return line({"of": of, **fields})


def report(of: AttemptKey, progress: Progress) -> bytes:
    """The line for the progress that a handler reports."""
    return line({"progress": progress, "of": of})


def finished(of: AttemptKey) -> bytes:
    """The line that says that a handler has ended its job with ``ctx.finish()``."""
    return line({"finished": True, "of": of})


def refusal(error: ErrorReport) -> bytes:
    """The line for the reason why a child can run no job."""
    return line({"refused": _error_fields(error)})


def outcome_of(text: bytes, of: AttemptKey) -> Outcome:
    """The outcome in a child's line; raises ProtocolError."""
    match _parsed(text):
        case {"of": [int(message_id), int(attempt)], **rest} if (message_id, attempt) == of:
            return _outcome(rest)
    raise ProtocolError


def progress_of(text: bytes, of: AttemptKey) -> Progress | None:
    """The progress in a child's line, or None if the line is an answer; raises ProtocolError."""
    if not text.startswith(b'{"progress":'):
        return None
    match _parsed(text):
        case {"progress": [done, total, note], "of": [int(message_id), int(attempt)]} if (
            message_id,
            attempt,
        ) == of:
            try:
                return checked_progress(done, total, note, where="a child process")
            except ArgumentsError as error:
                raise ProtocolError from error
    raise ProtocolError


def is_finished(text: bytes, of: AttemptKey) -> bool:
    """Whether a child's line says that its handler has ended the job; raises ProtocolError."""
    if not text.startswith(b'{"finished":'):
        return False
    match _parsed(text):
        case {"finished": True, "of": [int(message_id), int(attempt)]} if (
            message_id,
            attempt,
        ) == of:
            return True
    raise ProtocolError


def refusal_of(text: bytes) -> ErrorReport | None:
    """Why the child refuses, or None if it is ready; raises ProtocolError."""
    match _parsed(text):
        case {"ready": True}:
            return None
        case {"refused": error}:
            return _error(error)
    raise ProtocolError


def _outcome(fields: Any) -> Outcome:
    match fields:
        case {"ending": "succeeded", "result": result}:
            return Succeeded(storable_result(result))
        case {"ending": "retried", "delay": delay, "limit": limit, "error": error}:
            longest = None if limit is None else _delay(limit)
            return Retried(_delay(delay), _error(error), give_up_after=longest)
        case {"ending": "failed", "end": AttemptEnd.FAILED | AttemptEnd.DISCARDED, "error": error}:
            return Failed(_error(error), AttemptEnd(fields["end"]))
        case {"ending": "cancelled", "reason": reason}:
            return Cancelled(_text(reason, MAX_MESSAGE_BYTES))
        case {"ending": "snoozed", "delay": delay}:
            return Snoozed(_delay(delay))
        case {"ending": "unreadable", "most": most, "error": error}:
            return Unreadable(_error(error), _delay(most))
    raise ProtocolError


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError from error


def _error_fields(error: ErrorReport) -> list[str]:
    return [error.type, error.message, error.traceback]


def _error(data: Any) -> ErrorReport:
    match data:
        case [kind, message, traceback]:
            return ErrorReport(
                _text(kind, MAX_TYPE_BYTES),
                _text(message, MAX_MESSAGE_BYTES),
                _text(traceback, MAX_TRACEBACK_BYTES),
            )
    raise ProtocolError


def _text(value: Any, most: int) -> str:
    """Check a text from a child: it must be storable, and not too long."""
    if not isinstance(value, str) or "\0" in value or len(value) > most:
        raise ProtocolError
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ProtocolError from error
    if size > most:
        raise ProtocolError
    return value


def _delay(seconds: Any) -> timedelta:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise ProtocolError
    return timedelta(seconds=min(max(seconds, 0), LONGEST_DELAY.total_seconds()))
