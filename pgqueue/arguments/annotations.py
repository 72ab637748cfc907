"""Which annotations a task may have; makes of each the schemas that pydantic-core runs."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any

from pydantic_core import SchemaValidator
from pydantic_core import core_schema as core

from pgqueue.arguments import forms
from pgqueue.arguments.forms import Encoder, Form
from pgqueue.arguments.refusals import CannotTravel

_INJECTED = {"Session", "AsyncSession", "scoped_session", "async_scoped_session", "JobContext"}


class Annotations:
    """Reads the annotations of one signature."""

    def __init__(self, encoders: Mapping[type, Encoder]) -> None:
        """``encoders``: those of types of the application."""
        self._encoders = encoders
        self._named: dict[Any, Form] = {}
        self._definitions: list[core.CoreSchema] = []

    def form_of(self, annotation: Any) -> Form:
        """Return the schemas for the values of an annotation, or say why there are none."""
        annotation = _bare(annotation)
        if annotation is Any or annotation is inspect.Parameter.empty:
            return forms.ANY
        origin, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
        if origin in (typing.Union, UnionType):
            return forms.one_of(
                [self.form_of(part) for part in parts], str(annotation), self.compiled
            )
        if origin is typing.Literal:
            return forms.literal_of(parts)
        if origin is dict:
            key, item = parts or (str, Any)
            if _bare(key) is not str:
                raise CannotTravel(f"is a dict with keys of {_name(key)}: JSON keys are str")
            return forms.dict_of(self.form_of(item))
        if origin is tuple and annotation is not tuple and parts[1:] != (...,):
            return forms.tuple_of([self.form_of(part) for part in parts])
        if origin in (list, tuple, set, frozenset):
            return forms.array_of(origin, self.form_of(parts[0] if parts else Any))
        if type(annotation).__name__ == "TypeAliasType":
            return self._once(annotation, lambda alias: self.form_of(alias.__value__))
        if isinstance(annotation, type) and annotation is origin:
            return forms.SCALARS.get(annotation) or self._once(annotation, self._class)
        raise _no_form(annotation)

    def compiled(self, schema: core.CoreSchema) -> SchemaValidator:
        """Compile a schema, once all annotations of the signature have been read."""
        return SchemaValidator(core.definitions_schema(schema, self._definitions))

    def _once(self, named: Any, build: Callable[[Any], Form]) -> Form:
        """Define a named type, which may contain values of the same type."""
        if named not in self._named:
            ref = f"{named.__name__} {len(self._named)}"
            form = self._named[named] = Form(core.definition_reference_schema(ref))
            built = build(named)
            # Not built.schema with the ref: an alias may be of a type that has one.
            self._definitions.append(core.chain_schema([built.schema], ref=ref))
            self._named[named] = dataclasses.replace(form, natives=built.natives)
        return self._named[named]

    def _class(self, kind: Any) -> Form:
        if kind in self._encoders:
            return forms.own_type_of(kind, self._encoders[kind])
        if hasattr(kind, "__mapper__"):
            raise CannotTravel(
                f"is the ORM class {kind.__name__}, whose objects belong to one session: "
                "pass the primary key and load the object in the task"
            )
        if issubclass(kind, Enum):
            return forms.member_of(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        # Not typing.is_typeddict: it does not recognise those of typing_extensions.
        if issubclass(kind, dict) and hasattr(kind, "__required_keys__"):
            return self._typed_dict(kind)
        if hasattr(
            kind, "model_validate_json"
        ):  # pydantic is imported by the application, if at all
            return forms.model_of(kind)
        raise _no_form(kind)

    def _dataclass(self, kind: Any) -> Form:
        taken = inspect.signature(kind).parameters
        if {field.name for field in dataclasses.fields(kind) if field.init} != set(taken):
            raise CannotTravel(
                f"is the dataclass {kind.__name__}, whose constructor takes other arguments "
                "than its fields: use a plain dataclass"
            )
        hints = _hints(kind)
        required = {name for name, each in taken.items() if each.default is each.empty}
        fields = self._fields(kind, {name: hints[name] for name in taken})
        return forms.dataclass_of(kind, fields, required)

    def _typed_dict(self, kind: Any) -> Form:
        required = set(kind.__required_keys__)
        # With `from __future__ import annotations` the class has not evaluated these markers.
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is typing.NotRequired:
                required.discard(name)
            if typing.get_origin(hint) is typing.Required:
                required.add(name)
        return forms.typed_dict_of(self._fields(kind, _hints(kind)), required)

    def _fields(self, kind: Any, hints: Mapping[str, Any]) -> dict[str, Form]:
        fields: dict[str, Form] = {}
        for name, hint in hints.items():
            try:
                fields[name] = self.form_of(hint)
            except CannotTravel as error:
                what = f"has the field {kind.__name__}.{name}, which {error}"
                raise CannotTravel(what) from error
        return fields


def _bare(annotation: Any) -> Any:
    """Remove metadata that only a type checker or a validator reads."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return NoneType if annotation is None else annotation


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError) as error:
        raise CannotTravel(
            f"is {kind.__name__}, whose own annotations cannot be resolved ({error}): "
            "import their types at run time"
        ) from error


def _no_form(annotation: Any) -> CannotTravel:
    name = _name(annotation)
    if isinstance(annotation, typing.TypeVar):
        return CannotTravel(f"is annotated {name}, and not with a type: write Secret[str], say")
    if name in _INJECTED:
        return CannotTravel(f"is a {name}, which is injected: put it first in the signature")
    return CannotTravel(
        f"is annotated {name}, which JSON cannot carry: annotate a type that can travel "
        "(str, int, list[...], UUID, a dataclass, ...), pass an id and load the object in the "
        "task, or say how to write it with PgQueue(encoders=...)"
    )


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
