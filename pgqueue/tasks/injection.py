"""Which leading parameters of a task pgqueue supplies: a session, a context."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from sqlalchemy.orm import Session

from pgqueue.context import JobContext
from pgqueue.database.async_sessions import is_async_session
from pgqueue.errors import TaskDefinitionError

R = TypeVar("R")


class Injected(StrEnum):
    SESSION = "Session"
    ASYNC_SESSION = "AsyncSession"
    CONTEXT = "JobContext"


@dataclass(frozen=True, slots=True)
class Injection:
    """The types of a task's leading parameters that pgqueue supplies, in their order."""

    parameters: tuple[Injected, ...]
    hints: Mapping[str, Any]
    is_async: bool

    @property
    def wants_session(self) -> bool:
        return Injected.SESSION in self.parameters or self.wants_async_session

    @property
    def wants_async_session(self) -> bool:
        return Injected.ASYNC_SESSION in self.parameters

    def call(
        self, function: Callable[..., R], context: JobContext, /, *args: Any, **kwargs: Any
    ) -> R:
        """Call the task's function with the supplied parameters before its arguments."""
        if not self.parameters:
            return function(*args, **kwargs)  # the most frequent case, without a loop
        supplied = [
            context if kind is Injected.CONTEXT else context.session for kind in self.parameters
        ]
        return function(*supplied, *args, **kwargs)

    def refuse_process(self, task_name: str) -> None:
        """Refuse parameters that cannot be supplied, and coroutines, in a child process."""
        if self.is_async:
            raise TaskDefinitionError(
                f"task {task_name}: executor='process' runs plain functions, one at a time; make "
                "it `def`, or omit executor"
            )
        if self.wants_session:
            raise TaskDefinitionError(
                f"task {task_name}: executor='process' has no Session to fill in: what a process "
                "of its own writes cannot commit with the end of the job; omit executor for "
                "transactional work, or open queue.session() in the handler"
            )


_MEANT = {"session": "Session", "ctx": "JobContext", "async_session": "AsyncSession"}
"""The type that a parameter of this name is expected to have."""


def injection_of(function: Callable[..., Any], *, task_name: str) -> Injection:
    """Read a task's signature; refuses parameters that would be supplied wrongly or not at all."""
    hints = _hints(function, task_name)
    parameters = list(inspect.signature(function).parameters.values())
    kinds = [_kind(hints.get(parameter.name)) for parameter in parameters]
    count = next((index for index, kind in enumerate(kinds) if kind is None), len(kinds))
    leading = tuple(kind for kind in kinds[:count] if kind is not None)
    for parameter, kind in zip(parameters[count:], kinds[count:], strict=True):
        if kind is not None:
            raise TaskDefinitionError(
                f"task {task_name}: parameter {parameter.name!r} is a {kind}, which pgqueue fills "
                "in only as one of the first parameters; move it to the front"
            )
    keyword_only = [p for p in parameters[:count] if p.kind is p.KEYWORD_ONLY]
    if keyword_only or len(set(leading)) < len(leading):
        raise TaskDefinitionError(
            f"task {task_name}: a session and a context come first, once each, and not after *"
        )
    if count < len(parameters):
        _refuse_vague_first(parameters[count], hints, task_name)
    is_async = inspect.iscoroutinefunction(function)
    _refuse_mismatch(leading, is_async, task_name)
    return Injection(leading, hints, is_async)


def _hints(function: Callable[..., Any], task_name: str) -> Mapping[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TaskDefinitionError(
            f"task {task_name}: the annotation {error.name!r} cannot be read at run time; "
            "import it outside `if TYPE_CHECKING:`, and define it before the task"
        ) from error


def _kind(annotation: Any) -> Injected | None:
    if annotation is JobContext:
        return Injected.CONTEXT
    if isinstance(annotation, type) and issubclass(annotation, Session):
        return Injected.SESSION
    return Injected.ASYNC_SESSION if is_async_session(annotation) else None


def _refuse_vague_first(first: inspect.Parameter, hints: Mapping[str, Any], name: str) -> None:
    """A type checker treats such a parameter as a session and drops it from the signature."""
    if first.name in _MEANT and first.name not in hints:
        raise TaskDefinitionError(
            f"task {name}: the first parameter {first.name!r} has no annotation, and pgqueue fills "
            f"in by type: write `{first.name}: {_MEANT[first.name]}`, or, if it is an argument of "
            "the job, annotate it with its type"
        )
    if hints.get(first.name) in (object, Any):
        raise TaskDefinitionError(
            f"task {name}: the first parameter {first.name!r} is annotated {hints[first.name]!r}; "
            "give it the type of the argument, or omit the annotation"
        )


def _refuse_mismatch(leading: tuple[Injected, ...], is_async: bool, task_name: str) -> None:
    if Injected.SESSION in leading and Injected.ASYNC_SESSION in leading:
        raise TaskDefinitionError(f"task {task_name}: ask for a Session or an AsyncSession")
    if is_async and Injected.SESSION in leading:
        raise TaskDefinitionError(
            f"task {task_name}: an async task is given an AsyncSession; a Session would block "
            "the event loop that all async tasks of the worker share"
        )
    if not is_async and Injected.ASYNC_SESSION in leading:
        raise TaskDefinitionError(
            f"task {task_name}: a task that asks for an AsyncSession must be `async def`"
        )
