"""Context managers of an application: middleware around its handlers, resources of its workers."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any

from pgqueue.context import Around, JobContext, Resource, name_of, nothing_around
from pgqueue.errors import PgQueueError, TaskDefinitionError

Middleware = Callable[
    [JobContext],
    AbstractContextManager[Any]
    | AbstractAsyncContextManager[Any]
    | Iterator[None]
    | AsyncIterator[None],
]
"""Returns the context manager to enter around a handler, or is a generator function that yields
once."""

AsyncAround = Callable[[JobContext], AbstractAsyncContextManager[None]]


def as_context_manager(function: Any, refusal: str) -> Callable[..., Any]:
    """Make a generator function return a context manager; refuses what is no function."""
    if inspect.isgeneratorfunction(function):
        return contextmanager(function)
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise TaskDefinitionError(refusal)
    return function  # type: ignore[no-any-return]  # any callable


def middleware_of(function: Middleware) -> Callable[[JobContext], Any]:
    """The function that returns the context manager around a handler.

    Raises TaskDefinitionError.
    """
    return as_context_manager(
        function,
        f"middleware {function!r} cannot surround a handler: give a function of one JobContext "
        "that yields once, or that returns a context manager",
    )


def resource_of(function: Resource[Any]) -> Callable[[], Any]:
    """The function that returns the context manager of a resource.  Raises TaskDefinitionError."""
    made = as_context_manager(
        function,
        f"resource {function!r} cannot be opened and closed: give a function without parameters "
        "that yields once, or that returns a context manager",
    )
    with suppress(ValueError):  # a class in C without a signature
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise TaskDefinitionError(
                f"resource {name_of(function)}: workers call it without arguments: {error}"
            ) from None
    return made


def layers_of(framework: Around, middlewares: Sequence[Any]) -> list[Any]:
    """Return what surrounds each handler, outermost first."""
    return [*([] if framework is nothing_around else [framework]), *middlewares]


def around_handlers(layers: Sequence[Callable[[JobContext], Any]]) -> Around:
    """Return one context manager for all layers, outermost first, around plain handlers."""
    if not layers:
        return nothing_around

    @contextmanager
    def around(context: JobContext) -> Iterator[None]:
        has_failed = True
        with ExitStack() as stack:
            for layer in layers:
                manager = layer(context)
                if not hasattr(type(manager), "__enter__"):
                    raise _is_unusable(layer, context, manager)
                stack.enter_context(manager)
            yield
            has_failed = False
        if has_failed:
            raise _was_suppressed(context)

    return around


def around_async_handlers(layers: Sequence[Callable[[JobContext], Any]]) -> AsyncAround:
    """The same around async handlers.  A context manager that can be entered by ``async with`` is
    entered so."""
    if not layers:
        return nothing_around

    @asynccontextmanager
    async def around(context: JobContext) -> AsyncIterator[None]:
        has_failed = True
        async with AsyncExitStack() as stack:
            for layer in layers:
                manager = layer(context)
                if hasattr(type(manager), "__aenter__"):
                    await stack.enter_async_context(manager)
                elif hasattr(type(manager), "__enter__"):
                    stack.enter_context(manager)
                else:
                    raise _is_unusable(layer, context, manager)
            yield
            has_failed = False
        if has_failed:
            raise _was_suppressed(context)

    return around


def _is_unusable(layer: Any, context: JobContext, manager: Any) -> TaskDefinitionError:
    name = name_of(layer)
    remedy = "return a context manager, or let it yield once"
    if hasattr(type(manager), "__aenter__"):
        remedy = "this handler is a plain function: return a context manager that has __enter__ too"
    return TaskDefinitionError(
        f"task {context.task}: the middleware {name} returned {type(manager).__name__}, which "
        f"cannot surround the handler; {remedy}"
    )


def _was_suppressed(context: JobContext) -> PgQueueError:
    return PgQueueError(
        f"task {context.task}: a middleware has suppressed the error of the handler, and the job "
        "would count as succeeded; let the error pass through the middleware"
    )
