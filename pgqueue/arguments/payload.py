"""The arguments of one task: checked at the call, written as JSON, read back unchanged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from pgqueue.arguments import text as json_text
from pgqueue.arguments.annotations import Annotations
from pgqueue.arguments.forms import Encoder, Form
from pgqueue.arguments.json_copy import JsonCopy, nests_too_deep
from pgqueue.arguments.refusals import (
    TOO_DEEP,
    CannotTravel,
    NotDeclared,
    OtherVersion,
    Refusal,
    WrongType,
    refusal_of,
)
from pgqueue.arguments.signature import Signature
from pgqueue.arguments.text import LARGEST_TEXT, MAX_PAYLOAD_BYTES
from pgqueue.errors import ArgumentsError, PayloadError, TaskDefinitionError

T = TypeVar("T")
NOTHING: Mapping[str, str] = MappingProxyType({})
NO_ENCODERS: Mapping[type, Encoder] = MappingProxyType({})
STORED = "stored argument"


class Payload:
    """Converts the arguments of one task; made once, when the task is defined.

    To write: ``bind``, ``encode``, ``dumps``; to read: ``loads``.  ``encode`` checks types,
    ``dumps`` checks what text can hold: store nothing that has not passed both.

    ``injected``: how many parameters at the beginning are not stored.  ``renamed`` maps names that
    parameters had before to those they have now.  ``encoders``: of types of the application.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        task_name: str,
        injected: int,
        hints: Mapping[str, Any],
        renamed: Mapping[str, str] = NOTHING,
        encoders: Mapping[type, Encoder] = NO_ENCODERS,
    ) -> None:
        self.task_name = task_name
        self._stored = f"task {task_name}: the stored arguments"
        self._signature = Signature.of(function, task_name=task_name, injected=injected)
        self.names = self._signature.names
        self.bind = self._signature.bind
        self._renamed = renamed
        annotations = Annotations(encoders)
        self._forms: dict[str, Form] = {}
        for name in self.names:
            try:
                self._forms[name] = annotations.form_of(hints.get(name, Any))
            except CannotTravel as error:
                what = f"task {task_name}: parameter {name!r} {error}"
                raise TaskDefinitionError(what) from error
        self._validator = cache(lambda name: annotations.compiled(self._forms[name].schema))
        self._natives = {name: each.natives for name, each in self._forms.items()}

    def with_defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults of the parameters that were not given."""
        return {**self._signature.defaults, **values}

    def encode(self, values: dict[str, Any]) -> dict[str, Any]:
        """Turn named arguments into plain JSON data."""
        natives = self._natives
        for name, value in values.items():
            if type(value) not in natives[name]:
                return {each: self._write_one(each, value) for each, value in values.items()}
        return values

    def encode_many(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Encode many calls; an error names the index of the call."""
        return _of_batch(self.encode, rows)

    def dumps(self, encoded: dict[str, Any], *, max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
        """Write encoded arguments as strict JSON text of at most ``max_bytes``."""
        try:
            text = json_text.write(encoded)
            size = json_text.size_of(text)
        except (ValueError, TypeError, RecursionError) as error:
            self._find_fault(encoded)
            what = f"task {self.task_name}: the arguments cannot be written as JSON"
            raise PayloadError(what) from error
        if "\\u0000" in text:  # an escaped backslash may look like a NUL
            self._find_fault(encoded)
        if size > max_bytes:
            sizes = {name: len(json_text.write(value)) for name, value in encoded.items()}
            largest = max(sizes, key=lambda name: sizes[name], default="")
            raise PayloadError(
                f"task {self.task_name}: the arguments are {size:,} bytes as JSON, over the limit "
                f"of {max_bytes:,}; the largest is {largest!r}: keep it in a table and pass its "
                "id, or raise the limit with PgQueue(max_payload_bytes=...)"
            )
        return text

    def dumps_many(
        self,
        encoded: Sequence[dict[str, Any]],
        *,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        first_index: int = 0,
    ) -> str:
        """Write many calls as one JSON array; an error names the index of the call."""
        try:
            text = json_text.write(encoded)
            if json_text.size_of(text) <= max_bytes and "\\u0000" not in text:
                return text
        except (ValueError, TypeError, RecursionError):
            pass  # the call at fault is found below
        texts = _of_batch(lambda each: self.dumps(each, max_bytes=max_bytes), encoded, first_index)
        return f"[{','.join(texts)}]"

    def dumps_chunks(
        self, encoded: Sequence[dict[str, Any]], *, rows: int, max_bytes: int = MAX_PAYLOAD_BYTES
    ) -> list[str]:
        """Write a batch as texts of ``rows`` calls each, or of fewer if the calls are large."""
        texts: list[str] = []
        for start in range(0, len(encoded), rows):
            chunk = encoded[start : start + rows]
            text = self.dumps_many(chunk, max_bytes=max_bytes, first_index=start)
            if len(text) <= LARGEST_TEXT:
                texts.append(text)
                continue
            few = max(1, LARGEST_TEXT // max_bytes)
            texts += [json_text.write(chunk[at : at + few]) for at in range(0, len(chunk), few)]
        return texts

    def loads(self, text: str) -> dict[str, Any]:
        """Read stored text back into keyword arguments of the declared types."""
        try:
            values = json_text.read(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"are not JSON that can be read ({error})") from error
        return self.decode(values)

    def decode(self, stored: Any, *, noun: str = STORED) -> dict[str, Any]:
        """Turn plain JSON data, as stored, into keyword arguments of the declared types.

        ``noun``: what an error calls one of them.
        """
        if type(stored) is not dict:
            raise self._damaged(f"are a JSON {type(stored).__name__}, not an object")
        values: dict[str, Any] = stored
        if values.keys() != self._forms.keys():
            values = self._under_new_names(values)
            self._check_names(values)
        natives = self._natives
        for name, value in values.items():
            if type(value) not in natives[name]:
                return {each: self._read_one(each, value, noun) for each, value in values.items()}
        return values

    def changed(self, stored: Any, given: Mapping[str, Any], *, are_stored: bool) -> dict[str, Any]:
        """Return the keyword arguments of a job, with those of ``given`` in place of its own.

        ``are_stored``: ``given`` is plain JSON data too.  The arguments that are replaced may be
        unreadable.
        """
        self.bind((), {**dict.fromkeys(self.names), **given})  # refuses unknown names
        new = dict(given) if are_stored else self.encode(dict(given))
        kept = self.under_new_names(stored)
        return self.decode({**kept, **new}, noun="argument")

    def faults(self, stored: Mapping[str, Any]) -> dict[str, str]:
        """Say by name why the values of some arguments, as plain JSON data, are refused."""
        found = {}
        for name, value in stored.items():
            try:
                self._read_one(name, value, "argument")
            except PayloadError as error:
                found[name] = str(error).removeprefix(f"task {self.task_name}: ")
        return found

    def under_new_names(self, stored: Any) -> dict[str, Any]:
        """Return stored arguments by the names that the task has now; none for damaged ones."""
        return self._under_new_names(stored) if type(stored) is dict else {}

    def _write_one(self, name: str, value: Any) -> Any:
        if type(value) in self._natives[name]:
            return value
        try:
            encoded = self._validator(name).validate_python(value, strict=True)
            if type(encoded) in (list, dict) and nests_too_deep(encoded):
                raise Refusal(TOO_DEEP)
        except Exception as error:  # reading an application's object may run its code
            refusal = refusal_of(error)
            kind = ArgumentsError if isinstance(refusal, WrongType) else PayloadError
            raise kind(self._message(name, refusal)) from refusal.__cause__
        return encoded

    def _read_one(self, name: str, value: Any, noun: str) -> Any:
        if type(value) in self._natives[name]:
            return value
        try:
            if type(value) in (list, dict) and nests_too_deep(value):
                raise Refusal(TOO_DEEP)
            return self._validator(name).validate_python(value)
        except Exception as error:  # a constructor is the application's code
            refusal = refusal_of(error)
            kind = OtherVersion if isinstance(refusal, NotDeclared) else PayloadError
            raise kind(self._message(name, refusal, noun=noun)) from refusal.__cause__

    def _under_new_names(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rename old parameters; not if a job has two names of one, which are then refused."""
        named = {self._renamed.get(name, name): value for name, value in values.items()}
        return named if len(named) == len(values) else values

    def _check_names(self, values: dict[str, Any]) -> None:
        for name in sorted(values.keys() - self._forms.keys()):
            raise OtherVersion(
                f"{self._stored} name {name[:60]!a}, which the task does not take: the job was "
                "enqueued for another version of it; keep the parameter, with a default, until "
                "such jobs ended"
            )
        for name in sorted(self._signature.required - values.keys()):
            raise OtherVersion(
                f"{self._stored} have no {name!r}: the job was enqueued before the parameter was "
                "added; give it a default"
            )

    def _find_fault(self, encoded: dict[str, Any]) -> None:
        for name, value in encoded.items():
            try:
                JsonCopy().of(value)
            except Refusal as refusal:
                raise PayloadError(self._message(name, refusal)) from None

    def _message(self, name: str, refusal: Refusal, *, noun: str = "argument") -> str:
        return f"task {self.task_name}: {noun} {name}{refusal.path} {refusal.reason}"

    def _damaged(self, what: str) -> PayloadError:
        return PayloadError(f"{self._stored} {what}")


def in_batch(error: Exception, index: int) -> str:
    """Return the message of an error, with the index of its call in a batch."""
    return f"{error} (call {index} of the batch, counted from 0)"


def _of_batch(do: Callable[[Any], T], calls: Iterable[Any], first_index: int = 0) -> list[T]:
    done: list[T] = []
    try:
        for call in calls:
            done.append(do(call))
    except (ArgumentsError, PayloadError) as error:
        raise type(error)(in_batch(error, first_index + len(done))) from error
    return done
