"""From an annotation to the codec that carries its values."""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Any

from pgqueue.payload.choices import Union, member_of, one_of
from pgqueue.payload.codec import Codec
from pgqueue.payload.containers import dict_of, list_of, set_of, tuple_of, tuple_with
from pgqueue.payload.plain import ANY
from pgqueue.payload.records import Fields, dataclass_of, pydantic_model_of, typed_dict_of
from pgqueue.payload.refusals import CannotTravel
from pgqueue.payload.scalars import SCALAR_CODECS

_CONTAINERS = (list, dict, tuple, set, frozenset)
_INJECTED = {"Session", "AsyncSession", "scoped_session", "async_scoped_session", "JobContext"}


class Annotations:
    """Builds the codecs of one signature."""

    def __init__(self) -> None:
        self._named: dict[Any, Codec] = {}

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
        if type(annotation).__name__ == "TypeAliasType":
            return self._once(annotation, lambda alias: self.codec_of(alias.__value__))
        if isinstance(annotation, type) and origin is None:
            return SCALAR_CODECS.get(annotation) or self._once(annotation, self._class)
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

    def _once(self, named: Any, build: Callable[[Any], Codec]) -> Codec:
        """Build the codec of a named type, which may contain values of the same type."""
        if named not in self._named:
            # Until it is built, the type finds in itself the promise of its codec.
            self._named[named] = _promised(named, lambda: self._named[named])
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
        # Not typing.is_typeddict: it does not know those of typing_extensions.
        if issubclass(kind, dict) and hasattr(kind, "__required_keys__"):
            return self._typed_dict(kind)
        if _is_pydantic_model(kind):
            return pydantic_model_of(kind)
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
        codecs = {name: self._field(kind, name, hints[name]) for name in names}
        return dataclass_of(kind, names, Fields(codecs, required=required))

    def _typed_dict(self, kind: Any) -> Codec:
        codecs = {name: self._field(kind, name, hint) for name, hint in _hints(kind).items()}
        required = set(kind.__required_keys__)
        # With `from __future__ import annotations` the class has not seen these markers.
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is typing.NotRequired:
                required.discard(name)
            if typing.get_origin(hint) is typing.Required:
                required.add(name)
        return typed_dict_of(kind, Fields(codecs, required=frozenset(required)))

    def _field(self, kind: Any, name: str, annotation: Any) -> Codec:
        try:
            return self.codec_of(annotation)
        except CannotTravel as error:
            raise CannotTravel(f"has the field {kind.__name__}.{name}, which {error}") from error


def _bare(annotation: Any) -> Any:
    """Take off what only a type checker or a validator reads."""
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


def _promised(kind: Any, codec: Callable[[], Codec]) -> Codec:
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
