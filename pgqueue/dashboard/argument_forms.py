"""The arguments of a task as fields of a form: JSON text, one field for each parameter.

An empty field keeps what the job has, or means the default.  So the value of a secret is never sent
to the browser: its field is empty.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import formatannotation
from typing import Annotated, Any, get_args, get_origin

from pgqueue.dashboard.routing import Request
from pgqueue.redaction import MASK, secrets_among
from pgqueue.tasks import Task

PREFIX = "arg."
"""Before the name of a parameter in the name of its field."""
LONGEST_LINE = 60
LONGEST_FIELD = 20_000
"""Characters; a longer value is not put into a form, and stays if its field is left empty."""
LONGEST_INPUT = 200_000


@dataclass(frozen=True, slots=True)
class Field:
    """The field of one argument."""

    name: str
    type: str
    text: str = ""
    """Its value as JSON."""
    hint: str = ""
    error: str = ""
    is_secret: bool = False

    @property
    def key(self) -> str:
        return PREFIX + self.name


def type_in_words(task: Task[..., Any], name: str) -> str:
    """How an argument is declared; empty if it has no annotation."""
    hint = task.injection.hints.get(name, Any)
    if get_origin(hint) is Annotated:  # as of Secret[...]
        hint = get_args(hint)[0]
    return "" if hint is Any else formatannotation(hint)


def as_text(value: Any) -> str:
    """JSON for a person: a long value on several lines."""
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= LONGEST_LINE else json.dumps(value, ensure_ascii=False, indent=2)


def fields_of(
    task: Task[..., Any], shown: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[Field]:
    """The fields for the arguments of a job, or of a new one if ``stored`` is empty.

    ``shown``: the arguments with their secrets masked.
    """
    defaults = task.payload.with_defaults({})
    fields = []
    for name in task.payload.names:
        field = Field(name, type_in_words(task, name), is_secret=name in task.settings.secret_args)
        text = as_text(shown[name]) if name in shown and not field.is_secret else ""
        if name in stored:
            hint = "secret; empty: it stays" if field.is_secret else "empty: it stays"
            hint = "too long to show; empty: it stays" if len(text) > LONGEST_FIELD else hint
        elif name in defaults:
            # The default of a secret is in the code, and is not shown either.
            hint = "empty: the default" if field.is_secret else f"empty: {defaults[name]!r:.60}"
        else:
            hint = "secret" if field.is_secret else ""
        fields.append(replace(field, text=text if len(text) <= LONGEST_FIELD else "", hint=hint))
    return fields


def read_fields(
    request: Request, task: Task[..., Any], fields: list[Field], shown: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Field]]:
    """The arguments that differ from those of the form, as JSON data; and the form as it was sent.

    A field that says what the form has shown is no change, so a mask is never stored.
    """
    given: dict[str, Any] = {}
    sent = []
    for field in fields:
        text = request.posted(field.key, longest=LONGEST_INPUT).strip()
        sent.append(replace(field, text="" if field.is_secret else text))
        if not text:
            continue
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            sent[-1] = replace(sent[-1], error='is not JSON; a text needs quotes, as in "ada"')
            continue
        if field.is_secret or field.name not in shown or not _same(value, shown[field.name]):
            given[field.name] = value
            if MASK in field.text and MASK in text:
                error = f"has {MASK} in place of a secret; leave it as it was, or write the secret"
                sent[-1] = replace(sent[-1], error=error)
    faults = task.payload.faults(given)  # which quote no value
    return given, [replace(one, error=faults.get(one.name, one.error)) for one in sent]


def secrets_given(task: Task[..., Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """The secrets among arguments that were sent, which no answer may quote."""
    return secrets_among(dict(given), task.settings.secret_args)


def _same(one: Any, other: Any) -> bool:
    """Whether JSON values are the same; 1, 1.0 and true are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
