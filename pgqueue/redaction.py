"""Masks secrets in error records, log lines, ``repr`` and command-line output.

Secrets are the passwords of URLs, and the arguments that a task declares to be secret
(:data:`Secret`, ``secret_args``).  A text that quotes the value of a secret is masked too.
"""

import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from itertools import takewhile
from threading import current_thread, main_thread
from time import monotonic
from types import TracebackType
from typing import (
    Annotated,
    Any,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote

T = TypeVar("T")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogOptions(TypedDict, total=False):
    """The options of one line."""

    exc_info: bool | BaseException | ExcInfo | None
    extra: Mapping[str, object]


class _Marked:
    def __repr__(self) -> str:
        return "secret"


_MARK = _Marked()

Secret: TypeAlias = Annotated[T, _MARK]
"""Marks an argument as secret: ``token: Secret[str]``.

The type checker and the handler see the type in brackets: text, a number, a UUID, an enum, or a
list or a record of such.  A task with a secret of another type, such as bytes, a date or a dict, is
refused, because errors quote it in forms that cannot be recognised.

The value is stored unmasked.  In output about the job, and in errors and tracebacks that quote the
value, ``***`` replaces it.  An argument with a secret field is masked as a whole.
"""

MASK = "***"

LEAST_LENGTH = 4
"""A shorter secret is masked only as a whole word: 7, for example, is part of many numbers."""

PART_LENGTH = 16
"""The beginning or the end of a longer secret is masked if it has so many characters: SQLAlchemy
and PostgreSQL shorten long values in their messages."""

UNMASKABLE = (bytes, bytearray, date, time, timedelta, Mapping)
"""Their ``repr`` differs from the stored form, or parts of them are not values."""

MOST_SECRETS = 1000
"""If a job has more secret values, a text that may quote them is masked as a whole."""

TRACEBACK = "pgqueue_traceback"
"""The key in ``extra`` for a masked traceback, as text, which is printed with the log line."""

_URL_PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s/]*@")
_URL_PARAMETER = re.compile(r"([?&](?:ssl)?password=)[^\s&]*")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text with secrets masked; ``secrets`` are values to mask literally."""
    known = _forms(secrets)
    if len(known) > MOST_SECRETS:
        return MASK
    if known:
        text = _any_of(known).sub(MASK, text)
        for form in known:
            if len(form) > PART_LENGTH:
                text = _without_beginning(text, form)
                text = _without_beginning(text[::-1], form[::-1])[::-1]
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", text)
    return _URL_PARAMETER.sub(rf"\1{MASK}", text)


def redacted_data(value: Any, *, names: Collection[str] = (), secrets: Iterable[str] = ()) -> Any:
    """Return JSON data with secrets masked, and with the values of the keys in ``names`` masked.

    Keys are text as values are: a secret that is a key is masked.
    """
    match value:
        case str():
            return redacted(value, secrets)
        case dict():
            found: dict[str, Any] = {}
            for key, item in value.items():
                is_named = item is not None and key in names
                shown = redacted(str(key), secrets)
                while shown in found:  # of two secrets that are keys
                    shown += MASK
                found[shown] = MASK if is_named else redacted_data(item, secrets=secrets)
            return found
        case list():
            return [redacted_data(item, secrets=secrets) for item in value]
    return MASK if secrets and str(value) in secrets else value


def is_secret(annotation: Any, *, within: tuple[Any, ...] = ()) -> bool:
    """Whether an annotation is a :data:`Secret` or contains one, as a dataclass may."""
    if annotation is _MARK:
        return True
    if isinstance(annotation, str):  # an annotation that could not be resolved
        return "Secret[" in annotation
    if annotation in within:  # a type that contains itself
        return False
    return any(is_secret(part, within=(*within, annotation)) for part in _parts(annotation))


def unmaskable(
    annotation: Any,
    *,
    is_inside: bool = False,
    more: tuple[type, ...] = (),
    within: tuple[Any, ...] = (),
) -> type[Any] | None:
    """Return a type inside a :data:`Secret` whose values errors quote in other forms.

    ``more``: further types of this kind.
    """
    if annotation in within:
        return None
    is_inside = is_inside or _MARK in getattr(annotation, "__metadata__", ())
    kind = get_origin(annotation) or annotation
    if (
        is_inside
        and isinstance(kind, type)
        and issubclass(kind, (*UNMASKABLE, *more))
        and not hasattr(kind, "__required_keys__")  # a TypedDict is a record
    ):
        return kind
    inner = (
        unmaskable(part, is_inside=is_inside, more=more, within=(*within, annotation))
        for part in _parts(annotation)
    )
    return next((found for found in inner if found is not None), None)


def _parts(annotation: Any) -> Iterator[Any]:
    yield from get_args(annotation)
    for name in ("__value__", "__supertype__"):  # of an alias, of a NewType
        if hasattr(annotation, name):
            yield getattr(annotation, name)
    if isinstance(annotation, type):
        yield from _fields(annotation)


def _fields(record: type) -> Iterable[Any]:
    try:
        return get_type_hints(record, include_extras=True).values()
    except (NameError, TypeError):  # e.g. a pydantic model defined in a function
        return getattr(record, "__annotations__", {}).values()


def secrets_among(args: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return the values of the named arguments; ``args`` is data or JSON text."""
    wanted = frozenset(names)
    if not wanted:
        return ()
    if isinstance(args, str | bytes):
        try:
            args = json.loads(args)
        except (ValueError, RecursionError):
            return ()  # errors do not quote unreadable arguments
    if not isinstance(args, dict):
        return ()
    return tuple(leaf for name in wanted & args.keys() for leaf in _leaves(args[name]))


