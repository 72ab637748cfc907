"""Builds the codec for the values of an annotation."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any

from pgqueue.arguments.choices import Union, literal_of, member_of
from pgqueue.arguments.codec import ANY, Codec
from pgqueue.arguments.json_copy import is_model
from pgqueue.arguments.records import array_of, dict_of, model_of, record_of, tuple_with
from pgqueue.arguments.refusals import CannotTravel
from pgqueue.arguments.scalars import SCALAR_CODECS

_CONTAINERS = (list, dict, tuple, set, frozenset)
_INJECTED = {"Session", "AsyncSession", "scoped_session", "async_scoped_session", "JobContext"}


class Annotations:
    """Builds the codecs of one signature."""

    def __init__(self) -> None:
        self._named: dict[Any, Codec] = {}

    def codec_of(self, annotation: Any) -> Codec:
        """Return the codec for the values of an annotation, or say why there is none."""
        annotation = _bare(annotation)
        if annotation is Any or annotation is inspect.Parameter.empty:
            return ANY
        origin = typing.get_origin(annotation)
        if origin in (typing.Union, UnionType):
            members = [self.codec_of(member) for member in typing.get_args(annotation)]
            return Union(members).codec()
        if origin is typing.Literal:
            return literal_of(typing.get_args(annotation))
        if (origin or annotation) in _CONTAINERS:
            return self._container(origin or annotation, annotation)
        if type(annotation).__name__ == "TypeAliasType":
            return self._once(annotation, lambda alias: self.codec_of(alias.__value__))
        if isinstance(annotation, type) and origin is None:
            return SCALAR_CODECS.get(annotation) or self._once(annotation, self._class)
        raise _no_form(annotation)

    def _container(self, kind: Any, annotation: Any) -> Codec:
        parts = typing.get_args(annotation)
        if kind is dict:
            key, item = parts or (str, Any)
            if _bare(key) is not str:
                raise CannotTravel(f"is a dict with keys of {_name(key)}: JSON keys are str")
            return dict_of(self.codec_of(item))
        if kind is not tuple or annotation is tuple or parts[1:] == (...,):
            return array_of(kind, self.codec_of(parts[0] if parts else Any))
        return tuple_with([self.codec_of(part) for part in parts])

    def _once(self, named: Any, build: Callable[[Any], Codec]) -> Codec:
        """Build the codec of a named type, which may contain values of the same type."""
        if named not in self._named:
            # Until its codec is built, the type refers to a placeholder for it.
            self._named[named] = Codec(
                f"a {named.__name__}",
                encode=lambda value: self._named[named].encode(value),
                decode=lambda value: self._named[named].decode(value),
                is_unbounded=True,
            )
            self._named[named] = build(named)
        return self._named[named]

    def _class(self, kind: Any) -> Codec:
        if hasattr(kind, "__mapper__"):
            raise CannotTravel(
                f"is the ORM class {kind.__name__}, whose objects belong to one session: "
                "pass the primary key and load the object in the task"
            )
        if issubclass(kind, Enum):
            return member_of(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        # Not typing.is_typeddict: it does not recognise those of typing_extensions.
        if issubclass(kind, dict) and hasattr(kind, "__required_keys__"):
            return self._typed_dict(kind)
        if is_model(kind):
            return model_of(kind)
        raise _no_form(kind)

    def _dataclass(self, kind: Any) -> Codec:
        taken = inspect.signature(kind).parameters
        if {field.name for field in dataclasses.fields(kind) if field.init} != set(taken):
            raise CannotTravel(
                f"is the dataclass {kind.__name__}, whose constructor takes other arguments "
                "than its fields: use a plain dataclass"
            )
        hints = _hints(kind)
        required = {name for name, each in taken.items() if each.default is each.empty}
        return self._record(kind, {name: hints[name] for name in taken}, required)

    def _typed_dict(self, kind: Any) -> Codec:
        required = set(kind.__required_keys__)
        # With `from __future__ import annotations` the class has not evaluated these markers.
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is typing.NotRequired:
                required.discard(name)
            if typing.get_origin(hint) is typing.Required:
                required.add(name)
        return self._record(kind, _hints(kind), required)

    def _record(self, kind: Any, hints: Mapping[str, Any], required: set[str]) -> Codec:
        fields: dict[str, Codec] = {}
        for name, hint in hints.items():
            try:
                fields[name] = self.codec_of(hint)
            except CannotTravel as error:
                what = f"has the field {kind.__name__}.{name}, which {error}"
                raise CannotTravel(what) from error
        return record_of(kind, fields, required)


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
        "(str, int, list[...], UUID, a dataclass, ...), or pass an id and load the object "
        "in the task"
    )


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
