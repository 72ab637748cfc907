"""Middleware: context managers that an application puts around its handlers."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Any

from pgqueue.context import Around, JobContext, nothing_around
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


def as_context_manager(middleware: Middleware) -> Callable[[JobContext], Any]:
    """Make a generator function return a context manager; refuses what is no function."""
    if inspect.isgeneratorfunction(middleware):
        return contextmanager(middleware)
    if inspect.isasyncgenfunction(middleware):
        return asynccontextmanager(middleware)
    if not callable(middleware) or inspect.iscoroutinefunction(middleware):
        raise TaskDefinitionError(
            f"middleware {middleware!r} cannot surround a handler: give a function of one "
            "JobContext that yields once, or that returns a context manager"
        )
    return middleware


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
    name = getattr(layer, "__qualname__", repr(layer))
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