FIELDS = "pgqueue_fields"
"""The ``extra`` of a line before its record is filtered: a record factory of the application may
have set attributes of the same names, and ``logging`` would refuse to overwrite them."""


class Log:
    """Logs the lines of one module; its methods are those of :class:`logging.Logger`.

    Record factories, filters, handlers and formatters are code of the application.  What they raise
    is not raised here: a line that cannot be logged must cost no job and no thread of a worker.
    Such a line is written to stderr, at most once in ``LOST_EVERY`` seconds.
    """

    def __init__(self, name: str) -> None:
        self.disabled = False
        self._logger = logging.getLogger(name)
        if not any(isinstance(one, _Redacting) for one in self._logger.filters):
            self._logger.addFilter(_Redacting())

    def debug(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.DEBUG, message, args, options)

    def info(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.INFO, message, args, options)

    def warning(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.WARNING, message, args, options)

    def error(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.ERROR, message, args, options)

    def critical(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.CRITICAL, message, args, options)

    def exception(self, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(logging.ERROR, message, args, {"exc_info": True, **options})

    def log(self, level: int, message: str, *args: object, **options: Unpack[LogOptions]) -> None:
        self._log(level, message, args, options)

    def _log(self, level: int, message: str, args: tuple[object, ...], options: LogOptions) -> None:
        try:
            if self.disabled or not self._logger.isEnabledFor(level):
                return
            self._logger.log(
                level,
                message,
                *args,
                exc_info=options.get("exc_info"),
                extra={FIELDS: options.get("extra") or {}},
                stacklevel=3,  # the caller of debug, info and so on
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # of the user, and not of a handler
            _note_lost(message, error)


def logger(name: str) -> Log:
    """Return a module's log; its lines and tracebacks are redacted before any handler."""
    return Log(name)


LOST_EVERY = 10.0
_lost_at = float("-inf")


def _note_lost(message: str, error: BaseException) -> None:
    """Say on stderr that a line is lost, without any code of the application."""
    global _lost_at
    now = monotonic()
    if now - _lost_at < LOST_EVERY:
        return
    _lost_at = now
    with suppress(BaseException):
        sys.stderr.write(
            f"pgqueue: a line could not be logged: {type(error).__name__}: {redacted(message)}\n"
        )


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.update(record.__dict__.pop(FIELDS, {}))
        # Log aggregators group records by template, so template and arguments stay separate.
        if record.args:
            if isinstance(record.args, Mapping):  # for a template with names
                record.args = {name: _masked(value) for name, value in record.args.items()}
            else:
                record.args = tuple(map(_masked, record.args))
        else:
            record.msg = redacted(record.getMessage())
        if "meta" in record.__dict__:
            record.__dict__["meta"] = redacted_data(record.__dict__["meta"])
        # A formatter prints exc_text, if it is set, as the traceback.
        traceback = record.__dict__.pop(TRACEBACK, None)
        if traceback is not None:
            record.exc_text = traceback or None
        elif record.exc_info:
            record.exc_text = redacted(_FORMATTER.formatException(record.exc_info))
        return True


_FORMATTER = logging.Formatter()


class _Masked:
    """Wraps an argument of a log record that is not text, and redacts it when it is formatted."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return redacted(str(self._value))

    def __repr__(self) -> str:
        return redacted(repr(self._value))


def _masked(value: Any) -> Any:
    if isinstance(value, int | float):  # for %d and %.1f
        return value
    return redacted(value) if isinstance(value, str) else _Masked(value)


def _leaves(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif one is not None and not isinstance(one, bool):
            yield str(one)


def _forms(secrets: Iterable[str]) -> set[str]:
    """Return each secret unchanged, and in its Python, JSON, bytes and URL forms."""
    found: set[str] = set()
    for secret in filter(None, secrets):
        raw = secret.encode(errors="surrogatepass")
        found |= {
            secret,
            repr(secret)[1:-1],
            repr(f"\"'{secret}")[4:-1],  # inside a text with both kinds of quotes
            repr(raw)[2:-1],
            json.dumps(secret)[1:-1],
            json.dumps(secret, ensure_ascii=False)[1:-1],
            quote(raw, safe=""),
        }
    return found


def _without_beginning(text: str, secret: str) -> str:
    """Mask each place where the text begins to quote a secret, as far as it does."""
    kept = []
    while (at := text.find(secret[:PART_LENGTH])) >= 0:
        pairs = zip(text[at : at + len(secret)], secret, strict=False)
        end = at + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept += [text[:at], MASK]
        text = text[end:]
    return "".join([*kept, text])


def _any_of(known: set[str]) -> re.Pattern[str]:
    # The longest first: a secret may be the beginning of another.
    ordered = sorted(known, key=len, reverse=True)
    return re.compile(
        "|".join(
            re.escape(one) if len(one) >= LEAST_LENGTH else rf"(?<!\w){re.escape(one)}(?!\w)"
            for one in ordered
        )
    )
