"""From an annotation to the codec that carries its values."""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from enum import Enum
from types import UnionType
from typing import Any

from pgqueue.payload.choices import Union, member_of, one_of
from pgqueue.payload.codec import Codec
from pgqueue.payload.containers import dict_of, list_of, set_of, tuple_of, tuple_with
from pgqueue.payload.plain import ANY
from pgqueue.payload.records import Fields, dataclass_of, pydantic_model_of, typed_dict_of
from pgqueue.payload.refusals import CannotTravel
from pgqueue.payload.scalars import SCALAR_CODECS

_INJECTED = {"Session", "AsyncSession", "scoped_session", "async_scoped_session", "JobContext"}


class Annotations:
    """Builds the codecs of one signature, each class once, so that a class may name itself."""

    def __init__(self) -> None:
        self._classes: dict[Any, Codec] = {}

    def codec_of(self, annotation: Any) -> Codec:
        """Find how the values of an annotation travel, or say why they cannot."""
        annotation = _bare(annotation)
        if annotation is Any or annotation is inspect.Parameter.empty:
            return ANY
        origin = typing.get_origin(annotation)
        if origin in (typing.Union, UnionType):
            members = [self.codec_of(member) for member in typing.get_args(annotation)]
            return Union(members).codec()
        if origin is typing.Literal:
            return one_of(typing.get_args(annotation))
        if (origin or annotation) in _CONTAINERS:
            return self._container(annotation)
        if annotation in SCALAR_CODECS:
            return SCALAR_CODECS[annotation]
        if isinstance(annotation, type) and origin is None:
            return self._class(annotation)
        raise _no_form(annotation)

    def _container(self, annotation: Any) -> Codec:
        kind = typing.get_origin(annotation) or annotation
        items = typing.get_args(annotation)
        if kind is tuple:
            return self._tuple(annotation, items)
        if kind is dict:
            key, item = items or (str, Any)
            if _bare(key) is not str:
                raise CannotTravel(f"is a dict with keys of {_name(key)}: JSON keys are str")
            return dict_of(self.codec_of(item))
        item = self.codec_of(items[0] if items else Any)
        return list_of(item) if kind is list else set_of(item, kind)

    def _tuple(self, annotation: Any, items: tuple[Any, ...]) -> Codec:
        if typing.get_origin(annotation) is None:
            return tuple_of(ANY)
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple_of(self.codec_of(items[0]))
        return tuple_with([self.codec_of(item) for item in items])

    def _class(self, kind: Any) -> Codec:
        if kind in self._classes:
            return self._classes[kind]
        build = self._builder(kind)
        # Until it is built, a field of the class's own type finds the promise of its codec.
        self._classes[kind] = _promised(kind, lambda: self._classes[kind])
        self._classes[kind] = build(kind)
        return self._classes[kind]

    def _builder(self, kind: Any) -> Callable[[Any], Codec]:
        if hasattr(kind, "__mapper__"):
            raise CannotTravel(
                f"is the ORM class {kind.__name__}, whose objects belong to one session: "
                "pass the primary key and load the object in the task"
            )
        if issubclass(kind, Enum):
            return member_of
        if dataclasses.is_dataclass(kind):
            return self._dataclass
        if typing.is_typeddict(kind):
            return self._typed_dict
        if _is_pydantic_model(kind):
            return pydantic_model_of
        raise _no_form(kind)

    def _dataclass(self, kind: Any) -> Codec:
        taken = inspect.signature(kind).parameters
        fields = [field for field in dataclasses.fields(kind) if field.init]
        names = tuple(field.name for field in fields)
        if set(names) != set(taken):
            raise CannotTravel(
                f"is the dataclass {kind.__name__}, whose constructor takes other arguments "
                "than its fields: use a plain dataclass"
            )
        hints = _hints(kind)
        required = frozenset(
            name for name in names if taken[name].default is inspect.Parameter.empty
        )
        codecs = {name: self.codec_of(hints[name]) for name in names}
        return dataclass_of(kind, names, Fields(codecs, required=required))

    def _typed_dict(self, kind: Any) -> Codec:
        codecs = {name: self.codec_of(hint) for name, hint in _hints(kind).items()}
        required = set(kind.__required_keys__)
        # With `from __future__ import annotations` the class has not seen these markers.
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is typing.NotRequired:
                required.discard(name)
            if typing.get_origin(hint) is typing.Required:
                required.add(name)
        return typed_dict_of(kind, Fields(codecs, required=frozenset(required)))


_CONTAINERS = (list, dict, tuple, set, frozenset)


def _bare(annotation: Any) -> Any:
    """Take off what only a type checker or a validator reads."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError) as error:
        raise CannotTravel(
            f"is {kind.__name__}, whose own annotations cannot be resolved ({error}): "
            "import their types at run time"
        ) from error


def _promised(kind: type, codec: Callable[[], Codec]) -> Codec:
    return Codec(
        expects=f"a {kind.__name__}",
        encode=lambda value: codec().encode(value),
        decode=lambda value: codec().decode(value),
        is_unbounded=True,
    )


def _is_pydantic_model(kind: type) -> bool:
    # A model can only exist where its application has imported pydantic.
    pydantic = sys.modules.get("pydantic")
    base = getattr(pydantic, "BaseModel", None)
    return isinstance(base, type) and issubclass(kind, base)


def _no_form(annotation: Any) -> CannotTravel:
    name = _name(annotation)
    if name in _INJECTED:
        return CannotTravel(f"is a {name}, which is injected: put it first in the signature")
    return CannotTravel(
        f"is annotated {name}, which JSON cannot carry: annotate a type that can travel "
        "(str, int, list[...], UUID, a dataclass, ...), or pass an id and load the object "
        "in the task"
    )


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
